"""From `ATTENTION` to a backend: every candidate with the reasons against it, and the choice among them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.attention.candidates import WITHOUT, Candidate, sizes, survey
from octavo.attention.contract import AttentionBackend, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.attention.installed import devices
from octavo.attention.phases import disagreement, phased
from octavo.attention.wish import BackendUnavailable, UnknownBackend, Wish, close_matches, parse
from octavo.plugins import Plugins, describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that serves all groups of a model, and how it came to be chosen."""

    chosen: type[AttentionBackend]
    device: str
    block_size: int
    """Tokens in a block."""
    candidates: tuple[Candidate, ...]
    """All that are installed, highest priority first."""
    switched_off: tuple[tuple[str, str], ...]
    """Features that this backend costs, each with the reason."""
    capabilities: Capabilities
    """What the chosen backend can do on this device; of two phases, together."""

    @property
    def name(self) -> str:
        """As `ATTENTION` spells it: `platform/name`, or one for each phase."""
        return self.chosen.qualified_name()

    def build(
        self, spec: AttentionSpec, device: Device, options: Mapping[str, Any] | None = None, sinks: Tensor | None = None
    ) -> AttentionBackend:
        """The backend of one group. `options`: `ATTENTION_OPTIONS`; sinks: [layers, heads] float32."""
        try:
            return self.chosen(spec, self.block_size, device, options, sinks)
        except Exception as error:
            error.add_note(f"raised while the attention backend {self.name} was made")
            raise

    def summary(self) -> str:
        """One line for the start of a run."""
        off = "".join(f"; {feature} off: {reason}" for feature, reason in self.switched_off)
        caution = f"; {self.chosen.caution}" if self.chosen.caution else ""
        return f"attention {self.name} on {self.device}, blocks of {self.block_size} tokens{off}{caution}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "chosen": self.name,
            "device": self.device,
            "block_size": self.block_size,
            "switched_off": dict(self.switched_off),
            "caution": self.chosen.caution,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


