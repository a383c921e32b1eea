import json
from collections.abc import Callable
from typing import Any

import pytest

from actbench.cli.sweep import without_effect
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Built
from actbench.report import store
from actbench.run import executor

SMALL = ("tiny-roberta", "-s", "fewbit:3", "--sequence-length", "8", "-b", "1", "--meter", "simulated")


@pytest.mark.exhaustive
def test_a_sweep_says_at_its_start_what_the_results_file_has(cli, tmp_path):
    first = cli("sweep", *SMALL, "--output", tmp_path)
    again = cli("sweep", *SMALL, "--output", tmp_path)

    assert first.status == again.status == 0, first.err
    (file,) = tmp_path.rglob("*.jsonl")
    assert "already" not in first.err
    assert f"2 of 2 rows are already in {file} (--force runs them again)\n" in again.err
    assert "0 measured, 0 failed, 2 taken from the results file" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "measure"])
def test_the_largest_batch_that_a_flag_asks_for_is_shown_on_a_narrow_screen(cli, tmp_path, monkeypatch, verb):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'title = "mine"\ncolumns = "model,batch,scheme,meter,peak,over-limit,saved,activations,speed,gradient-error"\n'
        '[workload]\nmodel = "tiny-roberta"\nbatch_size = 1\nsequence_length = 8\n[[scheme]]\nspec = "checkpoint"\n'
    )
    monkeypatch.setenv("COLUMNS", "80")
    what = [recipe] if verb == "sweep" else [*SMALL]
    ended = cli(verb, *what, "--max-batch", "--memory-limit", "20MiB", "--output", tmp_path / "kept.jsonl")

    assert ended.status == 0, ended.err
    heading = ended.out.partition("─")[0]
    assert "Largest" in heading
    searched = [each.outcome.largest_batch for each in store.read_results(tmp_path / "kept.jsonl").records]
    assert searched
    for largest in searched:
        assert f" {largest:,} " in ended.out


def test_a_memory_limit_has_a_unit(cli):
    ended = cli("sweep", *SMALL, "--memory-limit", "16")

    assert ended.status == 2
    assert "'16' is not an amount of memory: write a number and a unit, such as 16GiB" in ended.err


@pytest.mark.exhaustive
def test_a_stack_of_schemes_over_its_limit_is_measured_and_reported_alike(cli, tmp_path):
    chosen = ("--columns", "scheme,peak,over-limit,saved,peak-vs-previous", "--export-markdown", "-")
    stack = ("-s", "checkpoint", "--cumulative", "--memory-limit", "1MiB", "--output", tmp_path)
    swept = cli("sweep", *SMALL, *stack, *chosen)
    strict = cli("sweep", *SMALL, *stack, *chosen, "--require-fit")
    reported = cli("report", tmp_path, "--title", "What does each scheme save on tiny-roberta?", *chosen)

    records = store.read_results(next(tmp_path.rglob("*.jsonl"))).records
    assert [swept.status, strict.status, reported.status] == [0, 1, 0], swept.err
    assert sorted(len(record.case.scheme.split("+")) for record in records) == [1, 1, 2]
    assert all(record.outcome.over_limit_bytes > 0 for record in records)
    assert swept.out == strict.out == reported.out
    assert "| Scheme | Peak ↓ | Over limit ↓ | Saved ↑ | Peak, vs previous ↓ |" in swept.out
    assert "over the limit of 1.00 MiB by" in swept.err
    assert "3 measured, 0 failed" in swept.err
    assert "3 taken from the results file" in strict.err


BENCH = """
from actbench.model.records import Failure

class Session:
    def __init__(self, case):
        raise ValueError("of mine")

def failure_of(error):
    return Failure(reason="crash", message=str(error))
"""


def test_an_error_of_a_case_is_told_once_and_debugging_shows_where_it_arose(cli, tasks_here, tmp_path, monkeypatch):
    file = tmp_path / "failingbench.py"
    file.write_text(BENCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executor, "BENCH", "failingbench")  # or the processes of both commands would import torch
    monkeypatch.setattr(executor, "PRELOAD", ())
    command = ("measure", "tiny-roberta", "-b", "1", "--meter", "simulated")
    ended, debugged = cli(*command), cli("--debug", *command)

    assert [ended.status, debugged.status] == [1, 1]
    assert (ended.out + ended.err).count("of mine") == 1
    assert ended.out == "", "a table would have dashes alone"
    assert "actbench: tiny-roberta, exact, batch 1 (simulated): crash: of mine" in ended.err
    assert "Traceback" not in ended.err
    assert "Traceback" in debugged.err
    assert f'File "{file}", line 6, in __init__' in debugged.err


@pytest.mark.parametrize("command", [("schemes", "fewbits"), ("measure", *SMALL, "-s", "fewbits")])
def test_a_mistyped_scheme_gets_the_closest_names_and_no_list_of_all(cli, command):
    ended = cli(*command)

    assert ended.status == 2
    assert "there is no scheme 'fewbits'; did you mean 'fewbit'? 'actbench schemes' lists all" in " ".join(
        ended.err.split()
    )
    assert "checkpoint" not in ended.err


