"""The state of a block, and how its warps run: registers of 32 lanes, shared and global memory, convergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from machinecode.operations import OPERATIONS, Flow
from machinecode.program import TRUE, UNIFORM_TRUE, UNIFORM_ZERO, ZERO, Instruction, Kernel, Operand

Lanes = np.ndarray[Any, Any]
"""A value of each lane: 32 of one type."""

LANES = np.arange(32)
LOW = np.uint64(0xFFFFFFFF)
THREADS = 256
# Where the constant bank has the block's size, the grid's size and the arguments.
BANK = {80: (0x0, 0xC, 0x160), 90: (0x0, 0xC, 0x210), 120: (0x360, 0x370, 0x380)}
MOST_ISSUED = 1_000_000


class Memory:
    """Bytes that begin at an address, of which only some may be touched.

    Attributes:
        read: Which bytes were read.
        written: Which were written.
        turns: Turns of the unit that moves them: a line of 128 bytes each, or the most words of one bank.
        sectors: Sectors of 32 bytes that stores wrote to, each store of a warp by itself.
    """

    def __init__(self, size: int, base: int, banks: bool) -> None:
        """Make `size` bytes from address `base`, in banks if it is shared memory; none may be touched yet."""
        self.bytes, self.known, self.base, self.banks = np.zeros(size, np.uint8), np.zeros(size, bool), base, banks
        self.read, self.written, self.turns = np.zeros(size, bool), np.zeros(size, bool), 0
        self.sectors = 0

    def _places(self, addresses: Lanes, size: int) -> Lanes:
        first = addresses - self.base
        if (addresses % size).any():
            raise ValueError(f"an access of {size} bytes at {addresses[addresses % size != 0][0]:#x} is not aligned")
        places = first[:, None] + np.arange(size)
        if ((places < 0) | (places >= self.bytes.size)).any() or not self.known[places].all():
            raise ValueError(f"an access of {size} bytes is outside of all tensors")
        if self.banks:
            words = np.unique(first[:, None] // 4 + np.arange(max(size // 4, 1)))
            self.turns += int(np.bincount(words % 32).max())
        else:
            self.turns += len(np.unique(first // 128))
        return places

    def load(self, addresses: Lanes, size: int) -> Lanes:
        """Return (lanes, size) bytes."""
        places = self._places(addresses, size)
        self.read[places] = True
        return self.bytes[places]

    def store(self, addresses: Lanes, data: Lanes) -> None:
        """Write (lanes, size) bytes."""
        places = self._places(addresses, data.shape[1])
        self.written[places] = True
        self.sectors += len(np.unique(places // 32))
        self.bytes[places] = data


class Block:
    """One block of 256 threads, which is the whole grid."""

    def __init__(self, kernel: Kernel, architecture: int, arguments: bytes, memory: Memory) -> None:
        """Make one that has issued nothing yet."""
        self.kernel, self.memory, self.shared = kernel, memory, Memory(1 << 17, 0, banks=True)
        self.shared.known[:] = True
        self.at = {each.address: each for each in kernel.instructions}
        self.issued: Counter[int] = Counter()
        self.constants = np.zeros(4096, np.uint8)
        block, grid, start = BANK[architecture]
        for place, words in ((block, [THREADS, 1, 1]), (grid, [1, 1, 1])):
            self.constants[place : place + 12] = np.array(words, np.uint32).view(np.uint8)
        self.constants[start : start + len(arguments)] = np.frombuffer(arguments, np.uint8)

    def run(self, warps: Iterable[int]) -> None:
        """Run some warps from barrier to barrier, to their ends."""
        running = [Warp(self, index).run() for index in warps]
        while running:
            running = [each for each in running if next(each, None) is not None]


class Warp:
    """The registers of 32 lanes, and where each of them is.

    Attributes:
        here: The lanes that are at the instruction in hand, and whose guard lets them pass.
        on: The lanes that it writes to: all of them if it is for uniform registers.
    """

    def __init__(self, block: Block, index: int) -> None:
        """Make the warp of this number of a block."""
        self.block, self.index = block, index
        self.registers = np.zeros((512, 32), np.uint32)
        self.stack = np.zeros((256, 32), np.uint32)
        self.predicates = np.zeros((16, 32), bool)
        self.predicates[[TRUE, UNIFORM_TRUE]] = True
        self.barriers: dict[str, Lanes] = {}
        self.waits = np.full(32, "", object)  # at which barrier a lane waits
        self.counter = np.zeros(32, np.int64)
        self.alive = np.ones(32, bool)
        self.here = self.on = self.alive.copy()

    # ---- Reading

    def bits(self, o: Operand, ones: bool = False) -> Lanes:
        """Return 32 bits; with `ones`, a minus only inverts them, as the carry comes from elsewhere."""
        if o.kind == "register":
            value = self.registers[o.index]
        elif o.kind == "constant":
            value = self._constant(o)
        elif o.kind == "number":
            value = np.full(32, o.index & 0xFFFFFFFF, np.uint32)
        else:
            raise NotImplementedError(o.text)
        if o.absolute:
            value = np.abs(value.view(np.int32)).view(np.uint32)
        if o.negative:
            value = ~value if ones else -value
        return ~value if o.inverted else value

    def _constant(self, o: Operand) -> Lanes:
        if o.index < 0:  # another bank: the compiler's own numbers, such as the descriptor of global memory
            return np.zeros(32, np.uint32)
        offsets = np.full(32, o.index) + sum(self.registers[index].astype(np.int64) for index, *_ in o.base)
        return self.block.constants[offsets[:, None] + np.arange(4)].view(np.uint32)[:, 0]

    def wide(self, o: Operand) -> Lanes:
        """Return 64 bits, from a pair of registers or constants."""
        if o.kind == "number":
            return np.full(32, o.index % 2**64, np.uint64)
        plain = Operand(o.kind, o.index, o.base)
        above = (
            plain
            if o.index in (ZERO, UNIFORM_ZERO)
            else Operand(o.kind, o.index + (4 if o.kind == "constant" else 1), o.base)
        )
        value = self.bits(plain).astype(np.uint64) | self.bits(above).astype(np.uint64) << np.uint64(32)
        return -value if o.negative else ~value if o.inverted else value

    def float(self, o: Operand, flush: bool = False) -> Lanes:
        """Return float32, subnormal numbers as zero if asked."""
        plain = Operand(o.kind, o.index, o.base)
        value = np.array(self.bits(plain)).view(np.float32)
        value = np.abs(value) if o.absolute else value
        return flushed(-value if o.negative else value, flush)

    def truth(self, o: Operand) -> Lanes:
        """Return the lanes where a predicate holds."""
        return self.predicates[o.index] ^ o.inverted

    def address(self, o: Operand, pairs: bool) -> Lanes:
        """Return a place's addresses, of 32 bits; `pairs`: of 64, and a lane's register alone is a pair."""
        total = np.full(32, o.index, np.int64)
        for index, pair, times in o.base:
            read = self.wide if pair or (pairs and len(o.base) == 1) else self.bits
            total += read(Operand("register", index)).astype(np.int64) * times
        return total if pairs else total & 0xFFFFFFFF

    # ---- Writing

    def put(self, o: Operand, value: Lanes) -> None:
        """Write 32 bits of each lane that is on."""
        if o.index not in (ZERO, UNIFORM_ZERO):
            np.copyto(self.registers[o.index], value.astype(np.uint32, copy=False), where=self.on)

    def put_wide(self, o: Operand, value: Lanes) -> None:
        """Write 64 bits to a pair."""
        if o.index not in (ZERO, UNIFORM_ZERO):
            self.put(o, value & LOW)
            self.put(Operand("register", o.index + 1), value >> np.uint64(32))

    def put_float(self, o: Operand, value: Lanes, flush: bool = False) -> None:
        """Write the nearest float32."""
        self.put(o, np.array(flushed(value.astype(np.float32), flush)).view(np.uint32))

    def put_truth(self, o: Operand, value: Lanes) -> None:
        """Write a predicate."""
        if o.index not in (TRUE, UNIFORM_TRUE):
            np.copyto(self.predicates[o.index], value, where=self.on)

    # ---- Running

    def run(self) -> Iterator[bool]:
        """Run to the end; yields at each barrier of the block. Of lanes apart, those that are furthest behind go on."""
        for _ in range(MOST_ISSUED):
            ready = self.alive & (self.waits == "")
            if not ready.any():
                return
            here = self.counter[ready].min()
            together = ready & (self.counter == here)
            instruction = self.block.at[int(here)]
            self.block.issued[int(here)] += 1
            passed = together if instruction.guard is None else together & self.truth(instruction.guard)
            self.counter[together] += 16
            if not passed.any():
                continue
            self.here = passed
            self.on = np.ones(32, bool) if instruction.uniform else passed
            try:
                flow = OPERATIONS[instruction.name](self, instruction)
            except Exception as error:
                raise RuntimeError(f"{here:#06x} {instruction.text}: {error}") from error
            if flow is not None and self._turn(flow, instruction, passed):
                yield True
        raise RuntimeError(f"{MOST_ISSUED} instructions and no end")

    def _turn(self, flow: Flow, instruction: Instruction, passed: Lanes) -> bool:
        """Do what an instruction says of the flow; return whether it is a barrier of the block."""
        operands, name = instruction.operands, instruction.operands[0].text if instruction.operands else ""
        if flow is Flow.JUMP:
            labels = self.block.kernel.labels
            self.counter[passed & self.taken(operands)] = labels[operands[-1].text]
        elif flow is Flow.RETURN:
            self.counter[passed] = self.registers[operands[0].index][passed]
        elif flow is Flow.GATHER:
            self.barriers[name] = passed.copy()
        elif flow is Flow.BREAK:
            self.barriers[operands[-1].text] &= ~passed
        elif flow is Flow.WAIT:
            self.waits[passed] = name
        elif flow is Flow.EXIT:
            self.alive &= ~passed
        for barrier in set(self.waits[self.alive]) - {""}:
            waiting = self.alive & (self.waits == barrier)
            if not (self.barriers[barrier] & self.alive & ~waiting).any():
                self.waits[waiting] = ""
        return flow is Flow.BLOCK

    def taken(self, operands: tuple[Operand, ...]) -> Lanes:
        """Return the lanes whose predicates before a jump's target hold."""
        taken = np.ones(32, bool)
        for each in operands[:-1]:
            taken &= self.truth(each) if each.kind == "predicate" else True
        return taken


def flushed(x: Lanes, flush: bool) -> Lanes:
    """Return floats, subnormal ones as zeros if asked."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x) if flush else x
