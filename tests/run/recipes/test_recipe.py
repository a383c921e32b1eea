"""The cases that a recipe's workloads, meters and settings span."""

from __future__ import annotations

from pathlib import Path

import pytest
from writtenrecipes import RECIPE, loaded

from actbench.errors import RecipeError


def test_a_recipe_is_named_after_its_file(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE)

    assert (found.name, found.title) == ("question", "What does each scheme save?")


def test_without_schemes_only_the_exact_model_is_measured(tmp_path: Path) -> None:
    (planned,) = loaded(tmp_path, RECIPE).cases()

    assert (planned.case.model, planned.case.scheme, planned.case.meter) == ("tiny", "exact", "simulated")


def test_lists_span_the_grid_and_exact_is_put_first(tmp_path: Path) -> None:
    text = """
    title = "?"
    [workload]
    model = ["a", "b"]
    batch_size = "8-16*2"
    attention = ["eager", "sdpa"]
    autocast = ["none", "bfloat16"]
    [measure]
    meters = ["simulated", "cpu"]
    seed = [0, 1]
    [[scheme]]
    spec = "fewbit:3"
    """
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]

    assert len(cases) == len({case.key() for case in cases}) == 2 * 2 * 2 * 2 * 2 * 2 * 2
    assert [case.scheme for case in cases[:4]] == ["exact", "fewbit:3"] * 2
    assert {case.autocast for case in cases} == {None, "bfloat16"}


def test_several_workloads_stand_beside_each_other(tmp_path: Path) -> None:
    text = """
    title = "?"
    [[workload]]
    model = "text"
    batch_size = 32
    sequence_length = 128
    [[workload]]
    model = "images"
    batch_size = [8, 16]
    """
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]

    assert [(case.model, case.batch_size, case.sequence_length) for case in cases] == [
        ("text", 32, 128),
        ("images", 8, None),
        ("images", 16, None),
    ]


def test_a_workload_has_meters_and_a_scheme_has_models_of_its_own(tmp_path: Path) -> None:
    text = """
    title = "?"
    [[workload]]
    model = "text"
    batch_size = 32
    [[workload]]
    model = "images"
    batch_size = 8
    meters = ["cpu"]
    [[scheme]]
    spec = "fewbit:3"
    models = "text"
    [[scheme]]
    spec = "checkpoint"
    """
    found = loaded(tmp_path, text)
    cases = [planned.case for planned in found.cases()]
    on_cuda = found.with_flags(measure={"meters": ["cuda"]})

    assert [(case.model, case.meter, case.scheme) for case in cases] == [
        ("text", "simulated", "exact"),
        ("text", "simulated", "fewbit:3"),
        ("text", "simulated", "checkpoint"),
        ("images", "cpu", "exact"),
        ("images", "cpu", "checkpoint"),
    ]
    assert {planned.case.meter for planned in on_cuda.cases()} == {"cuda"}


def test_settings_reach_the_cases_they_concern(tmp_path: Path) -> None:
    measure = """
    [measure]
    meters = ["simulated", "cpu"]
    device_profile = "cuda-16gib"
    memory_limit = "16GiB"
    largest_batch = true
    min_steps = 3
    min_seconds = 0
    """
    text = RECIPE.replace("batch_size = 8", "batch_size = [16, 8]") + measure
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]
    simulated = [case for case in cases if case.meter == "simulated"]
    cpu = [case for case in cases if case.meter == "cpu"]

    assert {case.memory_limit_bytes for case in cases} == {16 * 1024**3}
    assert {(case.device_profile, case.min_steps) for case in simulated} == {("cuda-16gib", 10)}
    assert {(case.device_profile, case.min_steps, case.min_seconds) for case in cpu} == {(None, 3, 0.0)}


def test_only_the_smallest_batch_size_asks_for_the_largest_batch(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", "batch_size = [16, 8, 32]") + "[measure]\nlargest_batch = true\n"

    assert {planned.case.batch_size: planned.case.find_largest_batch for planned in loaded(tmp_path, text).cases()} == {
        16: False,
        8: True,
        32: False,
    }


def test_lengths_of_sequences_are_an_axis_like_sizes_of_batches(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE.replace("[workload]", '[workload]\nsequence_length = "8,16-64*2"'))

    assert [planned.case.sequence_length for planned in found.cases()] == [8, 16, 32, 64]
    with pytest.raises(RecipeError, match="sequence length '0': a size is at least 1"):
        loaded(tmp_path, RECIPE.replace("[workload]", '[workload]\nsequence_length = "0"'))


def test_older_torch_and_workspaces_concern_simulated_cases(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", 'batch_size = 8\ntorch_era = "1.10"\nworkspaces = false')
    cases = [planned.case for planned in loaded(tmp_path, text + '\n[measure]\nmeters = ["simulated", "cpu"]').cases()]

    assert {(case.meter, case.torch_era, case.workspaces) for case in cases} == {
        ("simulated", "1.10", False),
        ("cpu", None, True),
    }


def test_what_differs_in_the_era_alone_is_measured_once(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", 'batch_size = 8\ntorch_era = ["1.10", "none"]')
    cases = [planned.case for planned in loaded(tmp_path, text + '\n[measure]\nmeters = ["simulated", "cpu"]').cases()]

    assert [(case.meter, case.torch_era) for case in cases if case.scheme == "exact"] == [
        ("simulated", "1.10"),
        ("cpu", None),
        ("simulated", None),
    ]
