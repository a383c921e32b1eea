"""CTC losses on tensors without values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.errors import UntraceableError
from actbench.simulator import profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.fake import fake_mode
from actbench.tools.script.simulation import Simulation


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


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("device", ["cpu", "rtx-4090"])
def test_ctc_without_values_keeps_what_it_does_with_them(device: str, reduction: str) -> None:
    real = kept_by_ctc(reduction)
    with simulated(profiles.get(device)), fake_mode(), torch.device(place()):
        assert kept_by_ctc(reduction) == real


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_lengths_may_be_numbers_and_a_sample_may_stand_alone(reduction: str) -> None:
    with simulated(profiles.get("rtx-4090")), fake_mode(), torch.device("cuda"):
        targets = torch.randint(1, 11, (7,))
        scores = torch.randn(40, 11, requires_grad=True).log_softmax(-1)
        alone = F.ctc_loss(scores, targets, torch.tensor(40), torch.tensor(7), reduction=reduction, zero_infinity=True)
        of_two = F.ctc_loss(torch.stack([scores] * 2, 1), targets.repeat(2), (40, 40), (7, 7), reduction=reduction)

    assert (alone.shape, of_two.shape) == ((), (2,) if reduction == "none" else ())
    assert alone.requires_grad
    assert of_two.requires_grad


def test_targets_of_several_lengths_count_as_the_longest() -> None:
    with Simulation(profiles.get("rtx-4090"), steps=1) as card:
        head = torch.nn.Linear(16, 30).cuda()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        lengths = torch.tensor([3, 9, 4])
        before = torch.cuda.memory_allocated()
        log_probs = head(torch.randn(50, 3, 16, device="cuda")).log_softmax(-1)
        made = torch.cuda.memory_allocated()
        loss = F.ctc_loss(log_probs, torch.randint(1, 30, (16,)).cuda(), torch.tensor([50, 40, 30]), lengths)
        kept = torch.cuda.memory_allocated() - made
        loss.backward()
        optimizer.step()

    assert made > before
    forward = 3 * 50 * (2 * 9 + 1) * 4
    assert forward < kept < forward + 4096  # losses, targets and scalars
    assert card.measurement.approximate == ()


def test_lengths_that_nobody_knows_are_refused() -> None:
    with Simulation(profiles.get("rtx-4090")):
        log_probs = torch.nn.Linear(16, 30).cuda()(torch.randn(50, 3, 16, device="cuda")).log_softmax(-1)
        targets, lengths = torch.ones(3, 9).long().cuda(), log_probs.argmax(-1)[0]
        with pytest.raises(UntraceableError, match=r"lengths of the targets.*--meter cuda"):
            F.ctc_loss(log_probs, targets, torch.full((3,), 50), lengths)
