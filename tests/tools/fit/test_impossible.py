"""What fit says where no plan reaches what was asked."""

from __future__ import annotations

import dataclasses

import pytest
from fitcommand import AMONG, STEP, TRAINED_ALL

from actbench.simulator import profiles


@pytest.mark.exhaustive
def test_what_is_slower_than_asked_is_no_answer(cli, log, tmp_path) -> None:
    among = ("--scheme", "checkpoint", "--max-slowdown", "1.2", "-o", tmp_path)

    ended = cli(*STEP, *among, "--memory-limit", "6GiB")

    assert ended.status == 1
    told = " ".join(ended.err.split())
    assert "Nothing fits within 1.2 times the exact step's time. Plan 1 needs 3.50 GiB of 6.00 GiB and 26 %" in told


@pytest.mark.exhaustive
def test_the_last_request_decides_what_is_too_slow(cli, log, tmp_path) -> None:
    words = (*STEP, "--scheme", "checkpoint", "--memory-limit", "6GiB", "-o", tmp_path)
    assert cli(*words).status == 0

    slow = cli(*words, "--max-slowdown", "1.2")
    fast = cli(*words)

    assert slow.status == 1
    assert "0 simulations of the whole model" in slow.err
    assert "Fits only at more than 1.2 times" in slow.out
    assert "What fits" not in slow.out
    assert fast.status == 0
    assert "What fits" in fast.out


@pytest.mark.exhaustive
def test_adapters_that_fit_are_an_answer_where_nothing_else_does(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *TRAINED_ALL, "--scheme", "lora:16", "--memory-limit", "3GiB", "-o", tmp_path)

    assert ended.status == 0, ended.err
    before, _, _ = ended.out.partition("What fits: ")
    assert "lora:16" in before
    assert "trains adapters" in before
    assert "Plan 1: a loop of your own" in ended.out


def test_impossible_says_what_is_least_and_what_would_have_to_give(cli, log, fake, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--exact", "--memory-limit", "2GiB", "-o", tmp_path)

    told = " ".join(ended.err.split())
    least = fake.WEIGHTS + fake.HELD * 0.25 + fake.TOP * 0.5
    assert ended.status == 1
    plan = "chunked_loss:8, checkpoint, adamw-fused"
    said = f"Nothing fits in 2.00 GiB: the least that is possible, {plan}, needs {least / fake.GIB:.2f} GiB"
    assert said in told
    assert ended.out.startswith("Nothing fits in 2.00 GiB: the least that is possible")
    assert "take a smaller --batch-size or shorter samples, or a larger --memory-limit" in told
    assert "leave out --exact" in told
    assert "What fits" not in ended.out


@pytest.mark.slow
def test_the_smallest_card_that_would_do_is_named(cli, log, tmp_path, monkeypatch) -> None:
    words = [word if word != "rtx-4090" else "rtx-4060" for word in STEP]

    larger = profiles.get("rtx-3080-10gb")
    unrated = dataclasses.replace(larger, name="unrated", rates=None, memory_bytes=larger.memory_bytes - 1)
    monkeypatch.setattr(profiles, "profiles", lambda known=profiles.profiles: [unrated, *known()])  # fit refuses it

    ended = cli(*words, "--scheme", "chunked_loss:8", "--exact", "-o", tmp_path)

    assert ended.status == 1
    assert "--device-profile rtx-3080-10gb, the smallest card that would do" in " ".join(ended.err.split())


@pytest.mark.exhaustive
def test_where_the_model_alone_is_too_much_no_smaller_batch_is_advised(cli, log, tmp_path) -> None:
    ended = cli(*STEP, *AMONG, "--memory-limit", "512MiB", "-o", tmp_path)

    assert ended.status == 1
    assert "weights, gradients and optimizer state alone are 1.00 GiB" in " ".join(ended.err.split())
    assert "--batch-size" not in ended.err
