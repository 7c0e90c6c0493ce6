"""What `octavo backends` shows, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.attention.candidates import Candidate, survey
from octavo.attention.device import Device
from octavo.attention.select import Selection, choose
from octavo.plugins import Fault, Plugins


@dataclass(frozen=True, slots=True)
class Report:
    """Every backend on one device, the one that would be chosen, and what is wrong with plugins."""

    device: str
    candidates: tuple[Candidate, ...]
    faults: tuple[Fault, ...]
    selection: Selection | None
    problem: ValueError | None
    """Why none would be chosen."""

    @classmethod
    def of(cls, device: Device, attention: str | None, block_size: int | None, plugins: Plugins) -> Report:
        """As things are, for any model."""
        candidates = survey([], device, plugins=plugins)
        selection = problem = None
        try:
            selection = choose([], device, attention=attention, block_size=block_size, plugins=plugins)
        except ValueError as error:
            problem = error
        return cls(device.name, candidates, tuple(plugins.faults), selection, problem)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "chosen": self.selection.name if self.selection else None,
            "problem": str(self.problem) if self.problem else None,
            "backends": [_row(candidate) for candidate in self.candidates],
            "faults": [
                {
                    "distribution": fault.origin.distribution,
                    "version": fault.origin.version,
                    "entry_point": fault.origin.entry_point,
                    "where": fault.where,
                    "error": fault.error_line,
                }
                for fault in self.faults
            ],
        }

    def __rich__(self) -> RenderableType:
        """The backends, the plugins at fault if there are any, and what is chosen."""
        parts: list[RenderableType] = [self._backends()]
        if self.faults:
            parts.append(self._faults())
        if self.selection is not None:
            parts.append(Text(f"chosen: {self.selection.summary()}"))
        return Group(*parts)

    def _backends(self) -> Table:
        table = Table(title=f"Attention backends on {self.device}", title_justify="left", show_lines=True)
        table.add_column("backend", no_wrap=True)
        table.add_column("priority", justify="right")
        table.add_column("what it can")
        table.add_column("here")
        for candidate in self.candidates:
            row, chosen = _row(candidate), self.selection is not None and candidate.backend is self.selection.chosen
            can = [_listed(row["dtypes"]), f"caches of {_listed(row['cache_dtypes'])}"]
            can += [f"blocks of {_listed(row['block_sizes'])}", _listed(row["features"])]
            origin = f"{candidate.distribution} {candidate.version}"
            table.add_row(
                Text.assemble((candidate.name, "bold" if chosen else ""), "\n", (origin, "dim")),
                str(candidate.backend.priority),
                "\n".join(can),
                _here(candidate, said_below=chosen),
            )
        return table

    def _faults(self) -> Table:
        table = Table("distribution", "entry point", "where", "error", title="Plugins at fault", title_justify="left")
        for fault in self.faults:
            origin = fault.origin
            table.add_row(*map(Text, (str(origin), origin.entry_point, fault.where, fault.error_line)))
        return table


def _here(candidate: Candidate, *, said_below: bool) -> Text:
    """What speaks against it; `said_below`: the line about the one that is chosen has its caution."""
    verdict = Text("\n".join(candidate.reasons), "yellow") if candidate.reasons else Text("can run", "green")
    caution = None if said_below else candidate.backend.caution
    return Text.assemble(verdict, "\n", (caution, "yellow")) if caution else verdict


def _row(candidate: Candidate) -> dict[str, Any]:
    """A candidate with what it can do; "any" stands for every other value."""
    capabilities = candidate.capabilities
    more = (("prefix caching", capabilities.prefix_caching), ("deterministic", capabilities.batch_invariant))
    features = sorted(capabilities.features) + [name for name, declared in more if declared]
    return candidate.to_dict() | {
        "block_sizes": _words(capabilities.block_sizes),
        "head_sizes": _words(capabilities.head_sizes),
        "dtypes": _words(capabilities.dtypes),
        "cache_dtypes": _words(capabilities.kv_dtypes),
        "features": features,
        "graphs": capabilities.graphs,
    }


def _words(values: Sequence[object]) -> list[Any]:
    return [
        "any" if value is ... else value if isinstance(value, int) else str(value).removeprefix("torch.")
        for value in values
    ]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "nothing more"
