"""The plugins that are installed: found, loaded and asked one at a time, so that a broken one harms only itself."""

from __future__ import annotations

import difflib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import pluggy

from octavo import hooks
from octavo.grammar import Grammar
from octavo.hooks import HOOKS, PROJECT, GrammarRefused, LogitsProcessor, RequestSummary, StepStats

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionSpec
    from octavo.attention.device import Device

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind")


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin came from."""

    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @classmethod
    def of(cls, entry_point: EntryPoint) -> Origin:
        """Its distribution's name and version; an entry point without one is called by what it loads."""
        if entry_point.dist is None:
            return cls(entry_point.value, "", entry_point.name)
        return cls(*_identity(entry_point.dist), entry_point.name)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a plugin."""

    origin: Origin
    where: str
    """"import", or the name of a hook."""
    error: BaseException

    def __str__(self) -> str:
        return f"{self.origin} (entry point {self.origin.entry_point}), {self.where}: {self.error_line}"

    @property
    def error_line(self) -> str:
        """As `describe`."""
        return describe(self.error)


@dataclass(frozen=True, slots=True)
class Registered(Generic[Kind]):
    """A class that a plugin registered, and where it came from."""

    kind: type[Kind]
    origin: Origin
    conflict: str | None = None
    """Why it cannot be used under its name: another distribution registers the same."""


class Plugins:
    """The plugins named by `entry_points`; by default those of every distribution on `sys.path`."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hooks)
        self._origins: dict[str, Origin] = {}
        self._raised: set[tuple[Origin, str]] = set()
        self._collected: dict[str, Any] = {}
        self.faults: list[Fault] = []
        """Everything that was found wrong so far; each was logged when it was found."""
        for entry_point in self._installed() if entry_points is None else entry_points:
            self._load(entry_point)
        self._callers = {hook: self._one_by_one(hook) for hook in HOOKS}

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of the plugins that were loaded, in the order they were."""
        return tuple(self._origins.values())

    def rank_backends(self, spec: AttentionSpec, device: Device, names: Sequence[str]) -> list[str] | None:
        """The first plugin's order of preference, some of `names`; None without an answer."""
        for origin, answer in self._ask("octavo_rank_backends", spec=spec, device=device, names=names):
            if not isinstance(answer, str) and isinstance(answer, Sequence) and all(name in names for name in answer):
                return list(answer)
            error = TypeError(f"{answer!r} is not a sequence of names out of {', '.join(names)}")
            self._fault_once(origin, "octavo_rank_backends", error)
        return None

    def logits_processors(self, params: Any, tokenizer: Any, end_ids: Set[int] = frozenset()) -> list[LogitsProcessor]:
        """The processors for one sequence, in the order of the plugins. Raises GrammarRefused."""
        processors: list[LogitsProcessor] = []
        arguments = {"params": params, "tokenizer": tokenizer, "end_ids": end_ids}
        for origin, answer in self._ask("octavo_logits_processors", **arguments):
            if callable(answer):
                processors.append(answer)
            else:
                self._fault_once(origin, "octavo_logits_processors", TypeError(f"{answer!r} cannot be called"))
        grammar: Grammar | None = getattr(params, "grammar", None)
        if grammar is not None and all(getattr(one, "grammar", None) != grammar for one in processors):
            raise GrammarRefused("no installed plugin enforces grammars: pip install 'octavo[grammar]'")
        return processors

    def watched(self, hook: str) -> bool:
        """Does any plugin observe this hook? What it would be told need not be worked out otherwise."""
        return bool(self._callers[hook])

    def step_finished(self, step: StepStats) -> None:
        """Tell the observers of steps."""
        self._tell("octavo_step_finished", step=step)

    def request_finished(self, request: RequestSummary) -> None:
        """Tell the observers of requests."""
        self._tell("octavo_request_finished", request=request)

    def _installed(self) -> Iterator[EntryPoint]:
        """Of two distributions with one name on `sys.path` the first counts, as for an import."""
        seen = set()
        for distribution in distributions():
            try:
                found = distribution.entry_points.select(group=PROJECT)
            except Exception as error:
                self._fault(Origin(*_identity(distribution), "?"), "entry_points.txt", error)
                continue
            if found and (name := _identity(distribution)[0]) not in seen:
                seen.add(name)
                yield from found

    def _load(self, entry_point: EntryPoint) -> None:
        origin = Origin.of(entry_point)
        name = f"{origin.distribution}:{origin.entry_point}"
        try:
            plugin = entry_point.load()
            hash(plugin)  # pluggy keeps sets of plugins
            if self._manager.register(plugin, name) is None:
                return
            self._origins[name] = origin
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # see `_ask`
            if self._manager.has_plugin(name):  # asked by name: a plugin's own comparison may raise too
                self._manager.unregister(name=name)
            self._fault(origin, "import", error)
            return
        self._check_hooks(plugin, origin)

    def _check_hooks(self, plugin: object, origin: Origin) -> None:
        """Name hooks that octavo does not have, and plugins that have none."""
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            self._fault(origin, "import", TypeError(f"{plugin!r} has no function that is marked with octavo.hookimpl"))
        for caller in callers:
            optional = any(one.optionalhook for one in caller.get_hookimpls() if one.plugin is plugin)
            if not caller.has_spec() and not optional:
                close = difflib.get_close_matches(caller.name, HOOKS, n=1) or [f"one of {', '.join(HOOKS)}"]
                self._fault(origin, caller.name, LookupError(f"octavo has no such hook, did you mean {close[0]}?"))

    def _one_by_one(self, hook: str) -> list[tuple[Origin, pluggy.HookCaller]]:
        """Each plugin's own part of a hook, in the order in which pluggy calls them."""
        plugins = [one.plugin for one in reversed(getattr(self._manager.hook, hook).get_hookimpls())]
        return [
            (
                self._origins[self._manager.get_name(plugin) or ""],
                self._manager.subset_hook_caller(hook, [other for other in plugins if other is not plugin]),
            )
            for plugin in plugins
        ]

    def _ask(self, hook: str, **arguments: Any) -> Iterator[tuple[Origin, Any]]:
        """The answers that are not None; a plugin that raises has none."""
        for origin, caller in self._callers[hook]:
            try:
                answer = caller(**arguments)
            except (GrammarRefused, KeyboardInterrupt):
                raise
            except BaseException as error:  # sys.exit, and what a library in Rust panics with, is no Exception
                self._fault_once(origin, hook, error)
                continue
            if isinstance(answer, list) and not _answers_once(caller):
                answer = answer[0] if answer else None
            if answer is not None:
                yield origin, answer

    def _tell(self, hook: str, **arguments: Any) -> None:
        for observer in list(self._callers[hook]):
            origin, caller = observer
            try:
                caller(**arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._callers[hook].remove(observer)
                self._fault(origin, hook, error)

    def collect(
        self,
        hook: str,
        check: Callable[[object], None],
        name_of: Callable[[type[Kind]], str],
        own: Iterable[Registered[Kind]] = (),
    ) -> tuple[Registered[Kind], ...]:
        """The classes that plugins register with `hook`, behind `own`, as far as `check` raises nothing; asked once."""
        if hook not in self._collected:
            self._collected[hook] = self._checked(hook, check, name_of, own)
        return cast(tuple[Registered[Kind], ...], self._collected[hook])

    def _checked(
        self,
        hook: str,
        check: Callable[[object], None],
        name_of: Callable[[type[Kind]], str],
        own: Iterable[Registered[Kind]],
    ) -> tuple[Registered[Kind], ...]:
        found = {one.kind: one for one in own}
        for origin, answer in self._ask(hook):
            for kind in self._listed(origin, hook, answer):
                try:
                    check(kind)
                except Exception as error:
                    self._fault(origin, hook, error)
                else:
                    found.setdefault(kind, Registered(kind, origin))
        return self._without_conflicts(hook, name_of, list(found.values()))

    def _listed(self, origin: Origin, hook: str, answer: object) -> list[Any]:
        """What it registers; a generator may raise only now."""
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            return [answer]
        try:
            return list(answer)
        except Exception as error:
            self._fault(origin, hook, error)
            return []

    def _without_conflicts(
        self, hook: str, name_of: Callable[[type[Kind]], str], found: list[Registered[Kind]]
    ) -> tuple[Registered[Kind], ...]:
        """Neither of two that share a name may be used: which one was meant is not octavo's to guess."""
        sharing: defaultdict[str, list[Registered[Kind]]] = defaultdict(list)
        for one in found:
            sharing[name_of(one.kind).casefold()].append(one)
        conflicts = {}
        for name, them in ((name, them) for name, them in sharing.items() if len(them) > 1):
            owners = " and ".join(f"{one.kind.__module__}.{one.kind.__qualname__} of {one.origin}" for one in them)
            conflicts[name] = f"{name} is registered twice, by {owners}: uninstall one of them"
            for one in them:
                self._fault(one.origin, hook, ValueError(conflicts[name]))
        return tuple(replace(one, conflict=conflicts.get(name_of(one.kind).casefold())) for one in found)

    def _fault_once(self, origin: Origin, where: str, error: BaseException) -> None:
        """For hooks that are called again and again."""
        if (origin, where) not in self._raised:
            self._raised.add((origin, where))
            self._fault(origin, where, error)

    def _fault(self, origin: Origin, where: str, error: BaseException) -> None:
        fault = Fault(origin, where, error)
        self.faults.append(fault)
        logger.warning("a plugin is at fault: %s", fault)


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version, as far as its metadata can be read."""
    try:
        return distribution.name or "unnamed", distribution.version or ""
    except Exception:
        return "unnamed", ""


def _answers_once(caller: pluggy.HookCaller) -> bool:
    """Does pluggy hand out the one answer of this hook, not a list of them?"""
    return caller.spec is not None and bool(caller.spec.opts["firstresult"])


@cache
def plugins() -> Plugins:
    """The installed plugins, loaded on the first call."""
    return Plugins()
