"""What adapters cannot be put on, and what cannot be done with them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptedmodels import BOTH, Net, built, setup_of
from torch import nn

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, MeasurementError, NothingToConvertError, SpecError
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.tools.convert import model as conversion
from actbench.tools.trainers.session import ConvertedRun


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("spec", "module", "said"),
    [
        (
            "lora",
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
            "has no nn.Linear, and adapters are for these; .*Conv2d",
        ),
        (
            "qlora",
            nn.TransformerEncoderLayer(32, 2),
            r"weights of 3 linear layers directly \(self_attn.out_proj, …\) .* or train the model without qlora",
        ),
        (
            "lora",
            nn.Sequential(OrderedDict(attention=nn.MultiheadAttention(32, 2), head=nn.Linear(32, 4))),
            r"except its head, head: nn.MultiheadAttention reads the weights of 1 linear layer directly \(attention",
        ),
        ("lora,target=query", Net(), "target=query names no linear layer of Net; it has first, second"),
        ("lora,target=first/query", Net(), "target=query names no linear layer"),
    ],
)
def test_a_model_without_such_layers_is_refused(spec: str, module: nn.Module, said: str) -> None:
    with pytest.raises(NothingToConvertError, match=said):
        schemes.build(spec).apply(TrainingSetup(module))
    assert all(p.requires_grad for p in module.parameters())


def test_a_network_whose_only_linear_layer_is_its_head_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match=r"has no nn\.Linear except its head, fc"):
        schemes.build("lora").apply(
            workloads.load_workload(Case(model="resnet18", batch_size=1)).setup(materialize=False, seed=0)
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lora:0", "r=0"),
        ("lora,dropout=1", "dropout=1"),
        ("lora,alpha=0", "alpha=0"),
        ("lora,target=a//b", "names of linear layers stand between"),
        ("lora+qlora", "lora and qlora both freeze a model"),
        ("lora:4,only=layer.0+lora:8", "lora is given twice"),
    ],
)
def test_wrong_specifications_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        schemes.build(text)


@pytest.mark.parametrize("spec", BOTH)
def test_folders_and_callbacks_are_refused_with_the_line_that_does_it(spec: str, tmp_path: Path) -> None:
    line = rf"model = actbench.convert\(model, '{spec}:16'\)"
    with pytest.raises(ConversionError, match=line):
        ConvertedRun(built().module, schemes.build(spec))
    with pytest.raises(ConversionError, match=line):
        actbench.save_converted(actbench.convert(built().module, spec), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_convert_lists_what_changes_and_writes_nothing(cli: Any, tasks_here: None, tmp_path: Path) -> None:
    listed = cli("convert", "tiny-llama", "--scheme", "lora:4", "--batch-size", 2, "--dry-run")
    assert listed.status == 0
    assert "adapters of rank 4" in listed.out
    cli.refused(
        "convert", "tiny-llama", "--scheme", "lora:4", "--output", tmp_path / "new", naming="actbench.convert(model, "
    )
    assert not (tmp_path / "new").exists()


def test_what_fails_after_it_leaves_the_model_trained() -> None:
    model = built().module
    parameters = dict(model.named_parameters())

    with pytest.raises(ConversionError, match="chunked_loss"):
        conversion.convert(model, "lora+chunked_loss,head=nothing")

    assert dict(model.named_parameters()) == parameters
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_with_adapters_is_refused() -> None:
    setup = schemes.build("lora").apply(built())

    with pytest.raises(ConversionError, match="holds adapters of peft already"):
        schemes.build("qlora").apply(setup)


def test_an_optimizer_of_what_is_frozen_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    setup = TrainingSetup(module, loss=lambda model, batch: model(batch["x"]).sum(), make_optimizer=lambda _: optimizer)

    with pytest.raises(MeasurementError, match="SGD holds no parameter that is trained"):
        TrainStep(schemes.build("lora:4").apply(setup), {"x": torch.ones(1, 8)})


def test_merging_into_4_bits_is_refused() -> None:
    model: Any = schemes.build("qlora:4").apply(setup_of(Net())).module

    with pytest.raises(ConversionError, match="cannot be merged"):
        model.first.merge()


def test_without_peft_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(MeasurementError, match=r'lora needs peft: pip install "actbench\[peft\]"'):
        schemes.build("lora").apply(built())
