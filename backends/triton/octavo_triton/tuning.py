"""Shapes of tiles: what a kernel is compiled with beside what the model asks for, found by measuring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar

from octavo.attention.contract import AttentionSpec, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """What both phases have."""

    keys: int
    """Keys of a context at a time, a power of two."""
    warps: int
    stages: int
    """Tiles on their way from memory at once."""
    waves_per_eu: int = 0
    """On AMD's GPUs: registers are given out for so many waves of a SIMD; 0: as the compiler thinks best."""
    matrix_instr_nonkdim: int = 0
    """On AMD's GPUs: rows and columns of what a matrix instruction gives, 16 or 32; 0: as the compiler thinks best."""

    @property
    def compiled_with(self) -> dict[str, int]:
        """Options of the compiler. Other makers' compilers refuse AMD's."""
        own = {name: getattr(self, name) for name in ("waves_per_eu", "matrix_instr_nonkdim")}
        return {"num_warps": self.warps, **{name: value for name, value in own.items() if value}}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile(_Tile):
    """How decoding is cut."""

    per_processor: int
    """Parts, all key heads together, that one of the device's processors works on at a time as fast as it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile(_Tile):
    """How prompts are cut."""

    queries: int
    """Rows of a tile, tokens times the query heads of a key head: a power of two."""


WARP_TOKENS: Final = 16
"""Of a warp's tile that is loaded into registers: what NVIDIA's matrix unit takes at a time."""
WARPS: Final = (1, 2, 4)
"""Of a program with such tiles: for others the layouts of its registers have no bases."""


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """How decoding is cut where tiles are loaded into registers: each warp has a tile of its own."""

    warps: int
    per_processor: int
    """As a `DecodeTile` has it."""

    @property
    def decode(self) -> DecodeTile:
        """What a program has, all warps together."""
        return DecodeTile(keys=WARP_TOKENS * self.warps, warps=self.warps, stages=1, per_processor=self.per_processor)


@dataclass(frozen=True, slots=True)
class RegisterTiles:
    """Those for all batches."""

    few: RegisterTile
    """For rows that do not fill the device: fewer parts are joined sooner."""
    many: RegisterTile
    streamed_megabytes: int
    """Of keys and values that a step reads: up to so many they are better not let into the cache in another's place."""

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> RegisterTiles:
        """From a table with a line for each. Raises TypeError or KeyError on a wrong one."""
        few, many = (RegisterTile(**table[name]) for name in ("few", "many"))
        return cls(few, many, table["streamed_megabytes"])


IN_REGISTERS = RegisterTiles(RegisterTile(4, 2), RegisterTile(2, 4), 400)
"""On a GPU that nobody has measured."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """One device's shapes for one kind of layer."""

    decode: DecodeTile
    prefill: PrefillTile
    registers: RegisterTiles = IN_REGISTERS
    """In the place of `decode` for layers that can."""
    wide: RegisterTiles = IN_REGISTERS
    """The same for blocks in which a dim's slots lie side by side, more of them than a warp's tile has."""

    @classmethod
    def read(cls, table: Mapping[str, Mapping[str, Any]]) -> Tuning:
        """From a table with lines for `decode` and `prefill` at least. Raises TypeError or KeyError on a wrong one."""
        others = {name: RegisterTiles.read(table[name]) for name in ("registers", "wide") if name in table}
        return cls(decode=DecodeTile(**table["decode"]), prefill=PrefillTile(**table["prefill"]), **others)

    def with_options(self, options: Mapping[str, object]) -> Tuning:
        """With other shapes for `decode` or `prefill`, as a user gives them. Raises ValueError on what is none."""
        changed: dict[str, Any] = {}
        for phase, given in options.items():
            if phase == "decode" and in_registers(given):
                own = {name: value for name, value in given.items() if name != "registers"}
                tile = _changed(self.registers.many, phase, own)
                if given["registers"] != 1 or tile.warps not in WARPS:
                    raise ValueError(
                        f"option {phase} has registers {given['registers']!r} and warps {tile.warps}, registers must "
                        f"be 1 or left out, and warps with it {', '.join(map(str, WARPS))}"
                    )
                changed |= dict.fromkeys(("registers", "wide"), replace(self.registers, few=tile, many=tile))
            else:
                changed[phase] = _changed(getattr(self, phase), phase, given)
        return replace(self, **changed)


Tile = TypeVar("Tile", DecodeTile, PrefillTile, RegisterTile)


def in_registers(given: object) -> TypeGuard[Mapping[str, object]]:
    """Does the option `decode` ask for tiles that are loaded into registers, for all batches?"""
    return isinstance(given, Mapping) and "registers" in given


