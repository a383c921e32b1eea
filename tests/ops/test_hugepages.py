import mmap
from pathlib import Path

import pytest
import torch

from actbench.methods.fewbit.ops import mask
from actbench.ops import library

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OFFERED = hasattr(mmap, "MADV_HUGEPAGE") and MODES.exists()


@pytest.mark.skipif(not OFFERED, reason="this system has no transparent huge pages")
def test_the_system_takes_the_advice_for_a_large_tensor():
    assert library.advise(torch.empty(library.LEAST_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize(("count", "asked"), [(library.LEAST_BYTES // 2 - 1, 0), (library.LEAST_BYTES // 2, 1)])
def test_only_large_tensors_ask(count, asked, monkeypatch):
    calls = []
    monkeypatch.setattr(library, "advise", calls.append)
    out, _ = mask.relu(torch.zeros(count, dtype=torch.float16))
    assert (out.shape, out.dtype, len(calls)) == ((count,), torch.float16, asked)


def test_the_range_is_of_whole_pages_inside_the_tensor(monkeypatch):
    tensor = torch.empty(1_000_003, dtype=torch.uint8)[5:]
    ranges = []
    monkeypatch.setattr(library, "_madvise", lambda: lambda *arguments: ranges.append(arguments) or 0)
    library.advise(tensor)
    ((start, length, _),) = ranges
    assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
    assert 0 <= start - tensor.data_ptr() < mmap.PAGESIZE
    assert 0 <= tensor.data_ptr() + tensor.nbytes - start - length < mmap.PAGESIZE
