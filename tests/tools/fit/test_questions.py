"""How long a sequence, how large a batch, which card and how many of them: what is printed was simulated."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import madeup
import pytest
from hypothesis import example, given, strategies as st

import actbench
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.scheme import build
from actbench.scheme.facets import Spread
from actbench.simulator import profiles
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.questions import LARGEST, Largest, Sizes, largest_size, ways
from actbench.tools.fit.records import EXACT, Asked, FitRecord
from actbench.tools.fit.simulations import Means, Simulations

STEP = ("fit", "tiny-llama", "-b", "2", "--sequence-length", "64", "--budget", "600", "--code", "0")
ON_4090 = (*STEP, "--device-profile", "rtx-4090")
AMONG = [word for name in ("checkpoint", "chunked_loss:8") for word in ("--scheme", name)]


def search(
    need: Callable[[int], int | None], limit: int, start: int
) -> tuple[int, Mapping[int, tuple[Case, Measurement | Failure]], list[int]]:
    """Search among sizes that need bytes; sizes that need None cannot be simulated."""
    asked: list[int] = []

    def simulate(sizes: Iterable[int]) -> Mapping[int, tuple[Case, Measurement | Failure]]:
        found = {}
        for size in sizes:
            asked.append(size)
            needs = need(size)
            refused = Failure(reason="unsupported", message="too long")
            measured = Measurement(weights_bytes=1, activation_bytes=0, peak_bytes=needs or 0)
            found[size] = Case(model="x", batch_size=size), refused if needs is None else measured
        return found

    return *largest_size(simulate, limit, start), asked


@given(
    start=st.integers(1, 5000),
    fixed=st.integers(1, 10**6),
    each=st.integers(1, 10**4),
    square=st.integers(0, 20),
    step=st.sampled_from([1, 512, 1 << 20]),
    limit=st.integers(1, 10**9),
)
@example(start=1, fixed=1, each=1, square=0, step=1, limit=LARGEST + 2)
def test_the_largest_size_fits_and_one_more_does_not(start, fixed, each, square, step, limit) -> None:
    def need(size: int) -> int:
        return -(-(fixed + each * size + square * size * size) // step) * step

    largest, known, asked = search(need, limit, start)

    assert largest == 0 or need(largest) <= limit
    assert largest == LARGEST or need(largest + 1) > limit
    assert largest + 1 in known or largest == LARGEST
    assert len(asked) <= 120


def test_a_size_that_cannot_be_simulated_is_the_end() -> None:
    largest, known, _ = search(lambda size: None if size > 512 else size, 10**9, 64)

    assert largest == 512
    assert isinstance(known[513][1], Failure)


def test_a_search_whose_time_is_over_ends() -> None:
    assert largest_size(lambda sizes: {}, 10, 64) == (0, {})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def simulated(case: Case, **changes: object) -> Measurement:
    found = actbench.measure(case.model_copy(update=changes))
    assert isinstance(found, Measurement)
    return found


def test_a_size_that_is_too_slow_does_not_count() -> None:
    case = Case(model="x", batch_size=1)
    largest, known = largest_size(
        lambda sizes: {size: (case, taken(size)) for size in sizes}, 1 << 20, 64, is_fast=is_up_to_300
    )

    assert largest == 300
    assert 301 in known


def is_up_to_300(size: int, measured: Measurement) -> bool:
    return size <= 300


def taken(bytes_held: int, seconds: float = 1.0) -> Measurement:
    return madeup.measured((1, 1, 2, bytes_held), seconds, 0.0, 1 << 20)


class Made(Simulations):
    """Simulates nothing: recomputed steps hold half as much, and their slowdown grows with the sequence."""

    def of(self, exact: Case, asked: Asked) -> Any:
        def simulate(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
            for each in plans:
                size, again = each.sequence_length or 0, "checkpoint" in each.scheme
                yield each, taken(size if again else 2 * size, size * (1 + size / 1000) if again else size)

        return simulate


class Stored:
    def find(self, case: Case) -> FitRecord:
        return madeup.record_of(case.scheme, 1, 1).model_copy(update={"case": case})


def grown(limit: int) -> Largest:
    case = Case(model="x", batch_size=1, sequence_length=64, device_profile="rtx-4090", memory_limit_bytes=limit)
    made = Made(Means(schemes=["checkpoint"]), "x", "exact", store=cast("Any", Stored()), simulator=cast("Any", None))
    (found,) = Sizes(made, case, Asked(exact=True, max_slowdown=1.5), "sequence_length").run([EXACT])
    assert found is not None
    return found


def test_the_largest_size_is_fast_enough_there() -> None:
    found = grown(900)

    assert (found.size, found.step.spec) == (500, "checkpoint")
    assert found.step.slowdown <= 1.5
    assert "times the exact step's time" in found.why_no_more


def test_what_is_faster_at_the_largest_size_grows_on() -> None:
    found = grown(10_003)

    assert (found.size, found.step.spec) == (5_000, "exact")
    assert found.beyond_bytes is not None
    assert found.beyond_bytes > 10_003


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flag", "column"), [("--longest-sequence", "sequence_length"), ("--largest-batch", "batch_size")]
)
def test_the_largest_size_that_is_printed_fits_by_a_simulation_of_its_own(cli, tmp_path, flag, column) -> None:
    limit = 160 << 20  # blocks of the allocator have up to 20 MiB: within two of them, plans fit by chance
    table = tmp_path / "t.csv"
    ended = cli(
        *ON_4090, *AMONG, "--exact", flag, "--memory-limit", f"{limit}B", "-o", tmp_path, "--export-csv", table,
        "--export-json", tmp_path / "t.json",
    )  # fmt: skip

    assert ended.status == 0, ended.err
    (row,) = rows_of(table)
    (record,) = json.loads((tmp_path / "t.json").read_text())
    case = Case.model_validate(record["case"])
    assert str(getattr(case, column)) == row[column]
    assert case.scheme == row["scheme"]
    size = int(row[column])
    assert simulated(case).fits
    assert not simulated(case, **{column: size + 1}).fits
    exact = case.model_copy(update={"scheme": "exact"})
    assert not simulated(exact).fits  # the plan is what lets it be as long
    assert f"{size + 1:,} do not" in ended.err


@pytest.mark.exhaustive
def test_nothing_fits_where_one_token_does_not(cli, tmp_path) -> None:
    ended = cli(*ON_4090, "-s", "checkpoint", "--exact", "--longest-sequence", "--memory-limit", "1MiB", "-o", tmp_path)

    assert ended.status == 1
    assert "not even 1 of the tokens fits in 1.00 MiB" in ended.err


@pytest.mark.exhaustive
def test_cards_are_listed_the_smallest_first_and_each_was_simulated(cli, tmp_path) -> None:
    table = tmp_path / "t.csv"
    words = ("fit", "tiny-llama", "-b", "256", "--sequence-length", "2048", *STEP[6:], *AMONG, "--exact")
    ended = cli(*words, "--which-card", "-o", tmp_path, "--export-csv", table, "--export-json", tmp_path / "t.json")

    assert ended.status == 0, ended.err
    rows = rows_of(table)
    memory = [int(row["memory_bytes"]) for row in rows]
    assert memory == sorted(memory)
    assert {row["device"] for row in rows} == {each.name for each in profiles.profiles() if each.rates}
    assert all(int(row["need_bytes"]) <= int(row["memory_bytes"]) for row in rows)
    small, large = rows[0], rows[-1]
    assert small["scheme"] != "exact"  # which does not fit there
    assert large["scheme"] == "exact"
    assert f"the smallest card: {small['device']}" in ended.err
    records = [Case.model_validate(record["case"]) for record in json.loads((tmp_path / "t.json").read_text())]
    assert [case.device_profile for case in records] == [row["device"] for row in rows]
    assert simulated(records[0]).fits


def test_ways_to_spread_are_found_by_what_schemes_say_and_take_all_processes() -> None:
    found = ways(16, 8)

    assert {"fsdp:16", "fsdp:16,mixed=bf16", "zero1:16", "ddp:16", "tp:8+zero1:2", "tp:2+fsdp:8"} <= set(found)
    assert not any("tp:16" in way for way in found)  # more than a machine has
    assert all(build(way).spec == way for way in found)


@pytest.mark.exhaustive
def test_a_model_is_shared_out_over_the_fewest_processes_on_which_it_fits(cli, tmp_path) -> None:
    table = tmp_path / "t.csv"
    words = (
        "fit",
        "tiny-gpt2@n_embd=512,n_layer=4",
        "-b",
        "1",
        "--sequence-length",
        "16",
        "--device-profile",
        "rtx-4090",
    )
    ended = cli(
        *words, "--exact", "-s", "checkpoint", "--memory-limit", "100MiB", "--processes", "2", "--processes", "8",
        "--code", "0", "-o", tmp_path, "--export-csv", table,
    )  # fmt: skip

    assert ended.status == 0, ended.err
    rows = rows_of(table)
    assert {row["processes"] for row in rows} == {"8"}
    assert all(int(row["need_bytes"]) <= 100 << 20 for row in rows)
    assert "nothing fits on 2 processes" in ended.err
    speeds = [float(row["samples_per_second"]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.exhaustive
def test_what_every_plan_has_is_shared_out_too(cli, tmp_path) -> None:
    table = tmp_path / "t.csv"
    ended = cli(
        "fit", "tiny-llama@num_hidden_layers=2", "-b", "1", "--sequence-length", "16", "--device-profile", "rtx-4090",
        "--base", "lora:4", "--exact", "-s", "checkpoint", "--processes", "2", "-o", tmp_path, "--export-csv", table,
    )  # fmt: skip

    assert ended.status == 0, ended.err
    rows = rows_of(table)
    assert rows
    assert all("lora:4" in row["scheme"].split("+") for row in rows)
    assert all(build(row["scheme"]).facet(Spread) for row in rows)


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        ((*STEP,), "--which-card finds one"),
        ((*ON_4090, "--which-card", "--largest-batch"), "--largest-batch: not with --which-card, ask one"),
        ((*ON_4090, "--longest-sequence", "--measure"), "--measure: not with --longest-sequence"),
        ((*STEP, "--which-card", "--memory-limit", "8GiB"), "each card has its own memory"),
        ((*STEP, "--which-card", "--max-gradient-error", "0.1"), "--max-gradient-error: not with --which-card"),
        ((*ON_4090, "--largest-batch", "--max-gradient-error", "0"), "--max-gradient-error: not with --largest-batch"),
        ((*ON_4090, "--longest-sequence", "--packed", "8,8"), "--packed: not with --longest-sequence"),
        ((*ON_4090, "--processes", "1"), "--processes 1: give a whole number from 2"),
    ],
)
def test_questions_that_cannot_be_are_refused_before_anything_is_simulated(cli, tmp_path, words, naming) -> None:
    cli.refused(*words, "--output", tmp_path / "none", naming=naming)

    assert not (tmp_path / "none").exists()
