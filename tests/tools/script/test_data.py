from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from actbench.simulator.fake import fake_mode, without_memory
from actbench.tools.script.libraries.libraries import prepared


class Rows(Dataset[Any]):
    """Rows that say where they were read."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[int, int, int]:
        return row, os.getpid(), threading.get_ident()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.slow
def test_workers_are_this_process_and_batches_are_the_same() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    plain = DataLoader(Rows(), generator=torch.Generator().manual_seed(3), **options)
    expected = [batch[0].tolist() for batch in plain]
    with prepared(print):
        many = DataLoader(
            Rows(),
            num_workers=3,
            pin_memory=True,
            persistent_workers=True,
            prefetch_factor=4,
            timeout=9,
            multiprocessing_context="spawn",
            worker_init_fn=print,
            generator=torch.Generator().manual_seed(3),
            **options,
        )
        found = list(many)

    assert [batch[0].tolist() for batch in found] == expected
    assert {int(each) for batch in found for each in batch[1]} == {os.getpid()}
    assert {int(each) for batch in found for each in batch[2]} == {threading.get_ident()}
    assert many.num_workers == 3  # trainers read it


@pytest.mark.slow
def test_each_fetch_runs_inside_the_real_context() -> None:
    inside: list[bool] = []
    now = [False]

    @contextmanager
    def real() -> Iterator[None]:
        now[0] = True
        yield
        now[0] = False

    class Watched(Rows):
        def __getitem__(self, row: int) -> Any:
            inside.append(now[0])
            return row

    with prepared(print, real=real):
        for _ in DataLoader(Watched(), num_workers=2):
            assert not now[0]

    assert inside == [True] * 10


def test_data_sets_of_graphs_are_prepared_inside_the_real_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[str] = []

    @contextmanager
    def real() -> Iterator[None]:
        inside.append("begins")
        yield
        inside.append("ends")

    for name in ("", "data", "io"):
        (tmp_path / "torch_geometric" / name).mkdir(exist_ok=True)
        (tmp_path / "torch_geometric" / name / "__init__.py").touch()
    text = "class Dataset:\n    def _process(self):\n        self.seen.append('processes')\n"
    (tmp_path / "torch_geometric" / "data" / "dataset.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if not k.startswith("torch_geometric")})
    with prepared(print, real=real):
        found = importlib.import_module("torch_geometric.data.dataset").Dataset()
        found.seen = inside
        found._process()

    assert inside == ["begins", "processes", "ends"]


@pytest.mark.slow
def test_data_is_read_in_a_fake_mode() -> None:
    with without_memory(fake_mode()), prepared(print):
        batch = next(iter(DataLoader(torch.arange(10), batch_size=5, num_workers=1)))

    assert batch.tolist() == [0, 1, 2, 3, 4]


def sizes(loader: Any) -> list[int]:
    return [len(batch) for batch in loader]


def test_a_requested_batch_size_takes_the_place_of_the_scripts() -> None:
    data = list(range(12))
    with prepared(print, batch_size=5):
        shuffled = DataLoader(data, batch_size=4, shuffle=True)
        assert len(shuffled) == 3
        assert shuffled.batch_size == 5
        assert sizes(shuffled) == [5, 5, 5]  # rows are read again: an epoch keeps its batches
        assert sizes(DataLoader(data, batch_size=4)) == [5, 5, 5]
        assert sizes(DataLoader(data, batch_size=6, drop_last=True)) == [5, 5]
        assert (
            sizes(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, drop_last=True))) == [5] * 6
        )
        assert sizes(DataLoader(Stream(), batch_size=10)) == [5, 5, 5, 5]


@pytest.mark.exhaustive
def test_a_loader_for_evaluation_keeps_its_batch_size() -> None:
    with prepared(print, batch_size=5), torch.no_grad():
        assert sizes(DataLoader(range(12), batch_size=4)) == [4, 4, 4]  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_more_rows_than_the_data_set_has() -> None:
    with prepared(print, batch_size=64):
        assert sizes(DataLoader(list(range(12)), batch_size=4, shuffle=True, drop_last=True)) == [64, 64, 64]


@pytest.mark.exhaustive
def test_batches_that_a_script_makes_by_itself_are_kept_and_noted() -> None:
    notes: list[str] = []
    with prepared(notes.append, batch_size=5):
        assert sizes(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])) == [2, 2]  # type: ignore[arg-type]

    assert notes == ["A DataLoader keeps its own batch size, not the requested 5: list makes the batches."]


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_loaders_of_trainers_get_the_batch_size(library: str, tmp_path: Any) -> None:
    seen: list[int] = []

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor, **_: Any) -> Any:  # type: ignore[override]
            seen.append(len(x))
            return {"loss": super().forward(x).sum()}

    data = [{"x": torch.ones(3)} for _ in range(12)]
    model = Model(3, 3)
    with prepared(print, batch_size=6):
        _train(library, model, data, str(tmp_path))

    assert set(seen) == {6}


def _train(library: str, model: torch.nn.Module, data: list[Any], place: str) -> None:
    if library == "accelerate":
        from accelerate import Accelerator

        for batch in Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2)):  # type: ignore[arg-type]
            model(**batch)
    elif library == "transformers":
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            place, per_device_train_batch_size=2, max_steps=3, use_cpu=True, disable_tqdm=True
        )
        Trainer(model, arguments, train_dataset=data).train()  # type: ignore[arg-type]
    else:
        lightning: Any = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, index: int) -> Any:
                return self.model(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.1)

        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
        lightning.Trainer(max_steps=3, accelerator="cpu", enable_model_summary=False, **options).fit(
            Module(),
            DataLoader(data, batch_size=2, shuffle=True, num_workers=1),  # type: ignore[arg-type]
        )
