"""Bytes of the first of several processes, in closed form, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from rankednets import BLOCKS, FLOAT, RANKS, WIDTH, Block, even, prepared, read, rows_of, uneven
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.measuring.meters import MemoryReading, Watch
from actbench.scheme.setup import TrainingSetup


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_of_rows_are_weights_gradients_and_state_to_the_byte(ranks: int) -> None:
    shares = [rows_of(parameter, ranks) for parameter in uneven().parameters()]

    reading = read(uneven(), f"fsdp:{ranks}", 5, torch.optim.AdamW)

    assert reading.weights_bytes == FLOAT * sum(shares)
    assert reading.gradients_bytes == FLOAT * sum(shares)
    assert reading.optimizer_bytes == 2 * FLOAT * sum(shares)  # step counters lie in host memory


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mixed", ["", ",mixed=bf16"])
def test_shares_in_host_memory_take_no_byte_of_the_device_but_what_is_gathered(ranks: int, mixed: str) -> None:
    def of(optimizer: Callable[..., torch.optim.Optimizer], offload: str) -> tuple[MemoryReading, int]:
        meter, step = prepared(even(), f"fsdp:{ranks}{mixed}{offload}", WIDTH, optimizer)
        watch = Watch(step)
        reading = meter.memory(step, watch)
        return reading, max(watch.timeline().held_bytes.get("host", (0,)))

    share = FLOAT * sum(rows_of(parameter, ranks) for parameter in even().parameters())
    adam, adam_host = of(torch.optim.AdamW, ",cpu_offload=true")
    sgd, sgd_host = of(torch.optim.SGD, ",cpu_offload=true")
    on_device, _ = of(torch.optim.SGD, "")

    assert (adam.weights_bytes, adam.gradients_bytes, adam.optimizer_bytes) == (0, 0, 0)
    assert sgd.host_bytes == sgd_host
    assert adam.host_bytes is not None
    assert adam_host < adam.host_bytes <= adam_host + 3 * share // BLOCKS  # temporaries of the step
    assert sgd_host == 2 * share  # parameters and gradients
    assert 4 * share <= adam_host <= 4 * share + 4096  # and two moments, and step counters
    assert adam.peak_bytes == sgd.peak_bytes
    assert adam.activation_bytes == on_device.activation_bytes
    assert adam.peak_parts is not None
    assert on_device.peak_parts is not None
    block = WIDTH * WIDTH * (2 if mixed else FLOAT)
    assert adam.peak_parts.communication_bytes <= on_device.peak_parts.communication_bytes + block
    assert adam.peak_bytes < on_device.peak_bytes


def test_what_is_gathered_from_host_memory_is_copied_to_the_device_first() -> None:
    """One unit alone: its share is there while it is copied into the buffer of the gathering, and no longer."""
    kept, moved = (
        read(nn.Sequential(Block(bias=False)), f"fsdp:2{offload}", WIDTH, torch.optim.SGD)
        for offload in ("", ",cpu_offload=true")
    )
    share = FLOAT * WIDTH * WIDTH // 2

    assert kept.phase_peaks is not None
    assert moved.phase_peaks is not None
    assert moved.phase_peaks.forward_bytes <= kept.phase_peaks.forward_bytes
    assert kept.phase_peaks.backward_bytes - moved.phase_peaks.backward_bytes == share


@pytest.mark.parametrize("spec", ["release+fsdp:2,cpu_offload=true", "muon+fsdp:2,cpu_offload=true"])
def test_what_does_not_step_on_the_host_is_refused(spec: str) -> None:
    whole_matrices = spec.startswith("muon")

    def optimizer(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        if whole_matrices:
            return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=lr)
        return torch.optim.AdamW(parameters, lr=lr)

    with pytest.raises(ConversionError, match="not simulated on shares in host memory"):
        read(even(), spec.removeprefix("muon+"), WIDTH, optimizer)


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("zero2:8", "fsdp:8,reshard=false"),
        ("zero2:8,mixed=bf16,cpu_offload=true", "fsdp:8,reshard=false,mixed=bf16,cpu_offload=true"),
        ("zero3:8", "fsdp:8"),
        ("zero3:8,mixed=bf16", "fsdp:8,mixed=bf16"),
    ],
)
def test_stages_of_zero_are_what_torch_has_for_them(name: str, same: str) -> None:
    one, other = (read(even(), spec, WIDTH, torch.optim.AdamW) for spec in (name, same))

    assert one == other


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_of_elements_are_the_state_of_zero1(ranks: int) -> None:
    sizes = [parameter.numel() for parameter in uneven().parameters()]

    reading = read(uneven(), f"zero1:{ranks}", 5, torch.optim.AdamW)

    assert reading.weights_bytes == reading.gradients_bytes == FLOAT * sum(sizes)
    assert reading.optimizer_bytes == 2 * FLOAT * sum(math.ceil(size / ranks) for size in sizes)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_copy_keeps_all_and_its_gradients_lie_in_buckets_from_step_to_step(ranks: int) -> None:
    size = FLOAT * sum(parameter.numel() for parameter in uneven().parameters())

    alone = read(uneven(), "exact", 5, torch.optim.SGD)
    reading = read(uneven(), f"ddp:{ranks}", 5, torch.optim.SGD)

    assert reading.weights_bytes == reading.gradients_bytes == size
    assert reading.activation_bytes == alone.activation_bytes
    assert reading.phase_peaks is not None
    assert alone.phase_peaks is not None
    buckets = 512 * math.ceil(size / 512)  # one of less than a MiB
    assert reading.phase_peaks.forward_bytes == alone.phase_peaks.forward_bytes + buckets


class Spare(nn.Module):
    """A block beside a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = uneven(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


def test_parameters_without_a_gradient_are_allowed_for_if_asked() -> None:
    def twice(spec: str) -> MemoryReading:
        meter, step = prepared(Spare(), spec, 5, torch.optim.SGD)
        meter.memory(step)
        return meter.memory(step)

    with pytest.raises(RuntimeError, match=r"2 parameters had no gradient .*'spare.weight'"):
        twice("ddp:2")

    size = FLOAT * sum(parameter.numel() for parameter in Spare().parameters())
    assert twice("ddp:2,find_unused=true").weights_bytes == size


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "reshard", [True, pytest.param(False, marks=pytest.mark.newer_torch("FSDP2 frees buffers of its copies later"))]
)
def test_what_is_gathered_at_the_peak_is_what_fsdp2_has_under_way(ranks: int, reshard: bool) -> None:
    """In the backward pass of a block: its parameters, those of the next that come, and the last gradients that go.

    Blocks that are not freed after the forward pass are all there, and none comes.
    """
    block = FLOAT * WIDTH * WIDTH
    spec = f"fsdp:{ranks},reshard={str(reshard).lower()}"

    reading = read(even(), spec, WIDTH, torch.optim.SGD)

    assert reading.peak_parts is not None
    assert reading.peak_phase == "backward"
    shown = 3 * block if reshard else BLOCKS * block
    assert reading.peak_parts.communication_bytes == shown
    assert reading.peak_parts.temporary_bytes >= block  # its gradient


