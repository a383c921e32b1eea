"""Models whose code calls their activations: which calls are found, what they keep, and that they can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calledtwins import equal
from torch import Tensor, nn

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError
from actbench.measuring import bench, inspection
from actbench.methods.fewbit.called import CalledForward
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.tools.convert.model import conversion_of


def test_an_example_tells_which_calls_are_made() -> None:
    class Branches(nn.Module):
        def __init__(self, capped: bool) -> None:
            super().__init__()
            self.linear, self.capped = nn.Linear(8, 8), capped

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x.tanh() if self.capped else x

    model = actbench.convert(nn.Sequential(Branches(True), Branches(False)), "fewbit:3", example_batch=torch.ones(2, 8))
    conversion = conversion_of(model)

    assert conversion is not None
    (site,), (left,) = conversion.sites, conversion.unreached
    assert (site.path, site.was, site.becomes, site.calls) == ("0", "call of Tensor.tanh", "3-bit Tanh", 1)
    assert (left.path, left.kind) == ("1", "call of Tensor.tanh")
    assert "names them" in left.reason
    with pytest.raises(ConversionError, match="does nothing in a training step"):
        actbench.convert(nn.Sequential(Branches(False)), "fewbit:3", example_batch=torch.ones(2, 8))


def mamba() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def language_loss(model: nn.Module) -> Tensor:
    words = torch.randint(0, 99, (2, 8), generator=torch.Generator().manual_seed(1))
    return model.train()(input_ids=words, labels=words).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*slow reference code:UserWarning")
def test_a_folder_of_a_model_that_calls_is_loaded_converted(tmp_path: Path) -> None:
    model = actbench.convert(mamba(), "fewbit:3")
    back = actbench.load_converted(actbench.save_converted(model, tmp_path / "model"))

    assert [type(part).__name__ for part in back.modules() if CalledForward.of(part)] == ["MambaMixer"] * 2
    assert conversion_of(back) == conversion_of(model)
    for one in (model, back):
        language_loss(one).backward()  # type: ignore[no-untyped-call]
    assert equal(*([parameter.grad for parameter in one.parameters()] for one in (model, back)))  # type: ignore[arg-type]


OWN = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.gate, self.narrow = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(F.silu(self.gate(x)) * F.gelu(self.wide(x)).tanh())

def build():
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, lambda n: {"x": torch.randn(n, 32, 64)}, lambda model, batch: model(batch["x"]).square().mean()
"""


@pytest.mark.parametrize(
    "spec",
    [
        *("fewbit:3", "invact"),
        *(
            pytest.param(spec, marks=pytest.mark.slow)
            for spec in ("fewbit:1,functions=silu/tanh", "regelu2", "resilu2")
        ),
    ],
)
def test_meters_agree(spec: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    case = Case(model=f"{tmp_path / 'own.py'}:build", batch_size=16, gradient_quality=False)

    def read(spec: str, **changes: Any) -> Any:
        return bench.Session(case.model_copy(update={"scheme": spec, **changes})).memory()

    measured, simulated = read(spec, meter="cpu"), read(spec, meter="simulated", device_profile="cpu")
    exact = read("exact", meter="cpu")

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.02)
    assert measured.activation_bytes < exact.activation_bytes


PRESETS = {
    "mamba-130m@num_hidden_layers=2": "call of F.softplus, F.silu",
    "googlenet": "call of F.relu",
    "inception_v3": "call of F.relu",
    "densenet121": "call of F.relu",
    "swin_v2_t": "call of torch.sigmoid",
    "whisper-small": "call of F.gelu",
    "roberta-base@num_hidden_layers=1": "call of torch.tanh",
}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if "roberta" in model else pytest.mark.sampled(slow=2)) for model in PRESETS]
)
def test_presets_that_call_their_activations_keep_less_where_they_do(model: str) -> None:
    length = 8 if "mamba" in model else None
    workload = workloads.load_workload(Case(model=model, batch_size=2, weights="random", sequence_length=length))
    setup = workload.setup(materialize=False, seed=0)

    def batch() -> Batch:
        return workload.batch(2, seed=0)

    before = inspection.trace(setup, batch)
    converted = schemes.build("fewbit:3").apply(setup)
    after = inspection.trace(converted, batch)
    sites, _ = inspection.inspect(before, after, converted)
    calls = [site for site in sites if site.called]

    assert {site.was for site in calls} == {PRESETS[model]}
    assert sum(site.bytes_after or 0 for site in calls) < sum(site.bytes_before or 0 for site in calls)
