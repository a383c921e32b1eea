"""A scheme that does nothing in a training step is refused, alone and as a part of a composition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import ActbenchError, ConversionError, IdleError
from actbench.measuring import bench, inspection
from actbench.model.records import Case, Site
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup

WIDTH, ROWS = 64, 32


class Frozen(nn.Sequential):
    """A part that stays in evaluation mode, as a pretrained trunk may."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)  # type: ignore[return-value]


class Trunk(nn.Sequential):
    """A part by another name."""


class Network(nn.Module):
    def __init__(self, trunk: type[nn.Sequential] = nn.Sequential) -> None:
        super().__init__()
        self.trunk = trunk(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head, self.idle = nn.Linear(WIDTH, 4), nn.Sequential(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def through_the_model(model: Network, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def past_its_modules(model: Network, batch: Batch) -> Tensor:
    x = batch["x"]
    for layer in (model.trunk[0], model.trunk[2], model.head):
        x = F.gelu(F.linear(x, layer.weight, layer.bias))
    return x.square().mean()


def two_layers_in_the_head() -> nn.Module:
    model = Network(Trunk)
    model.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    return model


def frozen_below() -> nn.Module:
    model = Network()
    model.trunk.requires_grad_(False)
    return model


def a_head_alone(model: Network, batch: Batch) -> Tensor:
    return model.head(batch["x"]).square().mean()


def inspected(
    text: str,
    loss: Callable[..., Tensor] = through_the_model,
    rows: int = ROWS,
    model: Callable[[], nn.Module] = Network,
) -> tuple[Site, ...]:
    setup = TrainingSetup(model(), loss=loss)

    def make_batch() -> Batch:
        return {"x": torch.zeros(rows, WIDTH, dtype=next(setup.module.parameters()).dtype)}

    before = inspection.trace(setup, make_batch)
    converted = schemes.build(text).apply(setup)
    return inspection.inspect(before, inspection.trace(converted, make_batch), converted)[0]


HOOKED = ("gact:L1", "smaq,on=activations", "offload")


@pytest.mark.parametrize("text", ["fewbit:3", "randomized:0.5", *HOOKED, "actnn", "checkpoint,blocks=Sequential"])
def test_a_step_that_calls_no_module_is_refused_and_the_message_names_them(text: str) -> None:
    with pytest.raises(
        ConversionError, match=r"nothing that was converted runs in a training step: \S.*; choose"
    ) as info:
        inspected(text, past_its_modules)

    assert str(info.value).startswith(schemes.build(text).spec)


@pytest.mark.parametrize("text", ["regelu2", "checkpoint,blocks=Trunk"])
@pytest.mark.parametrize("other", ["gact:L1", "actnn:L1"])
def test_a_part_of_which_nothing_runs_is_refused_by_its_name(text: str, other: str) -> None:
    assert inspected(other, a_head_alone, model=two_layers_in_the_head)
    with pytest.raises(ConversionError, match=f"^{text}: nothing that was converted runs"):
        inspected(f"{text}+{other}", a_head_alone, model=two_layers_in_the_head)


@pytest.mark.parametrize(
    ("text", "rows", "model", "why"),
    [
        ("randomized:0.2", 1, Network, "no smaller than the input.* larger batch"),
        ("randomized,dim=64", ROWS, Network, "no smaller than the input"),
        ("checkpoint,blocks=Frozen", ROWS, lambda: Network(Frozen), "they are in evaluation mode"),
        ("checkpoint,blocks=Frozen+gact:L1", ROWS, lambda: Network(Frozen), "they are in evaluation mode"),
        ("fewbit:3", ROWS, frozen_below, "no gradient is asked of what goes into them"),
        ("fewbit:3+actnn:L1", ROWS, frozen_below, "no gradient is asked of what goes into them"),
        ("encode:fp16,on=activations", ROWS, lambda: Network().half(), "worth packing"),
        ("smaq,on=maps", 1, lambda: nn.Sequential(nn.Linear(WIDTH, 4)), "no layer that the step calls"),
        ("offload", 1, lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()), "1 KiB"),
    ],
)
def test_a_part_that_runs_and_changes_nothing_is_refused(
    text: str, rows: int, model: Callable[[], nn.Module], why: str
) -> None:
    idle = schemes.build(text.partition("+")[0]).spec
    with pytest.raises(IdleError, match=f"^{idle} does nothing in a training step: .*{why}"):
        inspected(text, rows=rows, model=model)


def test_what_acts_in_one_place_is_no_error() -> None:
    together = ("fewbit:3+gact:L1", "fewbit:3+checkpoint,blocks=Network")
    for text in ("randomized:0.2", "fewbit:3", "gact:L1", "gact:L0", *together):
        assert inspected(text)


def frozen_norms() -> nn.Module:
    """Norms before the first trained layer, which saves nothing for it, and after it, which does."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    for norm in (model[0], model[2]):
        norm.requires_grad_(False)
    return model


def test_a_frozen_norm_packs_what_the_layers_before_it_need_and_the_others_are_told() -> None:
    setup = TrainingSetup(frozen_norms(), loss=lambda model, batch: model(batch["x"]).square().mean())

    def make_batch() -> Batch:
        return {"x": torch.zeros(ROWS, WIDTH)}

    before = inspection.trace(setup, make_batch)
    converted = schemes.build("gact:L1,only=LayerNorm").apply(setup)
    sites, unreached = inspection.inspect(before, inspection.trace(converted, make_batch), converted)

    bytes_of = {site.path: (site.bytes_before, site.bytes_after) for site in sites}
    assert bytes_of["0"] == (0, 0)
    assert bytes_of["2"][0] >= 4 * ROWS * WIDTH  # its input, and a mean and a deviation for each row
    assert bytes_of["2"][1] < bytes_of["2"][0] / 2
    assert [(each.path, each.reason) for each in unreached] == [("0", "it runs, and saves nothing that is packed")]


def test_frozen_norms_alone_are_refused_where_nothing_is_trained_before_them() -> None:
    def trained_above() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH).requires_grad_(False), nn.Linear(WIDTH, 4))

    with pytest.raises(IdleError, match="gact:L1,only=LayerNorm does nothing in a training step"):
        inspected("gact:L1,only=LayerNorm", lambda model, batch: model(batch["x"]).mean(), model=trained_above)


BUILD = """
import torch
from torch import nn
from torch.nn import functional as F

def build():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.ModuleDict({"body": body, "head": nn.Linear(64, 4)})
    def past(m, b):
        return F.linear(F.gelu(F.linear(b["x"], m["body"][0].weight)), m["head"].weight).square().mean()
    def parts(m, b):
        return m["head"](m["body"](b["x"])).square().mean()
    return model, lambda n: {"x": torch.randn(n, 64)}, CHOSEN
"""


@pytest.mark.parametrize("meter", ["simulated", "cpu"])
def test_a_measurement_of_what_does_nothing_fails_and_says_what_to_do(meter: str, tmp_path: Path) -> None:
    for chosen in ("past", "parts"):
        (tmp_path / f"{chosen}.py").write_text(BUILD.replace("CHOSEN", chosen))

    def measured(chosen: str, scheme: str) -> float | str:
        case = Case(
            model=f"{tmp_path / chosen}.py:build", scheme=scheme, batch_size=64, meter=meter, gradient_quality=False
        )
        try:
            return bench.Session(case).memory().activation_bytes
        except ActbenchError as error:
            failure = bench.failure_of(error)
            return f"{failure.reason}: {failure.message}"

    found = measured("past", "gact:L1")
    assert isinstance(found, str)
    assert found.startswith(
        "nothing-converted: gact:L1: nothing that was converted runs in a training step: (the model);"
    )
    assert measured("parts", "fewbit:3+gact:L1") < 0.8 * measured("parts", "fewbit:3")


@pytest.mark.slow
def test_a_search_for_the_largest_batch_only_warns_of_a_batch_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(BUILD.replace("CHOSEN", "parts"))
    fields = {
        "model": f"{tmp_path}/parts.py:build",
        "scheme": "randomized:0.2",
        "batch_size": 1,
        "gradient_quality": False,
    }
    with pytest.raises(IdleError):
        bench.Session(Case(**fields))
    limit = {"device_profile": "cpu", "memory_limit_bytes": 2**18}
    found = bench.Session(Case(**fields, **limit, find_largest_batch=True)).memory()

    assert found.largest_batch > 1
    assert any(
        "at a batch of 1, randomized:0.2 does nothing in a training step" in warning for warning in found.warnings
    )
