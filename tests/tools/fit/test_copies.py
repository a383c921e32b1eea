"""Changes around the blocks, learned from two short copies of a deep model, are those of the whole model."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from marks import slow_or_exhaustive

from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.tools.fit.copies import COPIES, FromCopies
from actbench.tools.fit.costs import Costs
from actbench.tools.fit.effects import Blocks
from actbench.tools.fit.fitting import Means, choices_of, fitting
from actbench.tools.fit.planner import Planner
from actbench.tools.fit.records import Asked

NAMES = ["checkpoint", "adam8bit", "release", "chunked_loss:8"]


@pytest.mark.parametrize("scheme", slow_or_exhaustive(["exact", "fsdp:4"], "fsdp:4".__eq__))
def test_two_copies_tell_what_the_whole_model_does(scheme: str) -> None:
    case = Case(
        model="tiny-llama@num_hidden_layers=12",
        scheme=scheme,
        device_profile="rtx-4090",
        batch_size=2,
        sequence_length=32,
        meter="simulated",
        memory_limit_bytes=1 << 30,
    )
    choices = choices_of(case, Asked(exact=True), profiles.get("rtx-4090"), NAMES)
    learned = {}
    with fitting("copies", case, choices, Means(jobs=2, budget_seconds=None)) as made:
        for kind in (Planner, FromCopies):
            planner = kind(case, choices, made.simulations(case, Asked()))
            planner.run()
            learned[kind] = planner.space.ways[0].changes
            whole = [each.case for each in planner.found]
        assert len(whole) <= 2 + len(planner.space.ways)  # the exact step: changes are told by copies
        assert {each.model for each in planner.outcomes} >= {
            f"tiny-llama@num_hidden_layers={count}" for count in COPIES
        }

    assert learned[Planner].keys() == learned[FromCopies].keys() != set()
    for change, known in learned[Planner].items():
        told = learned[FromCopies][change]
        for each in fields(Costs):
            np.testing.assert_allclose(getattr(told, each.name), getattr(known, each.name), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "copy"), [("tiny-llama", "tiny-llama@num_hidden_layers=4"), ("own.py:build", None), ("vit_l_16", None)]
)
def test_only_models_with_a_config_have_shorter_copies(model: str, copy: str | None) -> None:
    blocks = Blocks(tuple(f"blocks.{place}" for place in range(12)), ("block",) * 12)

    assert blocks.copy_of(model) == copy
