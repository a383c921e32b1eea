from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from actbench import scheme as schemes
from actbench.errors import MeasurementError
from actbench.measuring import bench
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.processgroup import ALONE
from actbench.model.measured import Mesh
from actbench.model.records import Case

CASE = Case(model="tiny-gpt2", scheme="fsdp:8", batch_size=1, sequence_length=8, meter="simulated")


def test_a_simulation_leaves_the_group_that_it_pretends() -> None:
    measurement = bench.measure(CASE)

    assert measurement.mesh == Mesh(dp=8)
    assert not distributed.is_initialized()


def test_a_real_group_is_left_alone(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(MeasurementError, match=r"belongs to a real process group \(gloo\)"):
            bench.measure(CASE)
        assert distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()


def test_a_real_step_needs_as_many_processes() -> None:
    with pytest.raises(MeasurementError, match="spreads the model over 8 processes, and there is 1: start 'torchrun"):
        ALONE.mesh(schemes.build("fsdp:8"), CpuMeter())


def test_what_is_saved_is_listed_for_one_process() -> None:
    alone = bench.itemize(CASE.model_copy(update={"scheme": "checkpoint"}))
    together = bench.itemize(CASE.model_copy(update={"scheme": "checkpoint+fsdp:8"}))

    assert together.entries == alone.entries
