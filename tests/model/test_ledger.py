"""Paths of modules in ledgers and at peaks."""

from __future__ import annotations

import pytest

from actbench.model.ledger import of_blocks


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("encoder.layer.11.output", "encoder.layer.*.output"),
        ("encoder.layers.encoder_layer_11.mlp.3", "encoder.layers.encoder_layer_*.mlp.3"),
        ("layer1.0.conv1", "layer1.*.conv1"),
        ("h.3", "h.3"),
        ("encoder.layers.encoder_layer_3", "encoder.layers.encoder_layer_3"),
        ("conv_1x1.norm", "conv_1x1.norm"),
        ("", ""),
    ],
)
def test_the_same_module_of_all_blocks_has_one_path(path: str, expected: str) -> None:
    assert of_blocks(path) == expected