def test_parameters_gathered_in_half_the_bytes_halve_what_is_gathered() -> None:
    full, half = (read(even(), f"fsdp:8{mixed}", WIDTH, torch.optim.SGD) for mixed in ("", ",mixed=bf16,reduce=same"))

    assert full.peak_parts is not None
    assert half.peak_parts is not None
    assert half.peak_parts.communication_bytes * 2 == full.peak_parts.communication_bytes
    assert half.weights_bytes == full.weights_bytes
    assert half.gradients_bytes == full.gradients_bytes


def test_gradients_of_micro_batches_are_reduced_one_by_one_or_wait_beside_the_buckets() -> None:
    size = FLOAT * sum(parameter.numel() for parameter in even().parameters())

    shares = read(even(), "accumulate:2+fsdp:8", WIDTH, torch.optim.SGD)
    copies = read(even(), "accumulate:2+ddp:8", WIDTH, torch.optim.SGD)
    alone = read(even(), "accumulate:2", WIDTH, torch.optim.SGD)

    assert shares.gradients_bytes == size // 8
    assert copies.phase_peaks is not None
    assert alone.phase_peaks is not None
    assert copies.phase_peaks.backward_bytes >= alone.phase_peaks.backward_bytes + size


@pytest.mark.parametrize("spec", ["ddp:8", "zero1:8"])
@pytest.mark.parametrize("parts", [2, 4])
def test_gradients_that_wait_are_gradients_at_the_peak(spec: str, parts: int) -> None:
    size = FLOAT * sum(parameter.numel() for parameter in even().parameters())

    reading = read(even(), f"accumulate:{parts}+{spec}", WIDTH, torch.optim.SGD, rows=4)

    assert reading.peak_parts is not None
    assert reading.peak_phase == "backward"
    assert reading.peak_parts.gradients_bytes == 2 * size  # in buckets, and those that wait
    assert reading.peak_parts.activation_bytes < size


