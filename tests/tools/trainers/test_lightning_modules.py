from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from actbench.errors import ConversionError, SpecError, UsageError
from actbench.packing import samplegradients
from actbench.packing.hooked import HookedForward
from actbench.tools.convert.model import convert
from actbench.tools.trainers import lightning
from actbench.tools.trainers.lightning import ActbenchCallback

WIDTH, BATCH = 64, 32
ELEMENTS = BATCH * WIDTH
Plain = Callable[[nn.Module], bool]


class Module(pl.LightningModule):
    """Calls what is named in its training step."""

    def __init__(self, called: str = "model", **children: nn.Module) -> None:
        super().__init__()
        self.called = called
        for name, child in children.items():
            self.add_module(name, child)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.get_submodule(self.called)(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layers(Module):
    """Has its layers in itself, and calls itself."""

    def __init__(self) -> None:
        super().__init__("", first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.gelu(self.first(x)))
        return found


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))


def loader() -> DataLoader[Any]:
    rows = 2 * BATCH
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH), torch.arange(rows) % 2, torch.arange(rows)), BATCH)


def fit(module: pl.LightningModule, callback: ActbenchCallback, folder: Path, steps: int = 1) -> dict[str, Any]:
    """Fit a module and return the numbers that were logged last."""
    run = pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    run.fit(module, loader())
    return {name: number.item() for name, number in run.callback_metrics.items()}


def test_the_module_itself_where_its_layers_are_its_own(tmp_path: Path) -> None:
    numbers = fit(Layers(), ActbenchCallback("gact:L1"), tmp_path)

    assert numbers["actbench/exact_bytes"] == 2 * 4 * ELEMENTS  # the inputs of GELU and of the last layer


def test_the_module_itself_where_its_one_child_is_a_single_layer(tmp_path: Path, is_plain: Plain) -> None:
    module = Module(model=nn.Linear(WIDTH, 2))
    with pytest.warns(UserWarning, match="saved bytes are not measured: the step calls layers of this Module"):
        fit(module, ActbenchCallback("randomized:0.5"), tmp_path)

    assert is_plain(module)


def test_the_one_model_of_a_module_without_being_told(tmp_path: Path) -> None:
    numbers = fit(Module(model=network(), loss=nn.CrossEntropyLoss()), ActbenchCallback("gact:L1"), tmp_path)

    assert numbers["actbench/exact_bytes"] == 2 * 4 * ELEMENTS


def test_a_module_that_is_named(tmp_path: Path, is_plain: Plain) -> None:
    module = Module(model=network(), teacher=network())
    numbers = fit(module, ActbenchCallback("gact:L1", module="model"), tmp_path)
    assert numbers["actbench/exact_bytes"] == 2 * 4 * ELEMENTS
    assert is_plain(module)

    with pytest.warns(UserWarning, match=r"saved bytes are not measured: the step calls layers of this Module"):
        assert fit(module, ActbenchCallback("gact:L1"), tmp_path) == {}
    assert HookedForward.of(module) is None
    assert is_plain(module)
    with pytest.raises(UsageError, match="module='modle': Module has none; its children are model, teacher"):
        fit(module, ActbenchCallback("gact:L1", module="modle"), tmp_path)


def test_layers_of_several_models_are_converted_and_not_measured(tmp_path: Path) -> None:
    module = Module(model=network(), teacher=network())

    with pytest.warns(UserWarning, match="saved bytes are not measured: the step calls layers of this Module"):
        assert fit(module, ActbenchCallback("fewbit:3"), tmp_path) == {}


def test_large_numbers_are_logged_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ActbenchCallback("fewbit:3")
    monkeypatch.setattr(callback, "numbers", lambda: {"actbench/peak_bytes": 2**34 + 1})

    assert fit(Module(model=network()), callback, tmp_path) == {"actbench/peak_bytes": 2**34 + 1}


def imported(monkeypatch: pytest.MonkeyPatch, *missing: str) -> Any:
    """Import the callback's file once more where some packages are not there."""
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("lightning_again", lightning.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_other_package_of_lightning_does_too_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported(monkeypatch).ActbenchCallback.__mro__[2] is pl.Callback
    again = imported(monkeypatch, "lightning.pytorch")
    assert again.Callback.__module__ == "pytorch_lightning.callbacks.callback"
    with pytest.raises(ImportError, match=r"neither lightning nor pytorch_lightning .* pip install lightning"):
        imported(monkeypatch, "lightning.pytorch", "pytorch_lightning")


def test_sample_ids_are_told_to_the_scheme(tmp_path: Path) -> None:
    told: list[list[int]] = []

    class Listening(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            named = samplegradients._current.get()
            assert named is not None
            told.append(named.on(torch.device("cpu")).tolist())
            return super().training_step(batch, batch_idx)

    callback = ActbenchCallback("actnn:L3,use_gradient=true", sample_ids=2)
    fit(Listening(model=network()), callback, tmp_path, steps=2)
    assert told == [list(range(BATCH)), list(range(BATCH, 2 * BATCH))]
    assert samplegradients._current.get() is None

    with pytest.raises(UsageError, match="sample_ids=3: the batch has no such entry"):
        fit(Module(model=network()), ActbenchCallback("actnn:L3", sample_ids=3), tmp_path)


def test_what_cannot_be_is_refused(tmp_path: Path, is_plain: Plain) -> None:
    with pytest.raises(SpecError, match="there is no scheme 'gacd'"):
        ActbenchCallback("gacd")
    module = Layers()
    with pytest.raises(ConversionError, match=r"none of .* to convert"):
        fit(module, ActbenchCallback("resilu2"), tmp_path)
    assert is_plain(module)
    convert(module, "gact:L1")
    with pytest.raises(ConversionError, match="already converted with 'gact:L1'"):
        fit(module, ActbenchCallback("fewbit:3"), tmp_path)
    with pytest.raises(ConversionError, match=r"Module is compiled by torch.compile"):
        fit(torch.compile(Module(model=network())), ActbenchCallback("fewbit:3"), tmp_path)  # type: ignore[arg-type]
