"""Bits by the type of layer that saves a tensor: closed forms, the allocator, the mean gradient, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.errors import NothingToConvertError, SpecError
from actbench.measuring import inspection
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup

ROWS, WIDTH, INNER, GROUP = 32, 64, 128, 256
SPEC = "gact:L1,widths=linear:4/norm:8/activation:2"


def model() -> nn.Module:
    torch.manual_seed(0)
    block = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in block), nn.Linear(WIDTH, 8))


def packed_bytes(bits: int, elements: int, group: int = GROUP) -> int:
    """Return the closed form: codes, and 32 bits of offset and maximum for each group."""
    return elements * bits // 8 + 4 * (elements // group)


def test_each_type_has_its_bits_and_their_closed_form() -> None:
    setup = schemes.build(SPEC).apply(TrainingSetup(model(), lambda module, batch: module(batch["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(ROWS, WIDTH, requires_grad=True)})
    found: dict[str, set[int]] = {}
    for entry in ledger.entries:
        if entry.packed:
            found.setdefault(entry.module, set()).add(entry.kept_bytes)

    inside = range(4, 12, 4)  # blocks after the first, whose input is the batch
    assert {bytes_ for block in inside for bytes_ in found[str(block)]} == {
        packed_bytes(8, ROWS * WIDTH, WIDTH)
    }  # a row a group
    assert {bytes_ for block in inside for bytes_ in found[str(block + 1)]} == {packed_bytes(4, ROWS * WIDTH)}
    assert {bytes_ for block in inside for bytes_ in found[str(block + 2)]} == {packed_bytes(2, ROWS * INNER)}
    assert {bytes_ for block in inside for bytes_ in found[str(block + 3)]} == {packed_bytes(4, ROWS * INNER)}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("kind", "share"),
    [("norm", ROWS * WIDTH * 2), ("activation", ROWS * INNER * 3), ("linear", ROWS * (WIDTH * 4 + INNER * 3))],
)
def test_the_allocator_confirms_what_4_more_bits_take(kind: str, share: int, tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    case = {
        "model": f"{tmp_path}/own.py:build",
        "batch_size": ROWS,
        "meter": "cpu",
        "warmup_steps": 0,
        "min_steps": 1,
        "gradient_quality": False,
    }
    few, more = (
        measure(Case.model_validate({**case, "scheme": f"gact:L1,widths={kind}:{bits}", "min_seconds": 0.0}))
        for bits in (4, 8)
    )

    assert more.activation_bytes - few.activation_bytes == share * 4 // 8


OWN = f"""
import torch
from torch import nn

def build():
    block = lambda: (nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, {INNER}), nn.GELU(), nn.Linear({INNER}, {WIDTH}))
    model = nn.Sequential(*block(), *block(), *block(), nn.Linear({WIDTH}, 8))
    loss = lambda model, batch: model(batch["x"]).square().mean()
    return model, lambda rows: {{"x": torch.randn(rows, {WIDTH})}}, loss
"""


@pytest.mark.slow
def test_the_mean_gradient_over_several_layers_is_exact() -> None:
    exact, x = model(), torch.randn(ROWS, WIDTH)
    converted = (
        schemes.build("gact:L1,widths=linear:4/norm:8/activation:6").apply(TrainingSetup(copy.deepcopy(exact))).module
    )

    def gradient(module: nn.Module) -> Tensor:
        module.zero_grad()
        module(x).square().sum().backward()
        return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).double()

    truth = gradient(exact)
    along = torch.stack([gradient(converted) @ truth / truth.square().sum() for _ in range(150)])

    assert along.std() > 0
    assert abs(along.mean() - 1) < 4 * along.std() / 150**0.5 + 0.002  # norms: their input gradient is a little small


@pytest.mark.slow
def test_the_innermost_type_comes_first() -> None:
    case = {
        "model": "tiny-roberta",
        "batch_size": 4,
        "meter": "simulated",
        "device_profile": "cpu",
        "gradient_quality": False,
    }
    plain, attention, both = (
        measure(Case.model_validate({**case, "scheme": f"gact:L1{widths}"})).activation_bytes
        for widths in ("", ",widths=attention:8", ",widths=attention:8/linear:4/norm:4")
    )

    assert plain < both < attention


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("gact:L1,widths=linaer:4", "did you mean linear"),
        ("gact:L1,widths=pool:4", "linear, conv, norm, activation, attention"),
        ("gact:L1,widths=linear:9", "from 1 to 8"),
        ("gact:L1,widths=1:2:4:8", "such as widths=linear:4/norm:8"),
        ("gact:L1,widths=linear", "linear:BITS"),
        ("gact:L1,widths=linear:4/linear:2", "twice"),
        ("gact:L2,widths=linear:4", "allocates them by sensitivity; take level L1"),
        ("gact:swap,widths=linear:4", "packs nothing; take level L1"),
    ],
)
def test_what_is_refused(spec: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        schemes.build(spec)


def test_a_type_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match="no layer is of the type conv of widths="):
        schemes.build("gact:L1,widths=conv:4").apply(TrainingSetup(model()))


def test_only_gives_each_part_the_bits_of_its_own_layers() -> None:
    module = model()
    setup = schemes.build(f"{SPEC},only=LayerNorm/Linear/GELU").apply(TrainingSetup(module))

    assert [site.path for site in setup.sites] == [str(place) for place in range(13)]


@pytest.mark.parametrize("only", ["", ",only=0/1"])
def test_a_type_that_is_nowhere_leaves_the_model_as_it_was(only: str) -> None:
    module = model()

    with pytest.raises(NothingToConvertError, match="no layer is of the type conv of widths="):
        schemes.build(f"gact:L1,widths=norm:8/conv:4{only}").apply(TrainingSetup(module))
    schemes.build("gact:L1").apply(TrainingSetup(module))  # which hooks left behind would refuse
