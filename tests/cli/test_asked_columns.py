"""Every flag that asks for something has its column in the table, however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from actbench.cli.app import app, verbs_of
from actbench.model.measured import Generated, MeasuredRecord, PeakParts
from actbench.run.experiment import ExperimentResult, Summary
from actbench.units import GIB

MakeRecord = Callable[..., MeasuredRecord]

ANSWERS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "measure": {
        "--batch-size": (("-b", "1000,2000"), "Batch"),
        "--sequence-length": (("--sequence-length", "1000,2000"), "Sequence length"),
        "--infer": (("--infer",), "Cache"),
        "--generate": (("--generate", "64"), "Cache"),
        "--cache": (("--infer", "--cache", "static"), "Cache"),
        "--scheme": (("-s", "checkpoint"), "Scheme"),
        "--cumulative": (("--cumulative", "-s", "checkpoint", "-s", "adam8bit"), "Peak, vs previous"),
        "--meter": (("-m", "cpu,simulated"), "Meter"),
        "--memory-limit": (("--memory-limit", "16GiB"), "Over limit"),
        "--require-fit": (("--require-fit",), "Over limit"),
        "--max-batch": (("--max-batch",), "Largest batch"),
        "--columns": (("--columns", "scheme,peak,temporaries"), "Temporaries at peak"),
    },
    "run": {
        "--batch-size": (("-b", "2000"), "Batch"),
        "--scheme": (("-s", "checkpoint"), "Scheme"),
        "--max-batch": (("-s", "checkpoint", "--max-batch"), "Largest batch"),
        "--memory-limit": (("-s", "checkpoint", "--memory-limit", "16GiB"), "Over limit"),
        "--require-fit": (("-s", "checkpoint", "--require-fit"), "Over limit"),
        "--columns": (("--columns", "scheme,peak,temporaries"), "Temporaries at peak"),
    },
    "report": {"--columns": (("--columns", "scheme,peak,temporaries"), "Temporaries at peak")},
    "compare": {
        "--fail-on": (("--fail-on", "activations:5%", "--fail-on", "largest_batch:0%"), "Largest batch change"),
    },
}
"""By verb and flag: what is typed, and the heading of the column with the answer."""

ANSWERS["sweep"] = ANSWERS["measure"]

SETTING = "a setting: a column where rows differ in it, else a line below the table"
HOW = "says how cases are run, not what is asked of them"
FILE = "a file has all columns"
TOGETHER = "a part of the scheme, which is a column"
OF_FIT = "the tables of fit have the same columns for every question: plan, need, time, gradient"

WITHOUT: dict[str, str] = {
    **dict.fromkeys(("--target-length", "--packed", "--image-size", "--dtype", "--autocast", "--optimizer"), SETTING),
    **dict.fromkeys(("--task", "--attention", "--weights", "--seed", "--device-profile", "--torch-era"), SETTING),
    "--no-workspaces": SETTING,
    **dict.fromkeys(
        ("--trust-remote-code", "--trust-recipe", "--jobs", "--timeout", "--force", "--retry-failed", "--live"), HOW
    ),
    **dict.fromkeys(("--cluster", "--gpus-per-case", "--resources", "--quiet", "--verbose", "--module"), HOW),
    **dict.fromkeys(("--budget", "--raise-oom", "--dry-run"), HOW),
    **dict.fromkeys(("--gelu-bits", "--activation-bits", "--linear", "--base"), TOGETHER),
    **dict.fromkeys(("--max-slowdown", "--max-gradient-error", "--exact", "--script", "--processes"), OF_FIT),
    **dict.fromkeys(("--longest-sequence", "--largest-batch", "--which-card"), "has a table of its own"),
    **dict.fromkeys(("--ledger", "--top", "--all", "--timeline", "--time-by", "--whole", "--measure"), "as above"),
    "--steps": "says how exactly times are known, which Speed and Samples/s have",
    "--seconds": "as of --steps",
    "--no-exact": "leaves rows out",
    "--full-answer": "sentences below the table, which compare nothing",
    "--gpus": "the verdict names the number of cards, which all rows have",
    "--probe": "the table of convert has what was kept before and after",
    "--title": "the heading of the table",
    "--meter": "one, which all rows have; measure and sweep take several",
    "--format": "how broken limits are told",
    "--code": "code below the tables",
    "--output": FILE,
}
"""By flag: why it adds no column."""

MANY_COLUMNS = """
title = "A table of many columns"
columns = "model,scheme,peak,saved,activations,speed,samples-per-second,peak-in,gradient-error,weights,optimizer,host"
[workload]
model = "tiny-gpt2"
batch_size = 1000
[[scheme]]
spec = "exact"
"""


def declared(verb: str) -> list[str]:
    return [each.opts[0] for each in verbs_of(app)[verb].params if each.param_type_name == "option"]


@pytest.mark.parametrize("verb", ["measure", "sweep", "run", "convert", "fit", "compare", "report"])
def test_each_flag_has_a_column_or_a_reason(verb: str) -> None:
    answered = ANSWERS.get(verb, {}).keys()
    open_flags = {name for name in declared(verb) if not name.startswith("--export-")} - answered - WITHOUT.keys()

    if verb in ("convert", "fit"):  # their tables have the same columns, whatever is asked
        open_flags -= ANSWERS["measure"].keys()
    assert not open_flags, "a new flag: say in ANSWERS which column has its answer, or in WITHOUT why there is none"
    assert answered <= set(declared(verb))


@pytest.fixture
def stored(make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each command find records of its cases that have all values, in texts as long as they get."""
    from actbench.run import stored

    def found(name: str, title: str, written: Any, output: Any, **_: Any) -> ExperimentResult[MeasuredRecord]:
        records = tuple(filled(make_record, planned.case.model_dump()) for planned in written())
        return ExperimentResult(records, Summary(skipped=len(records)), None)

    monkeypatch.setattr(stored, "stored_results", found)


