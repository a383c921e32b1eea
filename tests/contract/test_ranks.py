"""What every scheme of one process does beside those that spread a model over several: it works, or says why not."""

from __future__ import annotations

import functools

import pytest

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.measuring import bench
from actbench.model.measured import Measurement, Mesh
from actbench.model.records import Case
from actbench.scheme.base import PLACEMENT

pytestmark = pytest.mark.usefixtures("operators_run_once")
EXAMPLES = {"encode": "encode:int:6", "fewbit": "fewbit:3", "gact": "gact:L1", "randomized": "randomized:0.5"}
MODELS = {"resilu2": "tiny-gpt2@activation_function=silu", "liger": "tiny-llama"}
SPECS = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in ("exact", "channels_last")]
QUICK = {("fewbit:3", "fsdp:8"), ("fewbit:3", "ddp:8"), ("fewbit:3", "zero1:8")}
SPREAD = ["fsdp:8", "ddp:8", "zero1:8"]
REFUSED = {
    ("encode:int:6,on=weights", "fsdp:8"): "weights in a number format: each process holds a shard",
    ("encode:int:6,on=gradients", "fsdp:8"): "weight gradients in a number format: each process holds a shard",
    ("encode:smaq_simulated,on=state", "fsdp:8"): "optimizer state in a number format: each process holds a shard",
    ("adam8bit:bnb", "fsdp:8"): "adam8bit:bnb: parameters would be DTensors",
    ("optimizer_offload", "fsdp:8"): "optimizer_offload: its copies in host memory are plain tensors",
    ("encode:int:6,on=gradients", "ddp:8"): "does not go with weight gradients in a number format",
    ("encode:int:6,on=gradients", "zero1:8"): "does not go with weight gradients in a number format",
    ("release", "ddp:8"): "does not go with parameters that are stepped within the backward pass",
    ("release", "zero1:8"): "does not go with parameters that are stepped within the backward pass",
    ("compile", "fsdp:8"): "does not go with compile of the whole model",
    ("ema", "fsdp:8"): "ema: averages of shares are not kept",
    ("late_zero_grad", "fsdp:8"): "late_zero_grad: it does not follow the gradients of shards",
    ("master", "fsdp:8"): "master: it makes no float32 copies of shards",
    ("master", "ddp:8"): "does not go with gradients that are added up in float32",
    ("master", "zero1:8"): "does not go with gradients that are added up in float32",
    ("optimizer_offload", "fsdp1:8"): "optimizer_offload: its copies in host memory are plain tensors",
    ("encode:int:6,on=weights", "fsdp1:8"): "weights in a number format: each process holds a shard",
    ("compile", "fsdp1:8"): "does not go with compile of the whole model",
    ("release", "fsdp1:8"): "does not go with",
    ("qlora", "fsdp1:8"): "FSDP1 cannot flatten parameters of .*: ",
    ("schedule_free", "fsdp1:8"): "puts averaged weights into the parameters to evaluate",
    ("schedule_free", "zero1:8"): "puts averaged weights into the parameters to evaluate",
    **{
        (name, "fsdp:8"): f"{name}: it needs whole matrices"
        for name in ("adam_mini", "apollo", "fira", "galore", "muon8bit")
    },
}


def case(spec: str, like: str) -> Case:
    model = MODELS.get(like, "tiny-gpt2")
    return Case(model=model, scheme=spec, batch_size=2, sequence_length=16, meter="simulated", gradient_quality=False)


@functools.cache
def measured(spec: str, like: str) -> Measurement:
    return bench.measure(case(spec, like))


def spreading() -> list[str]:
    return [name for name in schemes.scheme_names() if PLACEMENT in schemes.lookup(name).model_construct().changes]


def beside() -> list[object]:
    """Return schemes beside ways to spread; those that only change passes take the two of whole weights in turn."""
    found = []
    for turn, spec in enumerate(SPECS):
        passes = set(schemes.build(spec).changes) <= {"saved tensors", "recomputation", "loss"}
        spreads = ["fsdp:8", SPREAD[1 + turn % 2]] if passes and spec != "fewbit:3" else SPREAD
        found += [(spec, spread) for spread in spreads if (spec, spread) not in REFUSED]
    return [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.sampled(slow=5)) for pair in found]


def test_every_scheme_that_spreads_a_model_is_here() -> None:
    assert {schemes.build(spec).name for spec in SPREAD} <= set(spreading())
    assert set(spreading()).isdisjoint(schemes.alone())


@pytest.mark.parametrize(("spec", "spread"), beside())
def test_a_scheme_of_one_process_keeps_what_it_keeps_beside_one_of_several(spec: str, spread: str) -> None:
    alone, together = measured(spec, spec), measured(f"{spec}+{spread}", spec)

    if (spec, spread) == ("keep_outputs", "fsdp:8"):  # the loss of the step before is freed within the pass
        assert together.activation_bytes == alone.activation_bytes - 512
    else:
        assert together.activation_bytes == alone.activation_bytes
    assert together.mesh == Mesh(dp=8)
    assert alone.gradients_bytes is not None
    assert together.gradients_bytes is not None
    if spread == "fsdp:8":
        added = max(0, alone.weights_bytes - measured("exact", spec).weights_bytes)  # such as tables, which are buffers
        assert together.weights_bytes <= measured("fsdp:8", spec).weights_bytes + added
        if alone.gradients_bytes:
            assert together.gradients_bytes < alone.gradients_bytes / 7
        else:  # release
            assert together.gradients_bytes == 0
    else:
        assert together.weights_bytes == alone.weights_bytes
        assert together.gradients_bytes == alone.gradients_bytes
    assert alone.optimizer_bytes is not None
    assert together.optimizer_bytes is not None
    if spread == "ddp:8":
        assert together.optimizer_bytes == alone.optimizer_bytes
    elif "optimizer" not in schemes.build(spec).changes:  # small parameters are not packed, and shares are smaller
        assert together.optimizer_bytes < alone.optimizer_bytes / 7


FLAT = ["checkpoint", "fewbit:3", "gact:L1", "adam8bit", "accumulate"]
"""Schemes beside flat parameters: they change passes, saved tensors, the optimizer and the batch."""


@pytest.mark.parametrize(
    "spec", [FLAT[1], *(pytest.param(spec, marks=pytest.mark.slow) for spec in FLAT if spec != FLAT[1])]
)
def test_a_scheme_of_one_process_keeps_what_it_keeps_beside_flat_parameters(spec: str) -> None:
    alone, together = measured(spec, spec), measured(f"{spec}+fsdp1:8", spec)

    assert together.activation_bytes == alone.activation_bytes
    assert together.weights_bytes is not None
    assert together.weights_bytes < alone.weights_bytes / 7
    assert together.peak_bytes < alone.peak_bytes


@pytest.mark.sampled(fast=6, slow=6)
@pytest.mark.parametrize(("parts", "reason"), REFUSED.items(), ids="+".join)
def test_what_does_not_go_together_is_refused_with_the_reason(parts: tuple[str, str], reason: str) -> None:
    with pytest.raises(ConversionError, match=reason) as refused:
        measured("+".join(parts), parts[0])
    assert bench.failure_of(refused.value).reason == "unsupported"


@pytest.mark.parametrize("parts", ["fsdp:8+ddp:8", "fsdp:8+zero1:8", "ddp:8+zero1:8"])
def test_one_scheme_shares_a_model_out(parts: str) -> None:
    with pytest.raises(SpecError, match="both say how processes with batches of their own share the model"):
        schemes.build(parts)
