"""What every scheme of one process does beside processes that share layers: it keeps its promise, or says why not."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from actbench import scheme as schemes
from actbench.errors import ActbenchError
from actbench.measuring import bench, processgroup
from actbench.model.measured import Measurement, Mesh
from actbench.model.records import Case

pytestmark = pytest.mark.usefixtures("operators_run_once")
EXAMPLES = {
    "actnn": "actnn:L2",
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "gact": "gact:L1",
    "randomized": "randomized:0.5",
}
MODELS = {"resilu2": "tiny-gpt2@activation_function=silu", "liger": "tiny-llama"}
SPECS = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in ("exact", "channels_last")]
QUICK = ("fewbit:3", "lora")
REFUSED = {"qlora": "FrozenLinear", "compile": "cannot be compiled"}


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    with processgroup.leave_fake_group():
        yield


@functools.cache
def measured(spec: str, like: str) -> Measurement:
    model = MODELS.get(like, "tiny-gpt2")
    return bench.measure(
        Case(model=model, scheme=spec, batch_size=2, sequence_length=16, meter="simulated", gradient_quality=False)
    )


@pytest.mark.parametrize(
    "spec", [each if each in QUICK else pytest.param(each, marks=pytest.mark.sampled(slow=3)) for each in SPECS]
)
def test_a_scheme_keeps_less_beside_shared_layers_than_both_alone(spec: str) -> None:
    if spec in REFUSED:
        with pytest.raises(ActbenchError, match=REFUSED[spec]):
            measured(f"{spec}+tp:2", spec)
        return
    alone, together = measured(spec, spec), measured(f"{spec}+tp:2", spec)

    assert together.mesh == Mesh(tp=2)
    assert together.weights_bytes < 0.8 * alone.weights_bytes
    assert together.peak_bytes is not None
    assert alone.peak_bytes is not None
    assert together.peak_bytes < alone.peak_bytes


@pytest.mark.parametrize(
    "spec",
    [
        "fsdp:2+tp:2",
        *(
            pytest.param(spec, marks=pytest.mark.sampled(slow=1))
            for spec in ("ddp:2+tp:2", "zero1:2+tp:2", "fsdp:2+tp:2,sequence=true")
        ),
    ],
)
def test_shared_layers_stand_beside_batches_of_several_processes(spec: str) -> None:
    one, both = measured(spec.partition("+")[2], ""), measured(spec, "")

    assert both.mesh == Mesh(dp=2, tp=2)
    if spec.startswith("fsdp"):
        assert both.weights_bytes < 0.6 * one.weights_bytes
    assert one.optimizer_bytes is not None
    assert both.optimizer_bytes is not None
    assert (both.optimizer_bytes < one.optimizer_bytes) is not spec.startswith("ddp")
