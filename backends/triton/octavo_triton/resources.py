"""What a compiled kernel takes of its GPU, read from the compiler's own files."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

from triton import knobs

from octavo.attention.ahead import CompiledKernel
from octavo_triton.chips import Chip
from octavo_triton.driver import Build

_MATRIX = {"cuda": r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b", "hip": r"\bv_(?:mfma|smfmac|wmma|swmmac)_\w+"}
_WIDE = {
    "cuda": r"\bld\.global\S*\.v4\.\w*32|\bld\.global\S*\.v2\.\w*64|\bcp\.async\.c[ag]\.shared\S* [^;]*\b(?:0x10|16)\b"
    r"|\bcp\.async\.bulk\.tensor",
    "hip": r"\b(?:global|buffer)_load_(?:dwordx4|b128)\b",
}
_NARROW = {
    "cuda": r"\bld\.global\S*\.[bsu](?:8|16)\b",
    "hip": r"\b(?:global|buffer)_load_(?:ubyte|sbyte|ushort|sshort|short|[uid]8|[uid]16|d16)\w*",
}


def resources(build: Build, configuration: str, chip: Chip) -> CompiledKernel:
    """Of one kernel for `chip`."""
    assembly = build.files["ptx" if chip.maker == "cuda" else "amdgcn"].read_text(encoding="utf-8")
    binary = build.files["cubin" if chip.maker == "cuda" else "hsaco"]
    registers, scalars, scratch = _nvidia(binary) if chip.maker == "cuda" else _amd(assembly)
    return CompiledKernel(
        kernel=build.name,
        configuration=configuration,
        registers=registers,
        scalar_registers=scalars,
        shared_bytes=build.shared_bytes,
        scratch_bytes=scratch,
        programs=_programs(chip, registers, build),
        warps=build.warps,
        code_bytes=_code_bytes(binary.read_bytes()),
        compile_seconds=build.seconds,
        matrix_instructions=len(re.findall(_MATRIX[chip.maker], assembly)),
        wide_loads=len(re.findall(_WIDE[chip.maker], assembly)),
        narrow_loads=len(re.findall(_NARROW[chip.maker], assembly)),
    )


def _nvidia(binary: Path) -> tuple[int, None, int]:
    """Registers and bytes of the stack: only what does not fit into registers lies there."""
    said = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = (re.search(rf"\b{name}:(\d+)", said) for name in ("REG", "STACK"))
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump tells nothing of {binary}: {said.strip()}")
    return int(registers[1]), None, int(stack[1])


def _amd(assembly: str) -> tuple[int, int, int]:
    """As the assembler is told to give them out."""
    found = []
    for name in ("vgpr_count", "sgpr_count", "private_segment_fixed_size"):
        told = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        if told is None:
            raise ValueError(f"the assembly says no .{name}: this Triton writes it otherwise")
        found.append(int(told[1]))
    return found[0], found[1], found[2]


def _programs(chip: Chip, registers: int, build: Build) -> int:
    """What registers, shared memory and the processor itself allow."""
    held = -(-max(registers, 1) // chip.granule) * chip.granule
    by_registers = chip.simds * min(chip.warps, chip.registers // held) // build.warps
    by_shared = chip.processor_shared_bytes // max(build.shared_bytes + chip.reserved_bytes, 1)
    return min(by_registers, by_shared, chip.programs)


def _code_bytes(elf: bytes) -> int:
    """Of the sections `.text*` of a 64-bit ELF file (System V ABI, chapter 4)."""
    (sections,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, sections + number * entry) for number in range(count)]
    strings = heads[names][4]
    return sum(head[5] for head in heads if elf.startswith(b".text", strings + head[0]))
