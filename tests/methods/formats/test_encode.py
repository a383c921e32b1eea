from __future__ import annotations

import math

import pytest

from actbench import scheme as schemes, workload as workloads
from actbench.errors import SpecError
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep

ALL = "weights/gradients/activations/maps/state"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("smaq,on=activation", "on.0=activation must be 'weights', 'gradients'"),
        ("smaq,on=state/state", "a structure is given twice"),
        ("smaq,on=state,forward=lossy", "forward=lossy is about activations"),
        ("smaq,outliers=0.1", "the outliers of a block of 256 must be a whole number"),
        ("smaq,main_bits=8", "main_bits must be from 3 to outlier_bits"),
        ("encode", "encoding is missing"),
        ("encode:int:9", "^scheme 'encode:int:9': encoding=int:9: bits=9 must be"),
        ("encode:int:6/", r"^scheme 'encode:int:6/': encoding=int:6/: '' is not of the form key=value \(see"),
        (
            "encode:nope",
            "^scheme 'encode:nope': encoding=nope: there is no encoding 'nope'; 'actbench encodings'",
        ),
        ("encode:smack", "did you mean 'smaq'"),
        ("encode:nnwbdi", "no fixed rate"),
    ],
)
def test_wrong_specifications_say_why(text, why):
    with pytest.raises(SpecError, match=why):
        schemes.build(text)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("smaq,on=state/activations", "smaq"),
        ("smaq,on=state,main_bits=5", "smaq,on=state,main_bits=5"),
        ("encode:int6", "encode:int:6"),
        (
            "encode:fp8:e5m2/scale=bfloat16/group_size=64,on=maps",
            "encode:fp8:e5m2/group_size=64/scale=bfloat16,on=maps",
        ),
        ("encode:nnwbdi,on=weights", "encode:nnwbdi,on=weights"),
    ],
)
def test_a_specification_has_one_form(text, spec):
    assert schemes.build(text).spec == spec
    assert schemes.build(spec) == schemes.build(text)


def test_what_its_authors_did_is_a_specification():
    case = Case(model="tiny-gpt2", batch_size=2, sequence_length=16, optimizer="sgd-momentum")
    workload = workloads.load_workload(case)
    text = f"encode:smaq_simulated,on={ALL},forward=lossy"
    setup = schemes.build(text).apply(workload.setup(materialize=True, seed=0))
    step = TrainStep(setup, workload.batch(2, seed=0))

    assert all(site.becomes.startswith("simulated") for site in setup.sites)
    assert math.isfinite(step().item())
    assert math.isfinite(step().item())
