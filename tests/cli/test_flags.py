from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from actbench.cli.app import app
from actbench.cli.caseflags import CaseFlags
from actbench.cli.flags import SchemeFlags, _float_type, _half_type, expanded
from actbench.cli.printing import ExportFlags
from actbench.cli.schemeargs import schemes_from
from actbench.errors import SpecError, UsageError
from actbench.model.records import Case
from actbench.run.recipes import Recipe
from actbench.run.recipes.sections import WorkloadGrid


@dataclass(frozen=True)
class Size:
    rows: Annotated[int, "rows"] = 1
    columns: Annotated[int, "columns"] = 2


def test_fields_stand_where_the_parameter_stood():
    seen = []

    @expanded
    def verb(*, name: str, size: Size, force: bool = False) -> None:
        """Do it."""
        seen.append((name, size, force))

    signature = inspect.signature(verb, eval_str=True)
    verb(name="x", rows=3, columns=4, force=True)

    assert list(signature.parameters) == ["name", "rows", "columns", "force"]
    assert signature.parameters["columns"].default == 2
    assert signature.parameters["columns"].annotation == Annotated[int, "columns"]
    assert seen == [("x", Size(3, 4), True)]
    assert verb.__doc__ == "Do it."


@pytest.mark.parametrize(
    ("verb", "groups"),
    [
        ("sweep", (CaseFlags, ExportFlags)),
        ("measure", (CaseFlags, ExportFlags)),
        ("convert", (SchemeFlags,)),
        ("train", (ExportFlags,)),
    ],
)
def test_verbs_take_every_flag_that_they_share(verb, groups):
    group: Any = typer.main.get_command(app)
    names = {field.name for group in groups for field in fields(group)}

    if "plugged" in names:  # the flags of exports that plug-ins bring
        names = names - {"plugged"} | {"export_html"}
    if "short" in names:  # the flags that schemes declare
        names = names - {"short"} | {"gelu_bits", "activation_bits", "linear"}
    assert names <= {parameter.name for parameter in group.get_command(None, verb).params}


def test_flags_that_are_not_given_are_left_out():
    assert CaseFlags().workload == CaseFlags().measure == {}
    assert CaseFlags(batch_size="8", max_batch=True, meter=["cpu,simulated"]).measure == {
        "meters": ["cpu", "simulated"],
        "device_profile": "cpu",
        "largest_batch": True,
    }
    assert CaseFlags(torch_era="1.10", no_workspaces=True).workload == {"torch_era": "1.10", "workspaces": False}
    assert CaseFlags(scheme=["checkpoint"], short={"gelu_bits": "3"}).schemes == ["checkpoint+fewbit:3,functions=gelu"]


@pytest.mark.parametrize(
    ("flags", "typed"),
    [
        (CaseFlags(scheme=["exact", "smaq"]), "--scheme"),
        (CaseFlags(short={"gelu_bits": "3", "linear": "randomized:0.2"}), "--gelu-bits and --linear"),
        (SchemeFlags(short={"activation_bits": "3"}, scheme=[]), "--activation-bits"),
        (CaseFlags(optimizer="sgd"), ""),
    ],
)
def test_flags_that_schemes_come_from_are_named(flags, typed):
    assert flags.scheme_flags == typed


def test_types_have_short_names_everywhere():
    assert (_float_type("bf16"), _half_type("fp16")) == ("bfloat16", "float16")
    short, long = {"dtype": "fp32", "autocast": "bf16"}, {"dtype": "float32", "autocast": "bfloat16"}
    cases = [Case.model_validate({"model": "x", "batch_size": 1, **types}) for types in (short, long)]
    assert cases[0].key() == cases[1].key()
    grid = WorkloadGrid.model_validate({"model": "x", "batch_size": 1, "dtype": ["bf16", "fp16"], "autocast": "none"})
    assert (grid.dtype, grid.autocast) == (("bfloat16", "float16"), ("none",))
    with pytest.raises(Exception, match="'fp8' is not one of float32, bfloat16, float16"):
        _float_type("fp8")


def test_a_refused_scheme_is_told_with_where_it_was_written():
    with pytest.raises(SpecError, match=re.escape("--linear: scheme 'x' is none")), schemes_from("--linear"):
        raise SpecError("scheme 'x' is none")


@pytest.mark.parametrize(
    "command",
    [
        "measure tiny-roberta --export-markdown",
        "measure tiny-roberta --export-timeline",
        "fit tiny-roberta --device-profile rtx-4090 --export-json",
        "train digits --export-curves",
    ],
)
def test_two_exports_onto_one_file_are_refused_before_anything_runs(
    cli: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    ended = cli(*command.split(), tmp_path / "x.html", "--html", "x.html")

    assert ended.status == 2
    assert "same file" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_unchanged_model_is_not_both_named_and_left_out():
    assert CaseFlags(scheme=["fewbit:3"], no_exact=True).schemes == ["fewbit:3"]
    with pytest.raises(UsageError, match="--no-exact leaves out the scheme exact, and --scheme names it"):
        _ = CaseFlags(scheme=["fewbit:3", "exact"], no_exact=True).schemes


@pytest.mark.parametrize("flags", [("--torch-era", "1.10"), ("--no-workspaces",)])
def test_what_changes_simulated_steps_alone_is_refused_without_any(cli, flags):
    naming = f"{flags[0]} changes only a simulated step"
    cli.refused("measure", "resnet18", *flags, "--meter", "cpu", naming=naming)
    cli.refused("sweep", "quickstart", *flags, "--meter", "cuda", naming=naming)
    made = CaseFlags(torch_era="1.10", meter=["cpu,simulated"])
    recipe = made.recipe(Recipe.from_flags, ({"model": "resnet18", "batch_size": "8"}, {}), cumulative=False)
    assert recipe.meters == {"cpu", "simulated"}


def test_a_wrong_size_of_images_is_told_in_plain_words(cli):
    told = cli.refused("measure", "resnet18", "--image-size", "0x10", naming="'0x10' is no size of images")
    assert "Value error" not in told
