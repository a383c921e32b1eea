"""Losses that look at values, on tensors that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.simulator.fake import fake_mode
from actbench.workload.losses import ForCtc

Write = Callable[..., Path]


def kept_by_ctc(reduction: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shapes of a CTC loss and of its gradient, and the bytes that it keeps, two samples of 7 labels."""
    scores = torch.randn(40, 2, 11, requires_grad=True)
    labels, lengths = torch.randint(1, 11, (2, 7)), torch.full((2,), 40)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    flat = labels.masked_select(labels > 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.ctc_loss(scores, flat, lengths, torch.full((2,), 7), reduction=reduction)
    floating = [tensor for tensor in kept.values() if tensor.is_floating_point() and tensor.dim()]
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    return tuple(loss.shape), tuple(gradient.shape), sum(tensor.untyped_storage().nbytes() for tensor in floating)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_ctc_without_values_keeps_what_it_does_with_them(reduction: str) -> None:
    real = kept_by_ctc(reduction)
    with fake_mode(), ForCtc():
        assert kept_by_ctc(reduction) == real


def test_real_tensors_are_left_alone() -> None:
    values = torch.tensor([1, -1])
    with ForCtc():
        chosen = values.masked_select(values > 0)
        truth = bool((values > 0).any())

    assert (chosen.tolist(), truth) == ([1], True)


@pytest.mark.parametrize(
    "scheme",
    ["gact:L1", *(pytest.param(spec, marks=pytest.mark.sampled(slow=1)) for spec in ("coat", "smaq", "encode:int8"))],
)
def test_ctc_losses_are_simulated_under_packing_hooks(write_config: Write, scheme: str) -> None:
    folder = str(write_config("Wav2Vec2ForCTC"))
    case = Case(model=folder, scheme=scheme, batch_size=1, gradient_quality=False, meter="cpu")
    fields = {"meter": "simulated", "device_profile": "cpu"}
    cpu, simulated = (Session(each).memory() for each in (case, case.model_copy(update=fields)))

    assert simulated.activation_bytes == cpu.activation_bytes
    assert not any("are unknown" in warning for warning in cpu.warnings)
