"""Flat parameters of FSDP1 in the first of several processes: bytes in closed form, and what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from rankednets import FLOAT, RANKS, WIDTH, Block, even, read, uneven
from torch import Tensor, nn

from actbench.errors import ConversionError
from actbench.measuring import bench
from actbench.model.records import Case


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ranks", RANKS)
def test_parts_of_flat_parameters_are_weights_gradients_and_state_to_the_byte(ranks: int) -> None:
    aligned = 16 // FLOAT  # elements
    net = uneven()
    ends = [[*net[3].parameters()], [*net[4].parameters()], [p for i in (0, 1, 2, 5) for p in net[i].parameters()]]
    sizes = [sum(aligned * math.ceil(each.numel() / aligned) for each in unit) for unit in ends]
    share = FLOAT * sum(math.ceil(size / ranks) for size in sizes)

    reading = read(net, f"fsdp1:{ranks}", 5, torch.optim.AdamW)

    assert share - 3 * 16 <= reading.weights_bytes <= share + 3 * 16  # after the last parameter nothing is aligned
    assert reading.gradients_bytes == reading.weights_bytes
    assert share - 9 * 16 <= reading.optimizer_bytes / 2 <= share + 3 * 16  # none of what lies between parameters


@pytest.mark.slow
def test_what_is_gathered_at_the_peak_is_what_fsdp1_has_under_way() -> None:
    """The parameters of the block that runs, the gradients that go, and the parameters that come."""
    block = FLOAT * WIDTH * WIDTH

    pre, none = (read(even(), f"fsdp1:8,prefetch={order}", WIDTH, torch.optim.SGD) for order in ("pre", "none"))

    assert pre.peak_parts is not None
    assert none.peak_parts is not None
    assert pre.peak_parts.communication_bytes == 3 * block
    assert none.peak_parts.communication_bytes == 2 * block
    assert pre.activation_bytes == read(even(), "fsdp:8", WIDTH, torch.optim.SGD).activation_bytes


def test_frozen_parameters_of_a_flat_one_have_gradients() -> None:
    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__(bias=False)
            self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.base(x))

    def net() -> nn.Module:
        return nn.Sequential(Adapted(), Adapted(), Adapted())

    matrix = FLOAT * WIDTH * WIDTH
    specs = ("fsdp1:8", "fsdp:8", "fsdp1:8,adapters=apart", "fsdp1:8,adapters=whole")
    flat, separate, apart, whole = (read(net(), spec, WIDTH, torch.optim.SGD) for spec in specs)

    assert separate.gradients_bytes == apart.gradients_bytes == 3 * matrix // 8
    assert flat.gradients_bytes == 6 * matrix // 8
    assert flat.peak_bytes >= separate.peak_bytes + matrix
    assert whole.gradients_bytes == 3 * matrix
    assert whole.weights_bytes == 3 * (matrix + matrix // 8)


def test_a_flat_parameter_has_one_type() -> None:
    net = even()
    net[1].linear.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))

    with pytest.raises(ConversionError, match=r"FSDP1 cannot flatten parameters of Sequential: .*uniform dtype"):
        read(net, "fsdp1:2", WIDTH, torch.optim.SGD)


@pytest.mark.parametrize(
    ("spec", "optimizer", "reason"),
    [
        ("fsdp1:2", torch.optim.Adafactor, "fsdp1:2: Adafactor updates a parameter as a whole"),
        ("fsdp1:2,adapters=whole", torch.optim.SGD, "nothing is frozen.*: take ddp"),
        ("gact+fsdp1:2", torch.optim.SGD, "which FSDP1 does not gather the parameters for"),
    ],
)
def test_what_flat_parameters_cannot_be_is_refused(
    spec: str, optimizer: Callable[..., torch.optim.Optimizer], reason: str
) -> None:
    with pytest.raises(ConversionError, match=reason):
        read(even(), spec, WIDTH, optimizer)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("spec", ["fsdp:2", "fsdp1:2"])
def test_a_block_may_have_names_that_torch_has(spec: str) -> None:
    net = even()
    net[0]._handle = 3

    assert read(net, spec, WIDTH, torch.optim.SGD) == read(even(), spec, WIDTH, torch.optim.SGD)


def test_warnings_of_the_process_stay_as_they_were() -> None:
    with warnings.catch_warnings(record=True) as shown:
        before = list(warnings.filters)
        read(even(), "fsdp1:2", WIDTH, torch.optim.SGD)

        assert warnings.filters == before
    assert [str(each.message) for each in shown if "FakeTensor" in str(each.message)] == []


def test_parts_of_layers_are_not_flattened() -> None:
    case = Case(model="tiny-llama", batch_size=1, sequence_length=8, meter="simulated", scheme="tp:2+fsdp1:2")

    with pytest.raises(ConversionError, match="does not go with tensor parallelism"):
        bench.measure(case)
