"""Every recipe that ships is one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench import scheme as schemes, workload as workloads
from actbench.errors import NothingToConvertError
from actbench.model.records import Case
from actbench.run import recipes, sweep
from actbench.scheme.conditions import Limits


@pytest.mark.parametrize("name", recipes.names())
def test_a_shipped_recipe_names_only_what_exists(name: str) -> None:
    planned = sweep.plan(recipes.load(name))

    assert planned
    assert recipes.load(name).title.endswith("?")
    assert {entry.case.scheme for entry in planned} >= {"exact"}


def test_the_smoke_recipe_knows_every_scheme() -> None:
    assert set().union(*schemes_by_model("smoke").values()) == set(schemes.scheme_names())


NOTHING_TO_CONVERT = {
    "resnet-cifar": {"chunked_loss", "invact", "liger", "lora", "msln", "qlora", "regelu2", "resilu2", "tiled_mlp"}
    | {"apollo", "fira", "galore", "muon8bit"},
    "tiny-roberta@num_hidden_layers=6": {"channels_last", "chunked_loss", "liger", "resilu2", "tiled_mlp"},
    "tiny-llama@num_hidden_layers=6": {"channels_last", "regelu2"},
}
"""Of each model of the agreement recipe, the schemes that find no layer there: a new one belongs here or in a row."""


NOT_SIMULATED = {"resnet-cifar": {"autocast", "master", "pure"}}
"""What the recipe says is not simulated: memory of oneDNN's own for convolutions in bfloat16."""


def test_the_agreement_recipe_has_a_row_for_every_scheme_on_every_model() -> None:
    rows = schemes_by_model("agreement")

    without_value = {name for name, scheme in schemes.find_schemes().items() if name != "encode"}
    limits = {name: schemes.build(name).facet(Limits) for name in without_value}
    untraceable = {name for name, each in limits.items() if each and each.untraceable}
    missing = {
        model: names | NOT_SIMULATED.get(model, set()) | untraceable for model, names in NOTHING_TO_CONVERT.items()
    }
    assert rows == {model: set(schemes.alone()) - names for model, names in missing.items()}
    assert {entry.case.meter for entry in recipes.load("agreement").cases()} == {"simulated", "cpu"}


@pytest.mark.sampled(fast=6, slow=6)
@pytest.mark.parametrize(
    ("model", "name"), [(m, name) for m, names in NOTHING_TO_CONVERT.items() for name in sorted(names)]
)
def test_what_has_no_row_finds_nothing_to_convert(model: str, name: str) -> None:
    case = Case(model=model, scheme=name, batch_size=2, meter="simulated")

    with pytest.raises(NothingToConvertError):
        schemes.build(name).apply(workloads.load_workload(case).setup(materialize=False, seed=0))


def schemes_by_model(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in recipes.load(name).cases():
        parts = {part.partition(":")[0].partition(",")[0] for part in entry.case.scheme.split("+")}
        found.setdefault(entry.case.model, set()).update(parts)
    return found


@pytest.mark.exhaustive
def test_the_smoke_recipe_runs_from_the_command_line(cli: Any, tmp_path: Path) -> None:
    ended = cli("sweep", "smoke", "--output", tmp_path, "--export-json", tmp_path / "records.json")
    again = cli("sweep", "smoke", "--output", tmp_path)

    assert ended.status == 0, ended.err
    assert "checkpoint" in ended.out
    assert "0 failed" in ended.err
    assert len(list((tmp_path / "smoke").glob("*.md"))) == 1
    assert again.status == 0
    assert "0 measured, 0 failed" in again.err
