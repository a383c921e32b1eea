"""Where blocks begin and end in steps of networks made for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actbench.measuring.meters.meter import MemoryReading
from actbench.model.blocks import BlockReadings
from actbench.simulator import blockmarks, profiles
from actbench.simulator.simulated import SimulatedMeter

WIDTH, ROWS = 256, 64
TENSOR = WIDTH * ROWS * 4


class Block(nn.Module):
    """Two layers, of which the second keeps nothing that the next block gets."""

    is_block = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Pair(Block):
    """A block that passes on a tuple, with a tensor that no loss depends on."""

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        made = super().forward(x)
        return made, made.detach()


class Net(nn.Module):
    """A stem, three blocks and a head."""

    def __init__(self, kind: type[Block] = Block, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.run = run or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x[0] if isinstance(x, tuple) else x)


def read(module: nn.Module, step_of, profile: str = "a100-80gb") -> MemoryReading:
    meter = SimulatedMeter(profiles.get(profile))
    meter.blocks = blockmarks.found(module)
    return meter.memory(step_of(meter, module, lambda: {"x": torch.randn(ROWS, WIDTH)}))


def blocks_of(module: nn.Module, step_of) -> BlockReadings:
    found = read(module, step_of).blocks
    assert found is not None
    return found


def shape(found: BlockReadings) -> list[tuple[int, ...]]:
    return [
        (block.after_bytes - block.before_bytes, block.forward_peak_bytes - block.before_bytes)
        for block in found.blocks
    ]


def test_blocks_hold_what_their_layers_save(step_of) -> None:
    found = blocks_of(Net(), step_of)
    assert [block.path for block in found.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [held for held, _ in shape(found)] == [2 * TENSOR, 2 * TENSOR, 2 * TENSOR]  # ReLU's result and the sum
    assert {block.output_bytes for block in found.blocks} == {TENSOR}
    gradients = 2 * (WIDTH * WIDTH + WIDTH) * 4
    for block in found.blocks[1:]:
        assert block.done_bytes - block.before_bytes == pytest.approx(gradients * (3 - int(block.path[-1])), rel=0.6)
    assert [(block.keeps_output, block.keeps_input) for block in found.blocks] == [(False, True)] * 3
    assert found.stem_seconds > 0
    assert found.top_seconds > 0
    assert found.end_seconds > 0
    assert found.end_peak_bytes > found.start_bytes


def test_tuples_are_as_their_tensors(step_of) -> None:
    assert shape(blocks_of(Net(Pair), step_of)) == shape(blocks_of(Net(), step_of))


def test_a_recomputed_block_is_marked_once(step_of) -> None:
    found, kept = blocks_of(Net(run=partial(checkpoint, use_reentrant=False)), step_of), blocks_of(Net(), step_of)
    assert [held for held, _ in shape(found)] == [TENSOR] * 3
    for block, other in zip(found.blocks, kept.blocks, strict=True):
        assert block.kind == other.kind
        assert block.keeps_input
        assert block.backward_seconds > 1.3 * other.backward_seconds
    without_graph = partial(checkpoint, use_reentrant=True)
    assert read(Net(run=without_graph), step_of).blocks is None


def test_frozen_blocks_take_no_time_on_the_way_back(step_of) -> None:
    module = Net()
    for part in (module.stem, module.blocks[0]):
        part.requires_grad_(False)
    found = blocks_of(module, step_of)
    first, second, _ = found.blocks
    assert first.backward_seconds == 0
    assert first.backward_peak_bytes == first.done_bytes == second.done_bytes
    assert first.kind != second.kind
    assert found.end_peak_bytes == 0
    assert found.end_seconds == 0


def test_without_a_chain_of_blocks_there_is_no_reading(step_of) -> None:
    assert read(Net(run=lambda block, x: block(block(x))), step_of).blocks is None
    assert read(nn.Linear(WIDTH, 1), step_of).blocks is None


def test_without_speeds_there_are_bytes_alone(step_of) -> None:
    found = read(Net(), step_of, "cpu").blocks
    assert found is not None
    assert found.blocks[0].after_bytes > found.blocks[0].before_bytes
    assert found.blocks[0].forward_seconds == found.stem_seconds == 0
