from __future__ import annotations

from collections.abc import Callable

import pytest

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.scheme import Scheme
from actbench.scheme.composed import at_parameters, at_placement
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Packs, Periodic, Spread

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


def spec_of(half: Scheme | None) -> str | None:
    return None if half is None else half.spec


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("fewbit:3", at_parameters, (None, "fewbit:3")),
        ("lora", at_parameters, ("lora:16", None)),
        ("tp:2", at_parameters, ("tp:2", None)),
        ("lora+fewbit:3", at_parameters, ("lora:16", "fewbit:3")),
        ("lora+tp:2+checkpoint", at_parameters, ("lora:16+tp:2", "checkpoint")),
        ("fewbit:3", at_placement, ("fewbit:3", None)),
        ("ddp:2", at_placement, (None, "ddp:2")),
        ("fewbit:3+ddp:2", at_placement, ("fewbit:3", "ddp:2")),
        ("tp:2", at_placement, ("tp:2", None)),
        ("lora+tp:2+fsdp:4", at_placement, ("lora:16+tp:2", "fsdp:4")),
    ],
)
def test_a_scheme_is_cut_where_its_gradients_and_its_tensors_are_compared(
    text: str, at: Callable[[Scheme], tuple[Scheme | None, Scheme | None]], expected: tuple[str | None, str | None]
) -> None:
    first, second = at(schemes.build(text))

    assert (spec_of(first), spec_of(second)) == expected


def test_facets_of_a_composition_are_those_of_its_parts_together() -> None:
    together = schemes.build("checkpoint,every=4,only=a+selective,every=6,only=h+tp:2+ddp:4+channels_last+compile:0.5")

    assert together.facet(Periodic) == Periodic(12)
    assert together.facet(Spread) == Spread({"tp": 2, "dp": 4}, of_layers=True)
    limits = together.facet(Limits)
    assert limits is not None
    assert (limits.untraceable, limits.unsharded) == (
        schemes.build("compile:0.5").facet(Limits).untraceable,  # type: ignore[union-attr]
        schemes.build("channels_last").facet(Limits).unsharded,  # type: ignore[union-attr]
    )
    assert schemes.build("checkpoint+release").facet(Limits) is None
    assert schemes.build("fewbit:3,only=a+fewbit:2,only=b").facet(Packs) is None  # they disagree
