"""kernels/bitpack.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import pytest
import torch

from actbench.ops import bitpack
from actbench.ops.cuda import bitpack as cuda

SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("start", [0, 1])
def test_packing_and_unpacking_are_the_reference(bits: int, start: int, device: torch.device) -> None:
    for count in SIZES:
        codes = torch.randint(256, (start + count,), dtype=torch.uint8)[start:]
        expected = bitpack.pack(codes & (2**bits - 1), bits)
        packed = cuda.pack_codes(codes.to(device) if start == 0 else _moved(codes, device), bits)

        assert torch.equal(packed.cpu(), expected), count
        stream = packed if start == 0 else _moved(packed.cpu(), device)
        assert torch.equal(cuda.unpack_codes(stream, bits, count).cpu(), codes & (2**bits - 1)), count


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, its first element at an odd address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:].copy_(tensor)
