"""Which layer of a model makes the logits."""

from __future__ import annotations

import pytest
from torch import nn

from actbench.tools.script.steps.reading import head_of


class Decoder(nn.Module):
    def __init__(self, *, blocks: int, vocabulary: int) -> None:
        super().__init__()
        mlp = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks)]
        self.blocks = nn.ModuleList(mlp)
        self.lm_head = nn.Linear(64, vocabulary)


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("vocabulary", [100, 1000])  # fewer outputs than a block's layer, and more
def test_no_layer_of_a_block_is_the_head(blocks: int, vocabulary: int) -> None:
    assert head_of([Decoder(blocks=blocks, vocabulary=vocabulary)]) == "lm_head"


def test_a_model_whose_largest_layers_are_equal_has_no_known_head() -> None:
    assert head_of([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]) is None
    assert head_of([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))]) == "1"
    assert head_of([nn.Linear(8, 8)] * 2) is None