def test_a_column_that_is_like_no_other_gets_the_list(cli):
    ended = cli("measure", *SMALL, "--columns", "nosuch")

    assert ended.status == 2
    assert "there is no column 'nosuch'; known: " in " ".join(ended.err.split())


def test_one_scheme_is_no_stack(cli, tmp_path):
    ended = cli("sweep", *SMALL, "--cumulative", "--output", tmp_path)

    assert ended.status == 2
    assert "cumulative adds schemes one after the other: give at least two in addition to exact" in ended.err


def test_a_mistyped_column_is_refused_before_anything_is_measured(cli, tmp_path):
    for verb in ("sweep", "measure"):
        ended = cli(verb, *SMALL, "--columns", "peek", "--output", tmp_path / "none")

        assert ended.status == 2
        assert "--columns: there is no column 'peek'; did you mean peak" in ended.err
        assert not (tmp_path / "none").exists()


def test_a_mistyped_recipe_is_told_from_a_model(cli, tmp_path):
    ended = cli("sweep", "quickstat", "--output", tmp_path)

    assert ended.status == 2
    assert "did you mean the recipe 'quickstart'?" in ended.err


def test_a_recipe_that_there_is_not_is_told_with_all_that_there_are(cli):
    ended = cli("recipes", "digit")

    assert ended.status == 2
    assert "there is no recipe 'digit'; did you mean 'digits'?" in ended.err
    assert "of 'actbench sweep': actnn-memory," in ended.err
    assert "of 'actbench train': accuracy, digits" in ended.err


@pytest.mark.exhaustive
def test_schemes_are_shown_as_typed_and_the_unchanged_model_is_left_out(cli):
    flags = ("-s", "offload", "-s", "checkpoint", "--no-exact", "--sequence-length", "8,16", "-b", "1")
    found = cli("measure", "tiny-roberta", *flags, "--meter", "simulated", "--columns", "scheme", "--export-csv", "-")

    assert found.status == 0, found.err
    rows = [line.split(",") for line in found.out.splitlines() if line]
    assert rows == [["sequence_length", "scheme"], *([n, s] for n in ("8", "16") for s in ("offload", "checkpoint"))]


@pytest.mark.usefixtures("made_up")
def test_measuring_into_a_file_goes_on_from_what_it_holds(cli, tmp_path):
    file = tmp_path / "kept.jsonl"

    def measured(*more):
        ended = cli("measure", *SMALL, "--output", file, *more)
        assert ended.status == 0, ended.err
        return next(line for line in ended.err.splitlines() if " failed" in line)

    cli("measure", *SMALL[:1], *SMALL[3:], "--output", file)  # as far as it came before somebody stopped it
    assert measured() == "1 measured, 0 failed, 1 taken from the results file"
    assert measured() == "0 measured, 0 failed, 2 taken from the results file"
    assert measured("--force") == "2 measured, 0 failed"

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["outcome"]["timeline"] = None
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert measured() == "0 measured, 0 failed, 2 taken from the results file"
    assert measured("--timeline") == "2 measured, 0 failed"
    assert measured("--timeline") == "0 measured, 0 failed, 2 taken from the results file"


@pytest.mark.exhaustive
def test_a_model_of_ones_own_is_measured_anew_into_a_file(cli, tmp_path):
    (tmp_path / "width.py").write_text("WIDTH = 8")
    (tmp_path / "own.py").write_text(
        "import torch\nfrom width import WIDTH\n\n"
        "def build():\n"
        "    net = torch.nn.Linear(WIDTH, 1)\n"
        "    return net, lambda n: {'x': torch.randn(n, WIDTH)}, lambda net, batch: net(batch['x']).sum()\n"
    )
    words = (
        "measure",
        f"{tmp_path / 'own.py'}:build",
        "-b",
        "2",
        "--meter",
        "simulated",
        "-o",
        tmp_path / "kept.jsonl",
    )
    assert cli(*words).status == 0
    (tmp_path / "width.py").write_text("WIDTH = 1024")

    ended = cli(*words)

    assert "1 measured, 0 failed\n" in ended.err


def test_a_size_that_no_model_takes_is_told(make_record: Callable[..., MeasuredRecord]):
    def record(model: str, failure: str | None = None, **sizes: Any) -> MeasuredRecord:
        reads = {"image_size": (32, 32)} if "resnet" in model else {"sequence_length": 16}
        built = None if failure else Built(model_class="A", task="causal-lm", **reads)
        return make_record(model=model, failure=failure, built=built, **sizes)

    images = [record("resnet18", sequence_length=8), record("resnet50", sequence_length=16)]
    text = [record("gpt2", image_size=64), record("tiny-vit", failure="crash", image_size=64)]
    both = [record("gpt2", image_size=64, sequence_length=8), record("resnet18", image_size=64, sequence_length=8)]

    assert list(without_effect(images)) == ["sequence length 8, 16 changes nothing: resnet18, resnet50 read no text"]
    narrow = [record("tiny-llama@num_hidden_layers=2,vocab_size=512", image_size=64)]

    assert list(without_effect(narrow)) == [f"image size 64 changes nothing: {narrow[0].case.model} reads no images"]
    assert list(without_effect(text)) == ["image size 64 changes nothing: gpt2 reads no images"]
    assert list(without_effect(both)) == []
