"""A stand-in for ``rawkernel.launch`` that runs a kernel's machine code on CPU tensors, as one block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from machinecode.program import Kernel, kernels
from machinecode.warp import Block, Memory

BASE = 0x7F00_0000_0000
ALL_WARPS = range(8)


@dataclass
class Machine:
    """A device of one architecture.

    Attributes:
        architecture: 80, 90 or 120.
        warps: Those of the block that run. One alone is right where warps share nothing.
        ran: The kernel of the last launch and its block, which has the counts.
        moved: The bytes of the tensors that it read, and of those that it wrote, each once.
    """

    architecture: int
    warps: Iterable[int] = ALL_WARPS
    ran: tuple[Kernel, Block] | None = field(default=None, init=False)
    moved: int = field(default=0, init=False)

    def launch(
        self, stem: str, kernel: str, macros: rawkernel.Macros, threads: int, *arguments: Tensor | np.generic
    ) -> None:
        """Run a kernel; an access outside of its tensors is a ValueError."""
        if threads == 0:
            return
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        memory = Memory(sum(each.nbytes + 512 for each in tensors) + 512, BASE, banks=False)
        places, end = {}, 256
        for each in tensors:
            if each.data_ptr() not in places:  # an output may be the input
                end += each.data_ptr() % 16
                places[each.data_ptr()] = end
                end = (end + each.nbytes + 511) // 256 * 256
            place = slice(places[each.data_ptr()], places[each.data_ptr()] + each.nbytes)
            memory.bytes[place], memory.known[place] = each.reshape(-1).view(torch.uint8).numpy(), True
        boxes = [np.uint64(BASE + places[a.data_ptr()]) if isinstance(a, Tensor) else a for a in arguments]
        code = kernels(rawkernel.source(stem), rawkernel.options(macros), self.architecture)[kernel]
        block = Block(code, self.architecture, packed(boxes), memory)
        with np.errstate(all="ignore"):
            block.run(self.warps)
        for each in tensors:
            place = places[each.data_ptr()]
            each.view(-1).view(torch.uint8).copy_(torch.from_numpy(memory.bytes[place : place + each.nbytes].copy()))
        touched = [
            (slice(start, start + each.nbytes), each.nbytes) for each in tensors for start in [places[each.data_ptr()]]
        ]
        self.moved = sum(
            size * bool(kind[place].any()) for place, size in touched for kind in (memory.read, memory.written)
        )
        self.ran = code, block


def packed(boxes: Iterable[np.generic]) -> bytes:
    """Return arguments as they lie in the constant bank, each aligned to its size."""
    laid = b""
    for box in boxes:
        laid += b"\0" * (-len(laid) % box.itemsize) + box.tobytes()
    return laid