def choose(
    specs: Sequence[AttentionSpec],
    device: Device,
    *,
    attention: str | None = None,
    block_size: int | None = None,
    prefix_caching: bool | None = None,
    plugins: Plugins,
) -> Selection:
    """The one backend for all groups of a model.

    `attention` as in `ATTENTION` (see `octavo.attention.wish`): that backend or an error, never another; unset, the
    first that can. `block_size` in tokens; None leaves it to the backend. `prefix_caching=True` makes it a need.
    Raises `UnknownBackend` for a name that nobody has, `BackendUnavailable` with every candidate's reasons otherwise.
    """
    wish = parse(attention)
    needed = prefix_caching and not wish.phases  # of two phases, the prefilling one's alone
    candidates = survey(specs, device, block_size=block_size, prefix_caching=needed, plugins=plugins)
    question = _Question(wish, tuple(specs), device, block_size, candidates, plugins)
    if wish.phases:
        chosen, size = question.for_phases(*wish.phases)
        able = chosen.capabilities_on(device)
        if prefix_caching and not able.prefix_caching:
            raise BackendUnavailable(
                f"attention {wish}: prefix caching is asked for, and prefill={wish.phases[0]}: {WITHOUT}"
            )
    else:
        best = question.by_name(wish.name) if wish.name else question.best()
        chosen, size, able = best.backend, best.block_size or 0, best.capabilities
    off = () if able.prefix_caching else (("prefix caching", WITHOUT), ("chunked prefill", WITHOUT))
    return Selection(chosen, device.name, size, candidates, off, able)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked for, and what there is."""

    wish: Wish
    specs: tuple[AttentionSpec, ...]
    device: Device
    block_size: int | None
    candidates: tuple[Candidate, ...]
    plugins: Plugins

    def best(self) -> Candidate:
        """The plugins' preference among those that can, else the highest priority, a negative one never."""
        able = {one.name: one for one in self.candidates if not one.reasons}
        order = [name for name, one in able.items() if one.backend.priority >= 0]
        if able and self.specs:
            largest = max(self.specs, key=lambda spec: spec.layers)
            order = self.plugins.rank_backends(largest, self.device, list(able)) or order
        if not order:
            asked = f" unless it is asked for by name ({', '.join(able)})" if able else ""
            raise BackendUnavailable(self._explain(f"no attention backend can serve this on {self.device.name}{asked}"))
        better = itertools.takewhile(lambda one: one.name != order[0], self.candidates)
        for passed_over in better if self.specs else ():  # before a model is loaded nothing is chosen yet
            logger.info("attention: %s is chosen over %s", order[0], passed_over)
        return able[order[0]]

    def by_name(self, name: str) -> Candidate:
        """The first without reasons of those that have the name."""
        named = [one for one in self.candidates if name in (one.name.casefold(), one.backend.name.casefold())]
        if not named:
            raise self._unknown(name) from self._suspect(name)
        for candidate in named:
            if not candidate.reasons:
                return candidate
        reasons = "; ".join(dict.fromkeys(f"{one.name}: {reason}" for one in named for reason in one.reasons))
        raise BackendUnavailable(self._explain(f"attention {self.wish} cannot be used here: {reasons}"))

    def for_phases(self, prefill_name: str, decode_name: str) -> tuple[type[AttentionBackend], int]:
        """One backend made of two, and the first block size that suits both."""
        both = [self.by_name(name) for name in (prefill_name, decode_name)]
        prefill, decode = (one.backend for one in both)
        if prefill is decode:
            return prefill, both[0].block_size or 0
        refused: dict[str, None] = {}
        tried = (sizes(one.capabilities, self.block_size) for one in reversed(both))
        for size in dict.fromkeys(itertools.chain(*tried)):
            found = (disagreement(prefill, decode, spec, size, self.device) for spec in self.specs)
            wrong = [differ for differ in found if differ]
            if not wrong:
                return phased(prefill, decode), size
            refused |= dict.fromkeys(wrong)
        raise BackendUnavailable(self._explain(f"attention {self.wish} cannot be used here: {'; '.join(refused)}"))

    def _unknown(self, name: str) -> UnknownBackend:
        close = close_matches(name, [spelling for one in self.candidates for spelling in (one.backend.name, one.name)])
        hint = f", did you mean {' or '.join(close)}?" if close else ""
        return UnknownBackend(self._explain(f'attention {self.wish}: there is no backend "{name}"{hint}'))

    def _suspect(self, name: str) -> BaseException | None:
        """The error of the plugin that may have had the backend of this name."""
        faults = self.plugins.faults
        likely = [one for one in faults if name in f"{one.origin.distribution} {one.origin.entry_point}".casefold()]
        likely += [one for one in faults if one.where == "import"]
        return likely[0].error if likely else None

    def _explain(self, problem: str) -> str:
        lines = [problem, "installed:", *(f"  {candidate}" for candidate in self.candidates)]
        if self.plugins.faults:
            lines += ["plugins at fault:", *(f"  {fault}" for fault in self.plugins.faults)]
        return "\n".join(lines)


def choose_device(name: str, plugins: Plugins) -> Device:
    """The device of this name; "auto": the available one with the highest priority. Raises ValueError with reasons."""
    kinds = sorted(devices(plugins), key=lambda one: -one.kind.priority)
    reasons = {one.kind.name: one.conflict or _unavailable(one.kind) for one in kinds}
    wanted = [one.kind for one in kinds if name.casefold() in ("auto", one.kind.name.casefold())]
    for kind in wanted:
        if reasons[kind.name] is None:
            return kind()
    listing = "".join(f"\n  {known}: {reason or 'available'}" for known, reason in reasons.items())
    problem = "cannot be used here" if wanted else "is not known"
    raise ValueError(f'device "{name}" {problem}; devices:{listing}')


def _unavailable(kind: type[Device]) -> str | None:
    try:
        return kind.unavailable()
    except Exception as error:
        return f"it raises when asked: {describe(error)}"
