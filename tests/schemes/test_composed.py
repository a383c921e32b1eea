from __future__ import annotations

import pytest

from actbench import schemes
from actbench.errors import SpecError

HOOKS = "both pack or move saved tensors by hooks"
LAYERS = "both replace activation layers"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gact+offload", f"scheme 'gact\\+offload': gact and offload {HOOKS}.*gact:L3 does both"),
        ("offload+checkpoint+gact:L1", f"offload and gact {HOOKS}"),
        ("smaq+offload", f"smaq and offload {HOOKS}"),
        ("encode:bf16+gact", f"encode and gact {HOOKS}"),
        ("smaq,on=state+encode:int:6,on=state/maps", "smaq and encode both say how optimizer state is kept"),
        (
            "encode:int:6,on=gradients+optimizer_offload",
            "encode and optimizer_offload both say where gradients wait for the optimizer",
        ),
        ("fewbit:3,functions=relu+regelu2", f"fewbit and regelu2 {LAYERS}"),
        ("invact+resilu2", f"invact and resilu2 {LAYERS}"),
    ],
)
def test_what_one_scheme_alone_can_do_is_refused_before_there_is_a_model(text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        schemes.build(text)


@pytest.mark.parametrize(("text", "helps"), [("smaq+offload", True), ("gact+smaq", False), ("invact+fewbit", False)])
def test_gact_is_advised_only_where_tensors_are_to_be_moved(text: str, helps: bool) -> None:
    with pytest.raises(SpecError) as caught:
        schemes.build(text)

    assert str(caught.value).endswith("; leave one of them out" + " (gact:L3 does both)" * helps)
    assert str(caught.value).count("gact:L3") == helps


@pytest.mark.parametrize(
    "text",
    [
        "gact:L2+checkpoint",
        "checkpoint+offload",
        "actnn:L3+offload",
        "smaq,on=state+offload",
        "smaq,on=activations+encode:bf16,on=state/maps",
        "fewbit:3+randomized:0.2+gact:L1",
    ],
)
def test_what_can_stand_together_is_built(text: str) -> None:
    assert sorted(part.name for part in schemes.build(text).parts) == sorted(
        part.partition(":")[0].partition(",")[0] for part in text.split("+")
    )
