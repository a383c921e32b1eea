"""The same training, written in the ways that people write it, needs the same bytes; what cannot be counted is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import actbench
from actbench.errors import UntraceableError
from actbench.scheme import build
from actbench.tools.script.simulation import Simulation

WIDTH, ROWS = 512, 64
FLOAT = 4
SHAPE = (ROWS, WIDTH)
BATCH = ROWS * WIDTH * FLOAT


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Block(nn.Sequential):
    """What a scheme recomputes."""


def train(module: nn.Module, batches: Iterator[Tensor]) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    for x in batches:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def plain(steps: int = 9) -> None:
    train(model().cuda(), (torch.randn(SHAPE).cuda() for _ in range(steps)))


def in_a_device() -> None:
    with torch.device("cuda"):
        module = model()
        assert torch.arange(3).is_cuda
        assert torch.tensor(3).is_cuda
    train(module, (torch.randn(SHAPE, device="cuda") for _ in range(9)))


def on_the_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        train(model(), (torch.randn(SHAPE) for _ in range(9)))
    finally:
        torch.set_default_device(None)


def pinned() -> None:
    train(model().cuda(), (torch.empty(SHAPE, pin_memory=True).cuda(non_blocking=True) for _ in range(9)))


class Rows(Dataset[Tensor]):
    def __init__(self, rows: Callable[[int], Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return 9 * ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self._rows(index)


def loaded_from_a_large_tensor() -> None:
    rows = torch.randn(9 * ROWS, WIDTH)
    train(model().cuda(), (x.cuda() for x in DataLoader(Rows(lambda index: 2 * rows[index]), ROWS, shuffle=True)))


def moved_by_the_collator() -> None:
    def collate(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows).to("cuda")

    loader = DataLoader(Rows(lambda index: torch.randn(WIDTH)), ROWS, collate_fn=collate)
    assert next(iter(loader)).is_cuda
    train(model().cuda(), iter(loader))


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "way",
    [in_a_device, on_the_default_device, pinned, loaded_from_a_large_tensor, moved_by_the_collator],
)
def test_other_ways_need_the_same_bytes(way: Callable[[], None]) -> None:
    with actbench.simulate("rtx-4090") as expected:
        plain()
    with actbench.simulate("rtx-4090") as card:
        way()

    assert card.peak_bytes == expected.peak_bytes


@pytest.mark.slow
def test_batches_of_a_data_set_on_the_card_are_counted() -> None:
    with actbench.simulate("rtx-4090") as expected:
        plain()
    with actbench.simulate("rtx-4090") as card:
        rows = torch.randn(9 * ROWS, WIDTH).cuda()
        train(model().cuda(), (x for (x,) in DataLoader(TensorDataset(rows), ROWS, shuffle=True)))

    assert card.peak_bytes == expected.peak_bytes + 9 * BATCH


@pytest.mark.slow
def test_memory_outside_of_the_steps_is_told() -> None:
    with actbench.simulate("rtx-4090") as card:
        with torch.no_grad():
            model().cuda()(torch.randn(64 * ROWS, WIDTH).cuda())
        plain()

    assert any("outside of the steps" in text for text in card.measurement.warnings)


@pytest.mark.exhaustive
def test_memory_after_the_last_step_is_told() -> None:
    with actbench.simulate("rtx-4090") as card:
        plain(2)
        model().cuda()(torch.randn(64 * ROWS, WIDTH).cuda())

    assert any("outside of the steps" in text for text in card.measurement.warnings)


@pytest.mark.exhaustive
def test_what_is_reserved_is_that_of_the_scheme() -> None:
    """The step before a scheme is applied is none of its."""

    def run(scheme: str | None, convert: Callable[[nn.Module], nn.Module]) -> Simulation:
        with Simulation(actbench.simulate("rtx-4090").profile, scheme=scheme and build(scheme)) as card:
            module = convert(nn.Sequential(*(Block(model()) for _ in range(4))).cuda())
            train(module, (torch.randn(256 * ROWS, WIDTH).cuda() for _ in range(9)))
        return card

    applied = run("checkpoint,blocks=Block", lambda module: module).measurement
    converted = run(None, lambda module: actbench.convert(module, "checkpoint,blocks=Block")).measurement

    assert applied.peak_bytes == converted.peak_bytes
    assert applied.reserved_bytes is not None
    assert converted.reserved_bytes is not None
    assert applied.reserved_bytes <= 1.05 * converted.reserved_bytes


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("layer", "kept"), [(nn.RNN, 3), (nn.LSTM, 11), (nn.GRU, 13)])
def test_recurrent_layers_keep_what_cudnn_keeps(layer: type[nn.RNNBase], kept: int) -> None:
    with actbench.simulate("rtx-4090") as card:
        train(Recurrent(layer).cuda(), (torch.randn(4, ROWS, WIDTH).cuda() for _ in range(9)))

    found = card.measurement
    assert found.activation_bytes is not None
    assert (kept + 1) * 4 * BATCH <= found.activation_bytes <= (kept + 4) * 4 * BATCH
    assert any("what cuDNN keeps of recurrent layers" in reason for reason in found.approximate)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_are_refused_on_a_processor(layer: type[nn.RNNBase]) -> None:
    with pytest.raises(UntraceableError, match=f"holds a {layer.__name__}"), actbench.simulate("cpu"):
        layer(64, 64)(torch.randn(8, 4, 64))


@pytest.mark.exhaustive
def test_lazy_modules_move_when_their_shapes_are_known() -> None:
    with actbench.simulate("rtx-4090") as card:
        module = nn.Sequential(nn.LazyLinear(WIDTH))
        module(torch.randn(2, WIDTH))
        train(module.cuda(), (torch.randn(SHAPE).cuda() for _ in range(9)))

    assert card.measurement.weights_bytes == (WIDTH * WIDTH + WIDTH) * FLOAT


@pytest.mark.exhaustive
def test_padded_rows_are_evaluated() -> None:
    with actbench.simulate("rtx-4090"), torch.no_grad():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).cuda().eval()
        padding = torch.arange(16)[None] >= torch.tensor([[9], [16]])

        assert encoder(torch.randn(2, 16, 64).cuda(), src_key_padding_mask=padding.cuda()).shape == (2, 16, 64)


@pytest.mark.slow
def test_a_batch_that_is_never_moved_is_refused_as_on_a_card() -> None:
    with actbench.simulate("rtx-4090"):
        module = model().cuda()

        with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cpu.*aten::addmm"):
            module(torch.randn(ROWS, WIDTH))
