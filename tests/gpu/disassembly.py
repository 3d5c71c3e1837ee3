"""Compiled kernels taken apart: registers, spills, and for every loop its loads and instructions.

Receives a kernel that Triton compiled ahead of time for an NVIDIA or AMD target; Triton brings the disassembler. Not
for a process with TRITON_INTERPRET=1.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Loop:
    """What one iteration does, per thread."""

    num_instructions: int
    num_wide_loads: int  # 16 bytes each
    num_narrow_loads: int
    num_spills: int
    num_barriers: int

    @property
    def per_byte(self) -> float:
        """Instructions per byte of wide loads."""
        return self.num_instructions / (16 * self.num_wide_loads)


@dataclass(frozen=True)
class Disassembly:
    """A kernel's needs, and its loops with 16-byte loads, the leanest first."""

    num_registers: int
    num_spills: int
    shared_bytes: int
    loops: list[Loop]


@dataclass(frozen=True)
class _Dialect:
    """How one assembler writes things, as patterns of the opcode."""

    label: str
    instruction: str
    branch: str
    load: str
    wide: str
    spill: str
    barrier: str


SASS = _Dialect(
    label=r"^(\.L_x_\d+):",
    instruction=r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);",
    branch=r"BRA",
    load=r"LDG",
    wide=r"LDG\.E\.128",
    spill=r"(LDL|STL)",
    barrier=r"BAR",
)
GCN = _Dialect(
    label=r"^(\.LBB\d+_\d+):",
    instruction=r"^\s+([sv]_[a-z0-9_]+|(?:global|buffer|flat|scratch|ds)_[a-z0-9_]+)\b\s*(.*)$",
    branch=r"s_c?branch",
    load=r"(global|buffer|flat)_load",
    wide=r"(global|buffer|flat)_load_dwordx4",
    spill=r"scratch_",
    barrier=r"s_barrier",
)


def disassemble(kernel: Any) -> Disassembly:
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        numbers = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
        spills = numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]
        return Disassembly(numbers["vgpr_count"], spills, kernel.metadata.shared, _loops(text, GCN))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, text = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    num_spills = sum(bool(re.match(SASS.spill, opcode)) for kind, opcode, _ in _lines(text, SASS) if kind == "op")
    return Disassembly(int(registers[1]), num_spills, kernel.metadata.shared, _loops(text, SASS))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def _lines(text: str, dialect: _Dialect) -> Iterator[tuple[str, str, str]]:
    """("label", name, "") and ("op", opcode, operands)."""
    for line in text.splitlines():
        if label := re.match(dialect.label, line):
            yield "label", label[1], ""
        elif operation := re.match(dialect.instruction, line):
            yield "op", operation[1], operation[2]


def _loops(text: str, dialect: _Dialect) -> list[Loop]:
    """Loops with wide loads and no loop inside: from a label to the last branch back to it."""
    labels: dict[str, int] = {}
    opcodes: list[str] = []
    backward: list[tuple[int, int]] = []
    for kind, name, operands in _lines(text, dialect):
        if kind == "label":
            labels[name] = len(opcodes)
            continue
        opcodes.append(name)
        if re.match(dialect.branch, name):
            targets = [labels[word] for word in re.findall(r"\.L\w+", operands) if word in labels]
            backward += [(target, len(opcodes)) for target in targets]
    innermost = [a for a in backward if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in backward)]
    loops = [_loop(opcodes[begin:end], dialect) for begin, end in innermost]
    return sorted((loop for loop in loops if loop.num_wide_loads), key=lambda loop: loop.per_byte)


def _loop(opcodes: list[str], dialect: _Dialect) -> Loop:
    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, opcode)) for opcode in opcodes)

    wide = count(dialect.wide)
    return Loop(len(opcodes), wide, count(dialect.load) - wide, count(dialect.spill), count(dialect.barrier))
