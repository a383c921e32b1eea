"""A process that is forked when kernels have run trains on, with the same bits, and so do a loader's workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import os, sys
import torch
from torch import nn
import actbench

def gradients(spec, rows):
    torch.manual_seed(0)
    model = actbench.convert(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8)), spec)
    model(torch.randn(rows, 64)).square().mean().backward()
    return [each.grad for each in model.parameters()]

torch.set_num_threads(2)
"""

FORKED = """
cases = [(spec, rows) for spec in sys.argv[1:] for rows in (1, 512)]
expected = [gradients(*case) for case in cases]
child = os.fork()
if child == 0:
    alike = [all(map(torch.equal, gradients(*case), own)) for case, own in zip(cases, expected)]
    print(alike, torch.get_num_threads(), flush=True)
    os._exit(0 if all(alike) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads())
"""

LOADED = """
from torch.utils.data import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        codes = torch.ops.actbench.pack_codes(torch.arange(100, dtype=torch.uint8) % 8, 3)
        return torch.ops.actbench.unpack_codes(codes, 3, 100), len(gradients("fewbit:3", 64))

gradients("fewbit:3", 64)
for epoch in range(2):
    for values, counts in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        assert torch.equal(values[0], torch.arange(100, dtype=torch.uint8) % 8) and counts.tolist() == [4, 4]
        gradients("fewbit:3", 64)
print("loaded")
"""


def output(code: str, *specs: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", TRAINING + code, *specs]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "specs", [("fewbit:3",), pytest.param(("fewbit:6", "gact:L1", "smaq"), marks=pytest.mark.slow)], ids=str
)
def test_a_forked_process_trains_with_the_same_bits(specs: tuple[str, ...]) -> None:
    """Neither Numba ends it, nor does torch wait for ever in the large products."""
    assert output(FORKED, *specs).splitlines() == [f"{[True] * 2 * len(specs)} 1", "0 2"]


@pytest.mark.slow
def test_workers_of_a_loader_run_kernels() -> None:
    assert output(LOADED) == "loaded\n"