def _changed(tile: Tile, phase: str, given: object) -> Tile:
    if not isinstance(given, Mapping):
        raise ValueError(f'option {phase} is {given!r}, it must be an object, e.g. {{"keys": 64}}')
    names = [each.name for each in fields(tile)]
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"option {phase} has {name}, it takes {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"option {phase} has {name} {value!r}, it must be a whole number at least 1")
    return replace(tile, **given)


def tuned(
    table: Path, name: str, spec: AttentionSpec, architecture: str, shared_bytes: int, waiting: int = 0
) -> Tuning:
    """A backend's tiles for layers on an architecture, e.g. "sm_90", whose programs may take so much shared memory.

    table: a file of tiles by architecture and backend. One that is not in it has those of the first of its family
    ("sm_80" for "sm_86"), or what does for a GPU that nobody has measured.
    """
    dims = 1 << (spec.head_size - 1).bit_length()
    # A quarter is for what is not keys and values on their way: queries, and sums that change layout.
    itemsize = max(spec.dtype.itemsize, spec.kv_dtype.itemsize)
    held = tunings(table)
    found = held.get((architecture, name)) or held.get((f"{architecture[:-1]}0", name), PLAIN)
    return fitted(found, dims, itemsize, spec.group, shared_bytes * 3 // 4, waiting)


@cache
def tunings(table: Path) -> Mapping[tuple[str, str], Tuning]:
    """A file's, by architecture and backend."""
    architectures = json.loads(table.read_text(encoding="utf-8"))
    return {
        (architecture, name): Tuning.read(tiles)
        for architecture, backends in architectures.items()
        for name, tiles in backends.items()
    }


TUNABLES: Mapping[Phase, Sequence[Mapping[str, int]]] = {
    "decode": [
        {"keys": keys, "warps": warps, "stages": stages, "per_processor": parts}
        for keys, warps, stages, parts in product((32, 64, 128), (1, 2, 4), (3, 4, 5), (2, 4))
    ]
    + [{"registers": 1, "warps": warps, "per_processor": parts} for warps, parts in product(WARPS, (1, 2, 3, 4, 6, 8))],
    "prefill": [
        {"queries": queries, "keys": keys, "warps": warps, "stages": stages}
        for queries, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    ],
}
"""Shapes among which the best was found on each architecture that was measured."""

PLAIN = Tuning(
    decode=DecodeTile(keys=64, warps=4, stages=3, per_processor=2),
    prefill=PrefillTile(queries=64, keys=64, warps=4, stages=2),
)
"""For heads of up to 128 elements of two bytes, on a GPU that nobody has measured."""
_LEAST = 16
"""Rows and columns that a product of tiles needs."""
_FLOAT32 = 2048
"""Elements of a tile of float32: no matrix unit multiplies them exactly, and the others hold tiles in registers."""


def fitted(tuning: Tuning, dims: int, itemsize: int, group: int, shared_bytes: int, waiting: int = 0) -> Tuning:
    """With fewer keys at a time, and then fewer tiles, until what is on its way fits into a processor's shared memory.

    dims: elements of a head, padded to a power of two; itemsize: bytes of one in a product. A prefill tile has room
    for all query heads of a key head, and decoding has as many more warps as it has more of them than a product needs.
    waiting: of the tiles on their way, those that wait in registers; where some do, queries only pass through
    shared memory.
    """
    most = max(_LEAST, _FLOAT32 // dims) if itemsize > 2 else 1 << 30

    def too_large(keys: int, stages: int) -> bool:
        return 2 * keys * dims * itemsize * max(1, stages - waiting) > shared_bytes

    def fit(keys: int, stages: int) -> dict[str, int]:
        keys = min(keys, most)
        while keys > _LEAST and too_large(keys, stages):
            keys //= 2
        while stages > 1 and too_large(keys, stages):
            stages -= 1
        return {"keys": keys, "stages": stages}

    queries = min(tuning.prefill.queries, most)
    while queries > _LEAST and queries * dims * itemsize > (shared_bytes if waiting else shared_bytes // 4):
        queries //= 2
    while queries < group:
        queries *= 2
    prefill = replace(tuning.prefill, queries=queries, **fit(tuning.prefill.keys, tuning.prefill.stages))
    warps = max(1, (1 << (group - 1).bit_length()) // _LEAST)
    decode = replace(tuning.decode, **fit(tuning.decode.keys, tuning.decode.stages), warps=tuning.decode.warps * warps)
    return replace(tuning, decode=decode, prefill=prefill)
