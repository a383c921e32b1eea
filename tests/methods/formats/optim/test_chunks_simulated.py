"""A simulation steps one chunk of a parameter, however many it has, and the peak is that of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.measuring.bench import measure
from actbench.methods.formats.optim import storage
from actbench.methods.formats.optim.storage import CHUNK
from actbench.model.records import Case
from actbench.optim import AdamW
from actbench.simulator.fake import fake_mode


class Count(TorchDispatchMode):
    ran = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step(chunks: int, encoding: str = "bf16", warm: bool = True) -> int:
    with fake_mode():
        parameter = nn.Parameter(torch.empty(chunks, CHUNK))
        parameter.grad = torch.empty_like(parameter)
        optimizer = AdamW([parameter], encoding=encoding)
        optimizer.step()
        if not warm:
            storage._parts_of.cache_clear()
        with Count() as count:
            optimizer.step()
    return count.ran


def test_a_simulated_step_runs_as_many_operators_for_many_chunks_as_for_two():
    assert operators_of_a_step(50) == operators_of_a_step(2) > 10


@pytest.mark.parametrize("encoding", ["bf16", "fp8:e4m3", "int:6"])
def test_the_first_step_of_a_process_runs_the_operators_of_every_other(encoding):
    assert operators_of_a_step(2, encoding, warm=False) == operators_of_a_step(2, encoding)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_the_peak_of_several_chunks_is_that_of_the_allocator(optimizer):
    model = f"tiny-llama@hidden_size=512,intermediate_size=2048,vocab_size={3 * CHUNK // 512 + 100}"
    case = Case(model=model, scheme="encode:bf16", batch_size=1, sequence_length=8, optimizer=optimizer)
    real = measure(case.model_copy(update={"meter": "cpu", "min_steps": 1, "min_seconds": 0.0, "warmup_steps": 0}))
    simulated = measure(case.model_copy(update={"device_profile": "cpu"}))

    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=2e-3)
    assert simulated.optimizer_bytes == real.optimizer_bytes
