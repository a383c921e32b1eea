"""Every simulated row says how long its step would take, in fields of its own."""

from __future__ import annotations

import pytest

from actbench.measuring import bench
from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Measurement
from actbench.model.records import Case


def estimated(**settings: object) -> EstimatedTime:
    case = {"model": "tiny-roberta", "batch_size": 8, "device_profile": "t4", **settings}
    found = bench.measure(Case.model_validate(case)).estimated
    assert found is not None
    return found


def test_a_simulated_step_has_an_estimated_time_that_is_not_among_the_measured_ones() -> None:
    case = Case(model="tiny-roberta", batch_size=8, device_profile="t4")

    measurement = bench.measure(case)

    assert measurement.estimated is not None
    assert measurement.estimated.step_seconds > 0
    assert measurement.step_seconds is None
    assert Measurement.model_validate_json(measurement.model_dump_json()) == measurement


def test_a_profile_without_rates_has_no_time() -> None:
    assert bench.measure(Case(model="tiny-roberta", batch_size=8)).estimated is None


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("settings", [{}, {"scheme": "accumulate:2"}, {"optimizer": "sgd"}, {"scheme": "checkpoint"}])
def test_the_parts_of_a_step_add_up_to_it(settings: dict[str, object]) -> None:
    time = estimated(**settings)

    parts = time.forward_seconds + time.backward_seconds + time.optimizer_seconds

    assert parts == pytest.approx(time.step_seconds)
    assert min(time.forward_seconds, time.backward_seconds, time.optimizer_seconds) > 0
    assert sum(each.seconds for each in time.by_operator) == pytest.approx(time.step_seconds)


@pytest.mark.slow
def test_what_is_recomputed_takes_time_in_the_backward_pass() -> None:
    exact, checkpointed = estimated(batch_size=256), estimated(batch_size=256, scheme="checkpoint")

    assert checkpointed.flops > exact.flops
    assert checkpointed.forward_seconds == pytest.approx(exact.forward_seconds, rel=0.05)
    assert checkpointed.backward_seconds > exact.backward_seconds


@pytest.mark.slow
def test_every_operator_of_common_models_is_known() -> None:
    models = ("tiny-roberta", "tiny-gpt2", "tiny-t5", "tiny-vit", "tiny-llama")

    assert {model: estimated(model=model, batch_size=2).unknown for model in models} == dict.fromkeys(models, ())


def test_the_steps_of_bitsandbytes_are_known() -> None:
    assert estimated(batch_size=2, scheme="adam8bit:bnb").unknown == ()


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("device", ["v100-16gb", "t4"])
def test_bfloat16_is_timed_as_float32_where_there_are_no_units_for_it(device: str) -> None:
    sizes = {"model": "tiny-llama@hidden_size=1024,intermediate_size=4096", "sequence_length": 512}
    times = {
        dtype: estimated(**sizes, device_profile=device, dtype=dtype) for dtype in ("float32", "float16", "bfloat16")
    }

    assert times["float16"].step_seconds < 0.7 * times["bfloat16"].step_seconds
    assert times["bfloat16"].step_seconds <= times["float32"].step_seconds
    assert {dtype: time.replaced for dtype, time in times.items()} == {
        "float32": (),
        "float16": (),
        "bfloat16": ("bfloat16",),
    }
