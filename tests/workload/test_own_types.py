"""A model that comes built keeps the types it comes with, unless another is asked for."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

import actbench
from actbench import workload as workloads
from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.tools.train.records import TrainingCase

MIXED = """
    import torch
    from torch import nn

    class Lora(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.base = nn.Linear(width, width).to(torch.bfloat16).requires_grad_(False)
            self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
            self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        def forward(self, x):
            return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x)) * self.scale.float()

    def build():
        model = nn.Sequential(Lora(192), nn.GELU(), Lora(192))
        def make_batch(n):
            return {"x": torch.randn(n, 192), "more": [torch.ones(n, dtype=torch.float64)]}
        def loss(model, batch):
            return model(batch["x"]).square().mean()
        return model, make_batch, loss
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(textwrap.dedent(MIXED))
    return f"{tmp_path / 'own.py'}:build"


@pytest.mark.parametrize("materialize", [True, False])
def test_every_tensor_keeps_its_type(own: str, materialize: bool) -> None:
    workload = workloads.load_workload(Case(model=own, batch_size=2))
    setup = workload.setup(materialize=materialize, seed=0)
    batch = workload.batch(2, seed=0)

    types = {name.rpartition("0.")[2]: tensor.dtype for name, tensor in setup.module.state_dict().items()}
    assert types["base.weight"] == types["base.bias"] == torch.bfloat16
    assert types["down.weight"] == torch.float32
    assert types["scale"] == torch.float64
    assert (batch["x"].dtype, batch["more"][0].dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("materialize", [True, False])
def test_a_type_that_is_asked_for_is_that_of_everything(own: str, materialize: bool) -> None:
    workload = workloads.load_workload(Case(model=own, batch_size=2, dtype="float32"))
    setup = workload.setup(materialize=materialize, seed=0)
    batch = workload.batch(2, seed=0)

    assert {tensor.dtype for tensor in setup.module.state_dict().values()} == {torch.float32}
    assert {batch["x"].dtype, batch["more"][0].dtype} == {torch.float32}


@pytest.mark.parametrize("meter", ["simulated", "cpu"])
def test_the_record_has_the_bytes_and_the_types_that_there_are(own: str, meter: str) -> None:
    case = Case(model=own, batch_size=2, meter=meter, device_profile="cpu", gradient_quality=False)
    kept, cast = (Session(case.model_copy(update={"dtype": dtype})).memory() for dtype in (None, "float32"))
    base, low_rank = 192 * 193, 2 * 4 * 192

    assert kept.weights_bytes == 2 * (2 * base + 4 * low_rank + 8)
    assert cast.weights_bytes == 2 * (4 * base + 4 * low_rank + 4)
    assert (kept.dtype, cast.dtype) == ("bfloat16+float32", "float32")


def test_autocast_leaves_the_weights_as_they_are(own: str) -> None:
    measured = actbench.measure(Case(model=own, batch_size=2, autocast="bfloat16"))

    assert measured.dtype == "bfloat16+float32"


@pytest.mark.parametrize("model", ["resnet50", "roberta-base@num_hidden_layers=2", "torchvision:resnet18"])
def test_what_actbench_builds_is_float32_and_has_the_keys_of_older_records(model: str) -> None:
    older = Case(model=model, batch_size=2, dtype="float32", optimizer="adamw")

    assert Case(model=model, batch_size=2) == older
    assert Case(model=model, batch_size=2, dtype=None, optimizer=None).key() == older.key()
    assert TrainingCase(model=model, data="digits", batch_size=2, steps=1, learning_rate=1.0).dtype == "float32"


@pytest.mark.parametrize("model", ["./folder", "/a/folder", "~/folder", "hf:org/name", "org/name", "org/name@a=1"])
def test_folders_and_models_of_the_hub_have_a_type_of_their_own(model: str) -> None:
    case = Case(model=model, batch_size=2)

    assert (case.dtype, case.optimizer) == (None, "adamw")
    assert case.key() != Case(model=model, batch_size=2, dtype="float32").key()


@pytest.mark.parametrize("materialize", [True, False])
def test_a_folder_is_of_the_type_that_its_config_says(tmp_path: Path, materialize: bool) -> None:
    saved = Case(model="tiny-vit", batch_size=1, dtype="bfloat16")
    workloads.load_workload(saved).setup(materialize=True, seed=0).module.save_pretrained(tmp_path / "vit")  # type: ignore[operator]

    def types(dtype: str | None) -> set[torch.dtype]:
        case = Case(model=str(tmp_path / "vit"), batch_size=1, dtype=dtype, weights="auto")  # type: ignore[arg-type]
        workload = workloads.load_workload(case)
        module = workload.setup(materialize=materialize, seed=0).module
        return {parameter.dtype for parameter in module.parameters()} | {
            workload.batch(1, seed=0)["pixel_values"].dtype
        }

    assert types(None) == {torch.bfloat16}
    assert types("float32") == {torch.float32}


def test_a_folder_without_a_slash_in_its_name_says_that_it_is_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit").mkdir()
    config = {"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 24, "image_size": 32}
    (tmp_path / "vit" / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    monkeypatch.chdir(tmp_path)

    def warnings(model: str) -> str:
        workload = workloads.load_workload(Case(model=model, batch_size=1, task="image-classification"))
        workload.setup(materialize=False, seed=0)
        return " ".join(workload.warnings)

    assert "its config says bfloat16, it is built in float32; ./vit keeps its own type" in warnings("vit")
    assert warnings("./vit") == ""