@pytest.mark.parametrize("spec", ["ddp:8", "accumulate:2+ddp:8", "accumulate:4+zero1:8"])
def test_buffers_are_broadcast_once_a_step(spec: str) -> None:
    net = even()
    net.register_buffer("scale", torch.ones(3))

    reading = read(net, spec, WIDTH, torch.optim.SGD, rows=4)

    calls = {each.kind: each.calls for each in reading.communication or ()}
    assert calls["broadcast"] == 1


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sharing", ["zero1", "fsdp"])
def test_shares_of_matrices_are_packed_where_the_whole_would_be(sharing: str, ranks: int) -> None:
    """Of 64 processes each has 256 elements of a block's matrix: fewer than make a parameter worth packing."""
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 31))  # 3,968 elements are too few
    packed = WIDTH * WIDTH // ranks
    sizes = [(packed, math.ceil(WIDTH / ranks))] * BLOCKS
    if sharing == "fsdp":
        last = math.ceil(31 / ranks) * WIDTH, math.ceil(31 / ranks)
    else:
        last = math.ceil(31 * WIDTH / ranks), math.ceil(31 / ranks)
    blocks = BLOCKS * 2 * math.ceil(packed / 256) * (256 * 13 // 16)  # 6.5 bits an element, in blocks of 256
    full = 2 * FLOAT * (sum(bias for _, bias in sizes) + sum(last))

    reading = read(net, f"smaq,on=state+{sharing}:{ranks}", WIDTH, torch.optim.AdamW)

    assert reading.optimizer_bytes == blocks + full


@pytest.mark.parametrize("values", [torch.zeros(4, 8)[:, :4], torch.zeros(4, 1).expand(4, 4)])
def test_a_parameter_with_gaps_in_memory_has_no_shares_in_its_order(values: Tensor) -> None:
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(values)

    with pytest.raises(ConversionError, match=r"zero1:2: parameter 'weight' of shape \(4, 4\) has strides .*gaps"):
        read(net, "zero1:2", 4, torch.optim.SGD)


@pytest.mark.parametrize("values", [torch.zeros(8, 4).t(), torch.zeros(1, 4, 8)[:, :, :].permute(2, 0, 1)])
def test_another_order_of_dimensions_is_no_gap(values: Tensor) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(values)

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] * self.weight.sum()

    reading = read(Product(), "zero1:2", 4, torch.optim.AdamW)

    assert reading.optimizer_bytes == 2 * FLOAT * 16


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_are_stepped_and_their_gradients_freed_within_the_backward_pass(ranks: int) -> None:
    """FSDP2 steps a block when its gradients are averaged: at no time is there a share of every gradient."""
    share = FLOAT * WIDTH * WIDTH // ranks

    waiting = read(even(), f"fsdp:{ranks}", WIDTH, torch.optim.AdamW)
    released = read(even(), f"release+fsdp:{ranks}", WIDTH, torch.optim.AdamW)

    assert waiting.gradients_bytes == BLOCKS * share
    assert released.gradients_bytes == 0
    assert released.weights_bytes == waiting.weights_bytes
    assert released.optimizer_bytes == waiting.optimizer_bytes == 2 * BLOCKS * share


def test_a_model_that_is_compiled_whole_is_not_sharded() -> None:
    with pytest.raises(ConversionError, match=r"fsdp:2 .* compile of the whole model: .*; compile its blocks alone"):
        read(even(), "compile,backend=aot_eager_decomp_partition+fsdp:2", WIDTH, torch.optim.SGD)


def test_an_optimizer_of_whole_matrices_has_no_shares_of_elements() -> None:
    with pytest.raises(ConversionError, match="zero1:8: Adafactor updates a parameter as a whole"):
        read(even(), "zero1:8", WIDTH, torch.optim.Adafactor)


def test_averaged_weights_are_not_put_into_one_share() -> None:
    with pytest.raises(ConversionError, match="zero1:8: ScheduleFreeAdamW puts averaged weights"):
        read(even(), "schedule_free+zero1:8", WIDTH, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("fsdp:1", "must be at least 2"),
        ("fsdp:8,reduce=same", "add mixed=bf16"),
        ("fsdp:8,reshard=1", "a number of at least 2 processes"),
        ("fsdp:8,reshard=3", "8 ranks are no multiple of reshard=3"),
        ("fsdp:8,mixed=bf16+autocast:bfloat16", "both set the dtype of the computation"),
        ("fsdp:8,only=layers.0", "only= limits what modules save"),
        ("ddp:x", "ranks"),
        ("zero2:8,reshard=true", "reshard"),
        ("zero2:8+fsdp:8", "both"),
    ],
)
def test_wrong_specifications_fail_before_anything_runs(spec: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        schemes.build(spec)


@pytest.mark.parametrize("spec", ["fsdp:4", "fsdp1:4", "ddp:4", "zero1:4"])
def test_a_program_of_one_process_is_told_how_to_start_several(spec: str) -> None:
    setup = TrainingSetup(even(), loss=lambda m, b: m(b["x"]).sum(), make_optimizer=lambda m: torch.optim.SGD([]))

    with pytest.raises(
        ConversionError, match=r"this process belongs to no process group: start \d+ processes by 'torchrun"
    ):
        actbench.apply(setup, spec)


@pytest.mark.parametrize("spec", ["fsdp:4", "fsdp1:4", "checkpoint,blocks=Block+ddp:4", "zero1:4"])
def test_a_model_alone_is_not_converted(spec: str) -> None:
    with pytest.raises(ConversionError, match="leave that scheme out, and spread the converted model"):
        actbench.convert(even(), spec)
