"""Operators of packed sequences on a simulated card: torch's own results, from lengths that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from actbench.errors import UntraceableError
from actbench.simulator import profiles
from actbench.simulator.operators import card_operators
from actbench.tools.script.simulation import Simulation


def packed_and_padded(batch_first: bool, total_length: int | None) -> tuple[Tensor, ...]:
    x = torch.arange(4 * 5 * 2.0).view(4, 5, 2).requires_grad_()
    steps_first = x if batch_first else x.transpose(0, 1)
    packed = pack_padded_sequence(steps_first, torch.tensor([2, 5, 1, 2]), batch_first, enforce_sorted=False)
    padded, lengths = pad_packed_sequence(packed, batch_first, padding_value=-1.0, total_length=total_length)
    (gradient,) = torch.autograd.grad((padded * torch.arange(padded.numel()).view(padded.shape)).sum(), x)
    return packed.data.detach(), packed.batch_sizes, padded.detach(), lengths, gradient


@pytest.mark.parametrize("total_length", [None, 7])
@pytest.mark.parametrize("batch_first", [True, False])
def test_real_tensors_have_torchs_results_and_gradients(batch_first: bool, total_length: int | None) -> None:
    expected = packed_and_padded(batch_first, total_length)
    with card_operators(profiles.get("t4")):
        found = packed_and_padded(batch_first, total_length)

    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_lengths_of_the_data_decide_the_shapes_of_a_script() -> None:
    with Simulation(profiles.get("rtx-4090"), steps=1) as card:
        layer = nn.GRU(16, 32, batch_first=True).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        packed = pack_padded_sequence(torch.randn(3, 9, 16, device="cuda"), torch.tensor([9, 4, 2]), batch_first=True)
        output, hidden = layer(packed)
        padded, lengths = pad_packed_sequence(output, batch_first=True)
        padded.sum().backward()
        optimizer.step()

    assert output.data.shape == (15, 32)
    assert hidden.shape == (1, 3, 32)
    assert (padded.shape, lengths.tolist()) == ((3, 9, 32), [9, 4, 2])
    assert "cuDNN" in card.measurement.approximate[0]


def test_lengths_that_follow_from_weights_are_refused() -> None:
    with Simulation(profiles.get("rtx-4090")):
        x = nn.Linear(8, 8).cuda()(torch.randn(3, 9, 8, device="cuda"))
        with pytest.raises(UntraceableError, match="lengths are not known"):
            pack_padded_sequence(x, x.argmax(-1)[:, 0].cpu(), batch_first=True)


@pytest.mark.parametrize(
    ("lengths", "reason"), [([9, 0], "greater than 0"), ([4, 9], "enforce_sorted"), ([10, 4], "10 is more than the 9")]
)
def test_lengths_that_torch_refuses_are_refused(lengths: list[int], reason: str) -> None:
    with Simulation(profiles.get("rtx-4090")):
        x = nn.Linear(8, 8).cuda()(torch.randn(2, 9, 8, device="cuda"))
        with pytest.raises(RuntimeError, match=reason):
            pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
