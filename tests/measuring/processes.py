"""A program that torchrun starts: it measures cases in the process group that it belongs to itself."""

from __future__ import annotations

import pickle

from torch import distributed

import actbench
from actbench.measuring import bench
from actbench.model.measured import Mesh
from actbench.model.records import Case


def case(scheme: str) -> Case:
    return Case(
        model="tiny-gpt2", scheme=scheme, batch_size=2, sequence_length=8, meter="cpu", min_steps=2, min_seconds=0.0
    )


def shared_out(scheme: str, mesh: Mesh) -> None:
    measurement = actbench.measure(case(scheme))

    assert measurement.mesh == mesh, scheme
    assert measurement.step_seconds is not None
    assert len(measurement.step_seconds) >= 2, scheme
    assert measurement.gradient_error is None or measurement.gradient_error < 1e-5, scheme


def check() -> None:
    shared_out("ddp:2", Mesh(dp=2))
    shared_out("fsdp:2", Mesh(dp=2))
    shared_out("tp:2", Mesh(tp=2))
    assert pickle.loads(bench.snapshot(case("ddp:2")))["device_traces"]
    assert bench.itemize(case("tp:2")).entries
    if distributed.get_rank() == 0:  # a case of one process waits for no other
        assert actbench.measure(case("fewbit:3")).mesh is None


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    check()
    distributed.barrier()
    distributed.destroy_process_group()
