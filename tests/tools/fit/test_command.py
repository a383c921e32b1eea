"""``actbench fit`` as it is typed, on steps that are made up (``fakefit``)."""

from __future__ import annotations

import json

import pytest
from fitcommand import AMONG, DEEP, STEP, records_below

from actbench.tools.fit.records import FitRecord


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (("fit", "tiny-lama", "--device-profile", "rtx-4090"), "did you mean tiny-llama"),
        (("fit", "tiny-llama"), "--device-profile: name the card that the step is to fit on"),
        (("fit", "tiny-llama", "--device-profile", "rtx-4091"), "did you mean rtx-4090"),
        (("fit", "tiny-llama", "--device-profile", "cuda-16gib"), "no time can be estimated; name another card"),
        ((*STEP, "--batch-size", "0"), "--batch-size"),
        ((*STEP, "--memory-limit", "24"), "'24' is not an amount of memory"),
        ((*STEP, "--memory-limit", "0GiB"), "more than zero"),
        ((*STEP, "--max-slowdown", "0.9"), "--max-slowdown"),
        ((*STEP, "--scheme", "checkpont"), "did you mean 'checkpoint'"),
        ((*STEP, "--scheme", "checkpoint+gact:L2"), "name them one by one"),
        ((*STEP, "--scheme", "checkpoint,only=model.layers.0"), "fit chooses the blocks itself; leave only= out"),
        ((*STEP, "--base", "compile,only=model.layers.*"), "fit compares estimated times, and a step with it has none"),
        ((*STEP, "--scheme", "compile"), "fit compares estimated times, and a step with it has none"),
        ((*STEP, "--scheme", "fsdp:8"), "fit plans for one process, and fsdp:8 spreads a model over 8"),
        ((*STEP, "--scheme", "tp:2"), "fit plans for one process, and tp:2 spreads a model over 2"),
        ((*STEP, "--base", "lra:16"), "--base: scheme 'lra:16': there is no scheme"),
        ((*STEP, "--base", "checkpoint+selective"), "--base: "),
        ((*STEP, "--base", "zero1:4"), "--base zero1:4: fit plans for one process"),
        ((*STEP, "--optimizer", "adamx"), "--optimizer"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_simulated(cli, log, tmp_path, words, naming) -> None:
    cli.refused(*words, "--output", tmp_path / "none", naming=naming)

    assert not log.exists()
    assert not (tmp_path / "none").exists()


def test_a_table_is_no_place_for_records(cli, log, tmp_path) -> None:
    cli.refused(*STEP, *AMONG, "--output", tmp_path / "fit.md", naming="name a folder or a .jsonl file")

    assert not log.exists()


def test_the_answer_comes_first_and_its_plan_in_json_csv_and_markdown(cli, log, fake, tmp_path) -> None:
    ended = cli(
        *STEP, *AMONG, "--memory-limit", "6GiB", "-o", tmp_path, "--export-json", "-", "--export-csv", tmp_path / "t"
    )

    assert ended.status == 0, ended.err
    found = [FitRecord.model_validate(each) for each in json.loads(ended.out)]
    fitting = [each for each in found if each.outcome.peak_bytes <= 6 * fake.GIB]
    fastest = min(fitting, key=lambda each: each.outcome.estimated.step_seconds).case.scheme
    assert fastest == "gact:L2,only=model.layers.0"  # the other block stays as it is
    assert "Plan 2 needs 6.00 GiB of 6.00 GiB and 17 % more time (estimated)" in " ".join(ended.err.split())
    assert "gradients: gact:L2 on block 0, adamw-fused." in " ".join(ended.err.split())
    rows = (tmp_path / "t").read_text().splitlines()
    assert rows[0].startswith("number,scheme,optimizer,plan,")
    plan = '2,"gact:L2,only=model.layers.0",adamw-fused,"gact:L2 block 0, adamw-fused",'
    assert sum(row.startswith(plan) for row in rows) == 1
    assert set(found) == set(records_below(tmp_path))
    (table,) = tmp_path.rglob("*.fit.md")
    assert "gact:L2 on block 0" in table.read_text()


@pytest.mark.slow
def test_every_line_of_a_pipe_has_what_answers_the_question(cli, log, tmp_path) -> None:
    words = ("fit", DEEP, *STEP[2:], *AMONG)
    ended = cli(*words, "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.out.startswith("Plan 1 needs ")
    heads = [line for line in ended.out.splitlines() if line.startswith((" Plan", " No. "))]
    assert heads
    for head in heads:
        assert all(title in head for title in ("Need", "(est.)", "Gradient")), head
    answer = ended.out.partition("What fits")[0]
    assert len(answer.splitlines()) <= 6
    assert " on blocks " in answer
    assert "GiB of 6.00 GiB" in answer


@pytest.mark.exhaustive
def test_every_plan_has_the_base(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--base", "lora:16", "--memory-limit", "2GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert all("lora:16" in record.case.scheme for record in records_below(tmp_path))
    assert "Every plan has lora:16, and so has the exact step." in ended.out
    assert "adapters" not in ended.out


@pytest.mark.slow
def test_quiet_leaves_out_progress(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--quiet", "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0
    assert "starts:" not in ended.err
    assert "results: " in ended.err


@pytest.mark.exhaustive
def test_a_scheme_that_refuses_the_model_is_said_once_and_the_rest_is_planned(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKEFIT_REFUSED", "offload")
    words = (*AMONG, "--scheme", "offload")
    ended = cli(*STEP, *words, "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    told = [line for line in ended.err.splitlines() if line.startswith("not for this model: ")]
    assert told == ["not for this model: offload: unsupported: this model has nothing to move"]
    assert "offload" not in ended.out


@pytest.mark.exhaustive
def test_schemes_with_nothing_to_do_are_one_line_and_verbose_says_why(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKEFIT_IDLE", "offload,lora:4")
    words = (*STEP, *AMONG, "-s", "offload", "-s", "lora:4", "--memory-limit", "6GiB", "-o", tmp_path)
    ended, verbose = cli(*words), cli(*words, "--verbose")

    assert "failed" not in ended.err
    assert "nothing-converted" not in ended.err
    assert "nothing to do in this model (--verbose says why): offload, lora:4\n" in ended.err
    assert "not for this model: lora:4: nothing-converted: it holds no layer for this" in verbose.err
    assert "nothing to do" not in verbose.err


@pytest.mark.exhaustive
def test_progress_calls_nothing_over_the_limit_but_what_the_user_limits(cli, log, tmp_path) -> None:
    whole = cli(*STEP, *AMONG, "--memory-limit", "12GiB", "--verbose", "-o", tmp_path / "whole")
    half = cli(*STEP, *AMONG, "--memory-limit", "6GiB", "--verbose", "-o", tmp_path / "half")

    assert "Frontier" in whole.out, "whose plans are simulated with less than the limit"
    assert "over the limit" not in whole.err
    assert "over the limit" in half.err


@pytest.mark.exhaustive
def test_above_the_exact_peak_the_answer_begins_with_the_exact_step(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "12GiB", "--exact", "-o", tmp_path)

    assert ended.status == 0, ended.err
    first, second, *_ = ended.out.splitlines()
    assert first == "It fits unchanged: 9.50 GiB of 12.00 GiB."
    assert second.startswith(
        "Plan 1 needs 9.50 GiB of 12.00 GiB and 3 % less time (estimated), and has exact gradients"
    )


@pytest.mark.slow
def test_a_model_without_blocks_is_changed_as_a_whole(cli, log, tmp_path) -> None:
    model = tmp_path / "own.py"
    model.write_text("def build(): pass\n")

    ended = cli("fit", f"{model}:build", *STEP[2:4], *AMONG, "--memory-limit", "6GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    assert "only=" not in ended.out + log.read_text()
    assert "What fits" in ended.out


@pytest.mark.slow
def test_only_what_trains_exactly_is_tried_if_that_is_asked(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "6GiB", "--exact", "-o", tmp_path)

    assert {each.training.gradient for each in records_below(tmp_path)} == {"exact"}
    assert ended.status == 0, ended.err


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("function", "wants", "tried", "remarks"),
    [
        ("half", (), {"exact adamw-fused"}, ("the model's parameters are bfloat16: no other precision was tried",)),
        ("descent", (), {"autocast:bfloat16 None"}, ("no other implementation of the model's own optimizer",)),
        ("build", (), {"autocast:bfloat16 None", "exact adamw-fused"}, ()),
        ("descent", ("--optimizer", "adamw"), {"autocast:bfloat16 adamw", "exact adamw-fused"}, ()),
        ("half", ("--dtype", "float32"), {"autocast:bfloat16 None", "exact adamw-fused"}, ()),
    ],
)
def test_types_and_optimizers_are_tried_for_a_model_of_ones_own(
    cli, log, tmp_path, function, wants, tried, remarks
) -> None:
    model = tmp_path / "own.py"
    model.write_text("def build(): pass\nhalf = descent = build\n")
    words = ("fit", f"{model}:{function}", *STEP[2:4], *wants, "--scheme", "autocast:bfloat16")

    ended = cli(*words, "-o", tmp_path)

    assert ended.status == 0, ended.err
    stacks = {" ".join(line.split()[1:3]) for line in log.read_text().splitlines()}
    assert tried <= stacks
    assert any("autocast" in stack for stack in stacks) == (function != "half" or bool(wants))
    assert any("fused" in stack for stack in stacks) == (function != "descent" or bool(wants))
    for remark in ("no other precision", "no other implementation"):
        assert (remark in ended.err) == any(remark in each for each in remarks)
    for remark in remarks:
        assert remark in " ".join(ended.err.split())
