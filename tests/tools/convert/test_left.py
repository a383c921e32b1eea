"""What a scheme works on outside of the model is said when a model alone is converted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

import actbench
from actbench.errors import ConversionError
from actbench.model.records import Case
from actbench.tools.convert.workload import convert_workload


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def test_that_the_state_of_the_optimizer_stays_is_said_once() -> None:
    with pytest.warns(UserWarning, match="optimizer") as caught:
        actbench.convert(model(), "smaq")

    (warning,) = caught
    assert "smaq: optimizer state stays as it is" in str(warning.message)
    assert "actbench.optim.packed(optimizer, encoding=" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.parametrize("scheme", ["smaq,on=activations", "fewbit:3", "gact"])
def test_where_nothing_stays_outside_nothing_is_said(scheme: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actbench.convert(model(), scheme)


LOOP = ["torch.autocast", "bf16=True"]
LAST = "model.to(memory_format=torch.channels_last)"
CAST, PARTS = "cast the model and its inputs", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("scheme", "changed", "remedies"),
    [
        ("autocast:bf16", "autocast,", LOOP),
        ("pure:bf16", "the type of inputs,", [CAST]),
        ("accumulate:4", "how a batch is fed,", [PARTS]),
        ("channels_last", "the memory format of inputs,", [LAST]),
        ("accumulate:4+autocast:bf16", "autocast and how a batch is fed,", [*LOOP, PARTS]),
    ],
)
def test_what_a_model_cannot_carry_is_told_with_its_own_remedy(scheme: str, changed: str, remedies: list[str]) -> None:
    with pytest.raises(ConversionError) as caught:
        actbench.convert(nn.Sequential(nn.Conv2d(1, 1, 1), model()), scheme)

    said = str(caught.value)
    assert f"also changes {changed}" in said
    assert [each for each in (*LOOP, CAST, LAST, PARTS) if each in said] == remedies
    assert "optimizer" not in said


@pytest.mark.slow
def test_the_command_line_leaves_the_optimizer_out_as_convert_does() -> None:
    case = Case(model="tiny-bert", batch_size=2, scheme="adam8bit")
    with pytest.raises(ConversionError, match=r"make torchao\.optim\.AdamW8bit of its parameters"):
        convert_workload(case, None)

    report = convert_workload(case.model_copy(update={"scheme": "smaq"}), None)

    assert report.bytes_after < report.bytes_before
    (left,) = [left for left in report.unreached if not left.path]
    assert "actbench.optim.packed(optimizer" in left.reason
