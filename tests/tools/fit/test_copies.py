"""Changes around the blocks, learned from two short copies of a deep model, are those of the whole model."""

from __future__ import annotations

import numpy as np
import pytest
from marks import slow_or_exhaustive
from surveyed import planner_of

from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.tools.fit.costs import AROUND, COPIES, Blocks
from actbench.tools.fit.records import Asked
from actbench.tools.fit.simulations import Means, candidates_of, simulations

NAMES = ["checkpoint", "adam8bit", "release", "chunked_loss:8"]


@pytest.mark.parametrize("scheme", slow_or_exhaustive(["exact", "fsdp:4"], "fsdp:4".__eq__))
def test_two_copies_tell_what_the_whole_model_does(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        model="tiny-llama@num_hidden_layers=12",
        scheme=scheme,
        device_profile="rtx-4090",
        batch_size=2,
        sequence_length=32,
        meter="simulated",
        memory_limit_bytes=1 << 30,
    )
    found = candidates_of(case, Asked(exact=True), profiles.get("rtx-4090"), NAMES)
    learned = {}
    with simulations("copies", case, found, Means(jobs=2, budget_seconds=None)) as made:
        for is_deep in (False, True):
            with monkeypatch.context() as patch:
                if not is_deep:
                    patch.setattr(Blocks, "shortened", lambda blocks, model: None)
                planner = made.planner(case, Asked(), found)
                planner.run()
            learned[is_deep] = planner.space.ways[0].changes
        assert len(planner.found) <= 2 + len(planner.space.ways)  # the exact step: changes are told by copies
        assert {each.model for each in planner.outcomes} >= {
            f"tiny-llama@num_hidden_layers={count}" for count in COPIES
        }

    assert learned[False].keys() == learned[True].keys() != set()
    for change, known in learned[False].items():
        for each in AROUND:
            np.testing.assert_allclose(getattr(learned[True][change], each), getattr(known, each), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_copy_without_blocks_tells_what_is_done_with_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes, settings = ("checkpoint", "offload"), {"batch_size": 64, "image_size": 64}
    short = planner_of("resnet50", schemes, **settings)
    monkeypatch.setattr(Blocks, "shortened", lambda blocks, model: None)
    whole = planner_of("resnet50", schemes, **settings)

    assert (short.space.blocks.is_thinned, whole.space.blocks.copy) == (True, None)
    (told,), (true,) = short.space.ways, whole.space.ways
    assert told.actions.keys() == true.actions.keys()
    assert len(true.actions) > len(schemes)
    for action, effect in true.actions.items():
        assert told.actions[action].keeps_output == effect.keeps_output
        assert told.actions[action].frees_input == effect.frees_input
        for name in ("held", "forward", "backward", "gradients", "seconds"):
            mine, theirs = getattr(told.actions[action].costs, name), getattr(effect.costs, name)
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "kinds", "copy"),
    [
        ("tiny-llama", "aaaaaaaaaaaa", "tiny-llama@num_hidden_layers=4"),
        ("tiny-llama", "aaaabbbbbbba", None),  # its config has one number for both
        ("own.py:build", "aaaaaaaaaaaa", None),
        ("vit_l_16", "aaaaaaaaaaaa", "vit_l_16@without=blocks.[2-10]"),
        ("resnet50", "abbcdddefff", "resnet50@without=blocks.2/blocks.[5-6]/blocks.9"),
        ("resnet50", "abcdefghhijk", None),  # it would hardly be shorter
        ("resnet50", "abbb", None),
    ],
)
def test_a_copy_has_one_of_each_row_of_equal_blocks(model: str, kinds: str, copy: str | None) -> None:
    blocks = Blocks(tuple(f"blocks.{place}" for place in range(len(kinds))), tuple(kinds))

    found = blocks.shortened(model)

    assert (None if found is None else found.copy) == copy
    if found is not None:
        stand_ins = [kinds[found.chosen[place]] for place in found.places]
        assert stand_ins == [*kinds]
