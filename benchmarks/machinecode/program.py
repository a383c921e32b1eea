"""From CUDA source to instructions: compiles with NVRTC, lists with nvdisasm, reads the listing."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

UNIFORM = 256
"""Uniform registers and predicates stand behind those of the lanes: UR4 is register 260, UP1 predicate 9."""
ZERO, UNIFORM_ZERO, TRUE, UNIFORM_TRUE = 255, 511, 7, 15


Base = tuple[tuple[int, bool, int], ...]


def missing() -> str | None:
    """Return what is not installed, or None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "NVRTC, which comes with torch's CUDA builds"
    return None if _disassembler() else "nvdisasm, which comes with Triton"


def _disassembler() -> Path | None:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


@dataclass(frozen=True)
class Operand:
    """An operand: a register, a predicate, a number, a constant, a place in memory or a label.

    Attributes:
        kind: "register", "predicate", "number", "constant", "memory" or "label" ("name" for what only a name is).
        index: Of the register or predicate; the offset of a constant or a place in memory.
        base: Registers that an address is the sum of, as (index, whether it is a pair, times what).
        negative: It has a minus.
        inverted: It has a ~ or a !.
        absolute: It stands in bars.
        part: What follows a dot, such as ``H0_H0``.
        number: The bits of an immediate number, and a float's value.
        text: As listed.
    """

    kind: str
    index: int = 0
    base: Base = ()
    negative: bool = False
    inverted: bool = False
    absolute: bool = False
    part: str = ""
    number: float = 0.0
    text: str = ""


def _register(text: str) -> int:
    uniform = text.startswith("U")
    number = text.lstrip("UR")
    return (UNIFORM_ZERO if uniform else ZERO) if number == "Z" else int(number) + (UNIFORM if uniform else 0)


def _predicate(text: str) -> int:
    uniform = text.startswith("U")
    return (TRUE if text[-1] == "T" else int(text[-1])) + (8 if uniform else 0)


def _address(text: str) -> tuple[Base, int]:
    """Read what stands between the brackets of a place in memory."""
    base, offset = [], 0
    for part in re.findall(r"-?[^+-]+", text):
        if found := re.fullmatch(r"(U?R(?:\d+|Z))(\.\w+)*", part):
            times = re.search(r"\.X(\d+)", part)
            base.append((_register(found[1]), ".64" in part, int(times[1]) if times else 1))
        else:
            offset += int(part, 16)
    return tuple(base), offset


def operand(listed: str) -> Operand:
    """Read one operand."""
    text = listed.replace(".reuse", "")
    if text.startswith("`("):
        return Operand("label", text=text[2:-1])
    if found := re.fullmatch(r"(?:desc\[.*\])?\[([^\[\]]*)\]", text):
        base, offset = _address(found[1])
        return Operand("memory", offset, base, text=listed)
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return Operand("number", int(text, 16), text=listed)
    if re.fullmatch(r"[-+]?(\d[\d.e+-]*|INF|Q?NAN)", text):
        value = float(text.replace("QNAN", "nan"))
        bits = int(np.float32(value).view(np.uint32))
        return Operand("number", bits, number=value, text=listed)
    signs, plain = re.fullmatch(r"([-~!|]*)(.*)", text).groups()  # type: ignore[union-attr]
    marks = {"negative": "-" in signs, "inverted": "~" in signs or "!" in signs, "absolute": "|" in signs}
    plain = plain.replace("|", "")
    if found := re.fullmatch(r"c\[0x([0-9a-f]+)\]\s*\[([^\]]*)\]", plain):
        base, offset = _address(found[2])
        return Operand("constant", offset if int(found[1], 16) == 0 else -1, base, **marks, text=listed)
    plain, _, part = plain.partition(".")
    if re.fullmatch(r"U?R(\d+|Z)", plain):
        return Operand("register", _register(plain), part=part, **marks, text=listed)
    if re.fullmatch(r"U?P(\d|T)", plain):
        return Operand("predicate", _predicate(plain), **marks, text=listed)
    return Operand("name", text=listed)


class Instruction:
    """One instruction of a listing.

    Attributes:
        address: In bytes from the kernel's start.
        guard: The predicate without which it does nothing.
        name: Its name, without the U of those for uniform registers.
        uniform: Whether it is one of those.
        marks: What follows the name, at each dot.
        operands: All, results first.
    """

    __slots__ = ("address", "guard", "marks", "name", "operands", "text", "uniform")

    def __init__(self, address: int, text: str) -> None:
        self.address, self.text = address, text
        guard, head, rest = re.fullmatch(r"(?:@(\S+)\s+)?(\S+)\s*(.*)", text).groups()  # type: ignore[union-attr]
        self.guard = operand(guard) if guard else None
        name, *marks = head.split(".")
        self.uniform = name[0] == "U" or name in ("LDCU", "VOTEU", "S2UR", "R2UR")
        self.name = {"LDCU": "LDC", "ULDC": "LDC", "VOTEU": "VOTE", "S2UR": "S2R"}.get(name, name.removeprefix("U"))
        self.marks = frozenset(marks)
        self.operands = tuple(
            operand(part) for part in re.findall(r"`\(.*?\)|c\[\w+\]\s*\[.*?\]|\|.*?\|[^,\s]*|[^,\s]+", rest)
        )

    def mark(self, *known: str, default: str = "") -> str:
        """Return which of these marks it has."""
        return next((each for each in known if each in self.marks), default)


class Kernel(NamedTuple):
    """A kernel's machine code, and what ptxas says that it needs."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: int
    stack: int


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    buffer = bytes(bytearray(size + 1))  # one that no other has: the binding writes to it
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer[:size]


@functools.cache
def kernels(source: str, options: Sequence[str], architecture: int) -> dict[str, Kernel]:
    """Return the kernels of a source by name, compiled as CuPy does."""
    from cuda.bindings import nvrtc

    flags = [*options, "-ftz=true", f"-arch=sm_{architecture}", "--ptxas-options=-v"]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0 ").decode()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(log)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_read(nvrtc, program, "CUBIN"))
        file.flush()
        listing = subprocess.run([str(_disassembler()), "-c", file.name], capture_output=True, text=True, check=True)
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name, stack = part.split("'")[0], re.search(r"(\d+) bytes stack frame", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert stack is not None
        assert registers is not None
        body = re.split(rf"\n\s*\.section\s+\.text\.{name},.*\n", listing.stdout)[1]
        found[name] = Kernel(*_instructions(body), int(registers[1]), int(stack[1]))
    return found


def _instructions(body: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    instructions: list[Instruction] = []
    labels, waiting = {}, []
    for line in body.splitlines():
        if re.match(r"\s*\.section\s", line):
            break
        if found := re.match(r"([.$\w]+):", line):
            waiting.append(found[1])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", line):
            instructions.append(Instruction(int(found[1], 16), found[2]))
            labels.update(dict.fromkeys(waiting, instructions[-1].address))
            waiting = []
    return tuple(instructions), labels
