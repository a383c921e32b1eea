"""kernels/bitpack.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from actbench.ops import bitpack

SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)


def launched(operator, launch, *arguments):
    """Return what a launch writes to the results that an operator allocates."""
    made = operator.__wrapped__(*arguments)
    launch(*(made if isinstance(made, tuple) else (made,)), *arguments)
    return made


pack_codes = partial(launched, bitpack.pack_codes, bitpack.launch_pack)
unpack_codes = partial(launched, bitpack.unpack_codes, bitpack.launch_unpack)


@pytest.mark.sampled(fast=6, slow=4)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("start", [0, 1])
def test_packing_and_unpacking_are_the_reference(bits: int, start: int, device: torch.device) -> None:
    for count in SIZES:
        codes = torch.randint(256, (start + count,), dtype=torch.uint8)[start:]
        expected = bitpack.pack(codes & (2**bits - 1), bits)
        packed = launched(
            bitpack.pack_codes, bitpack.launch_pack, codes.to(device) if start == 0 else _moved(codes, device), bits
        )

        assert torch.equal(packed.cpu(), expected), count
        stream = packed if start == 0 else _moved(packed.cpu(), device)
        assert torch.equal(unpack_codes(stream, bits, count).cpu(), codes & (2**bits - 1)), count


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, its first element at an odd address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:].copy_(tensor)
