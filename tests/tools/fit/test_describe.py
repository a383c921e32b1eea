"""Plans in words: short names, sentences, and which treat all blocks alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from madeup import LAYERS

from actbench.tools.fit.describe import is_uniform, sentence, short

STAGES = tuple(f"layer{stage}.{place}" for stage, count in ((1, 3), (2, 4)) for place in range(count))
TWO = tuple(f"model.{half}.layers.{place}" for half in ("encoder", "decoder") for place in range(4))


@pytest.mark.parametrize(
    ("blocks", "spec", "name", "words"),
    [
        (LAYERS, "exact", "exact", "exact"),
        (
            LAYERS,
            "checkpoint,only=model.layers.[0-10]+msln,only=model.layers.[11-31]+chunked_loss:8",
            "checkpoint blocks 0-10, msln blocks 11-31, chunked_loss:8",
            "checkpoint on blocks 0-10, msln on blocks 11-31, chunked_loss:8",
        ),
        (
            LAYERS,
            "checkpoint,only=model.layers.[0-3]/model.layers.9+offload,only=model.layers.[0-1]",
            "checkpoint+offload blocks 0-1, checkpoint blocks 2-3/9",
            "checkpoint with offload on blocks 0-1, checkpoint on blocks 2-3 and 9",
        ),
        (
            LAYERS,
            "msln,only=model.norm/model.layers.[0-31]",
            "msln all blocks and model.norm",
            "msln on all blocks and on model.norm",
        ),
        (
            STAGES,
            "gact:L2,only=conv1/layer1.[0-1]/layer2.3",
            "gact:L2 blocks layer1.0-1/layer2.3 and conv1",
            "gact:L2 on blocks layer1.0-1 and layer2.3 and on conv1",
        ),
        (
            TWO,
            "checkpoint,only=model.decoder.layers.[0-1]",
            "checkpoint blocks decoder.layers.0-1",
            "checkpoint on blocks decoder.layers.0-1",
        ),
        ((), "checkpoint,only=h.0", "checkpoint h.0", "checkpoint on h.0"),
    ],
)
def test_plans_in_words(blocks: Sequence[str], spec: str, name: str, words: str) -> None:
    assert short(spec, blocks) == name
    assert sentence(spec, blocks) == words


def test_what_every_plan_has_is_left_out_of_names() -> None:
    assert short("lora:16+checkpoint", LAYERS, "lora:16") == "checkpoint"
    assert short("lora:16", LAYERS, "lora:16") == "lora:16"


def test_what_is_uniform() -> None:
    assert is_uniform("checkpoint+offload,only=model.layers.[0-31]+msln,only=model.norm", LAYERS)
    assert not is_uniform("offload,only=model.layers.[0-30]", LAYERS)
    assert not is_uniform("offload,only=h.0", ())