def filled(make_record: MakeRecord, case: dict[str, Any]) -> MeasuredRecord:
    stack = case["scheme"].count("+") + (case["scheme"] != "exact")
    record = make_record(
        **{**case, "device_profile": "rtx-4090" if case["meter"] == "simulated" else None},
        peak_bytes=(1023 - 100 * stack) * GIB,
        activation_bytes=900 * GIB,
        optimizer_bytes=100 * GIB,
        largest_batch=100_000,
        step_seconds=(1.0, 1.5, 3.0) if case["meter"] == "cpu" else None,
        gradient_error=0.12345,
        peak_phase="backward",
        peak_parts=PeakParts(weights_bytes=400 * GIB, temporary_bytes=(623 - 100 * stack) * GIB),
        generated=Generated(cache_bytes=1000 * GIB, longest_prompt=100_000) if case["generate"] else None,
    )
    limited = {"memory_limit_bytes": 24 * GIB, "over_limit_bytes": 900 * GIB}
    return record.model_copy(update={"outcome": record.outcome.model_copy(update=limited)})


def check_shown(text: str, heading: str) -> None:
    """Check that a table of 80 columns has a heading, whose words may stand in several lines."""
    lines = text.splitlines()
    rule = next(place for place, line in enumerate(lines) if "───" in line)
    headings = "\n".join(lines[:rule])

    assert max(map(cell_len, lines[: rule + 3])) <= 80
    assert all(word in headings for word in heading.split()), headings


@pytest.mark.parametrize(
    ("verb", "flag"), [(verb, flag) for verb in ("measure", "sweep", "run") for flag in ANSWERS[verb]]
)
def test_what_a_flag_asks_for_is_shown_at_80_columns(
    cli: Any, verb: str, flag: str, stored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(MANY_COLUMNS)
    Path("train.py").write_text("")
    target = {"measure": "tiny-gpt2", "sweep": "recipe.toml", "run": "train.py"}[verb]
    typed, heading = ANSWERS[verb][flag]
    more = ("-s", "checkpoint") if verb == "run" and "-s" not in typed else ()
    ended = cli(verb, *typed, *more, target)

    assert ended.status in (0, 1), ended.err
    text = ended.out
    if verb == "run":  # the tables of the script stand above
        text = text[text.index("What does each scheme save") :]
    check_shown(text, heading)


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_results_files_show_what_is_asked_for_at_80_columns(
    cli: Any, verb: str, make_record: MakeRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    case = make_record(model="a-model-with-a-long-name", scheme="fewbit:3+randomized:0.2").case.model_dump()
    file = tmp_path / "results.jsonl"
    file.write_text(filled(make_record, case).model_dump_json() + "\n")
    ((typed, heading),) = ANSWERS[verb].values()
    ended = cli(verb, *typed, *[file] * (1 + (verb == "compare")))

    assert ended.status == 0, ended.err
    check_shown(ended.out, heading)
