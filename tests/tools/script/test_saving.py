from __future__ import annotations

import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from actbench.simulator import profiles
from actbench.simulator.fake import fake_mode, without_memory
from actbench.tools.script.libraries.libraries import prepared
from actbench.tools.script.libraries.saving import holds_fake
from actbench.tools.script.simulation import Simulation


@pytest.fixture
def notes() -> Iterator[list[str]]:
    found: list[str] = []
    with without_memory(fake_mode()), prepared(found.append):
        yield found


@dataclass
class State:
    tensors: Any


def large() -> torch.Tensor:
    return torch.empty(300, 300)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"model": {"weight": [t]}},
        lambda t: State((1, t)),
        lambda t: types.SimpleNamespace(state=t),
        lambda t: nn.Linear(300, 300),
        lambda t: torch.optim.SGD([nn.Parameter(t)]).param_groups,
    ],
)
def test_what_holds_a_fake_tensor_is_not_written(wrap: Any, notes: list[str], tmp_path: Path) -> None:
    value = wrap(large())

    torch.save(value, tmp_path / "x.pt")

    assert holds_fake(value)
    assert not (tmp_path / "x.pt").exists()
    assert notes == ["torch.save writes nothing: tensors of a simulated run have no values."]


def test_other_objects_are_written_and_read(notes: list[str], tmp_path: Path) -> None:
    torch.save({"epoch": 3, "names": ["a"], "indices": torch.arange(3)}, tmp_path / "x.pt")

    assert torch.load(tmp_path / "x.pt")["epoch"] == 3
    assert notes == []


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 300, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_that_was_not_written_is_read_again(tmp_path: Path) -> None:
    """Cross-validation begins each fold at the weights that it saved before the first."""
    with Simulation(profiles.get("rtx-4090")):
        model, optimizer = trained()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "x.pt")
        before = torch.cuda.memory_allocated()

        state = torch.load(str(tmp_path / "x.pt"), weights_only=True)
        on_card = torch.cuda.memory_allocated() - before
        in_host = torch.load(tmp_path / "x.pt", map_location="cpu")["model"]
        model(torch.randn(8, 300, device="cuda"))  # which counts batches; the checkpoint does not
        optimizer.step()
        assert [int(each["step"]) for each in torch.load(tmp_path / "x.pt")["optimizer"]["state"].values()] == [1] * 4
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

        weights = 4 * (300 * 400 + 3 * 400)
        assert on_card == pytest.approx(3 * weights, rel=0.02)
        assert torch.cuda.memory_allocated() - before == pytest.approx(weights, rel=0.02)  # it took the moments over
        assert state["epoch"] == 3
        assert [each.device.type for each in in_host.values()] == ["cpu"] * len(in_host)
        assert in_host["1.num_batches_tracked"].item() == 1
        assert torch.load(tmp_path / "x.pt")["model"]["1.num_batches_tracked"].item() == 1
        assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("place", ["cpu", {"cuda:0": "cpu"}, lambda storage, location: storage, torch.device("cpu")])
def test_a_checkpoint_is_read_where_it_is_asked_for(place: Any, tmp_path: Path) -> None:
    with Simulation(profiles.get("rtx-4090")):
        torch.save(nn.Linear(300, 300).cuda().state_dict(), tmp_path / "x.pt")

        assert not torch.load(tmp_path / "x.pt", map_location=place)["weight"].is_cuda


def test_weights_that_are_one_are_read_as_one(tmp_path: Path) -> None:
    with Simulation(profiles.get("rtx-4090")):
        table = nn.Embedding(512, 512).cuda().weight
        torch.save({"embedding": table, "head": table, "part": table.detach()[:, 4:]}, tmp_path / "x.pt")
        before = torch.cuda.memory_allocated()
        found = torch.load(tmp_path / "x.pt")

        assert torch.cuda.memory_allocated() - before == 512 * 512 * 4
        assert [each.requires_grad for each in found.values()] == [True, True, False]
        assert (found["part"].shape, found["part"].storage_offset()) == ((512, 508), 4)


def test_what_safetensors_was_given_is_read_again(tmp_path: Path) -> None:
    with Simulation(profiles.get("rtx-4090")):
        from safetensors.torch import load_file, load_model, save_file, save_model

        own, other = nn.Linear(300, 300).cuda(), nn.Linear(300, 300).cuda()
        save_model(own, tmp_path / "model.safetensors")
        save_file({"part": own.weight.detach()[:100]}, tmp_path / "part.safetensors")
        missing, unexpected = load_model(other, tmp_path / "model.safetensors")
        before = torch.cuda.memory_allocated()
        part = load_file(str(tmp_path / "part.safetensors"), device="cuda")["part"]

        assert (list(missing), unexpected) == ([], [])
        assert torch.cuda.memory_allocated() - before == 235 * 512
        assert (part.shape, part.requires_grad) == ((100, 300), False)
        assert not load_file(tmp_path / "part.safetensors")["part"].is_cuda
        assert not list(tmp_path.iterdir())


def test_a_file_of_safetensors_is_read_onto_the_card(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(300, 300)}, tmp_path / "x.safetensors")

    with Simulation(profiles.get("rtx-4090")):
        before = torch.cuda.memory_allocated()
        weight = safetensors.torch.load_file(tmp_path / "x.safetensors", device="cuda")["weight"]

        assert weight.is_cuda
        assert torch.cuda.memory_allocated() - before == 360_448


def test_a_state_that_is_kept_in_memory_or_in_an_open_file_is_read_again(notes: list[str], tmp_path: Path) -> None:
    buffer, file = io.BytesIO(), tmp_path / "x.pt"
    torch.save(large(), buffer)
    buffer.seek(0)
    with file.open("wb") as opened:
        torch.save([large()], opened)

    assert torch.load(buffer).shape == (300, 300)
    assert len(torch.load(file)) == 1


def test_what_is_written_later_is_what_is_read(notes: list[str], tmp_path: Path) -> None:
    torch.save({"w": large()}, tmp_path / "x.pt")
    torch.save({"w": 5}, tmp_path / "x.pt")

    assert torch.load(tmp_path / "x.pt") == {"w": 5}
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "y.pt")


def test_a_circle_of_objects_is_looked_at_once() -> None:
    first: dict[str, Any] = {}
    first["self"] = [first]

    assert not holds_fake(first)


@pytest.mark.slow
def test_functions_that_were_imported_before_write_nothing_either(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    module = types.ModuleType("user_module_with_a_copy")
    module.save = save_file  # type: ignore[attr-defined]
    sys.modules["user_module_with_a_copy"] = module
    try:
        with without_memory(fake_mode()), prepared(lambda note: None):
            module.save({"w": large()}, tmp_path / "x.safetensors")
        module.save({"w": torch.ones(2)}, tmp_path / "y.safetensors")
    finally:
        del sys.modules["user_module_with_a_copy"]

    assert [path.name for path in tmp_path.iterdir()] == ["y.safetensors"]


def test_models_and_checkpoints_are_not_written(notes: list[str], tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=99))
    (tmp_path / "checkpoint-1").mkdir()
    arguments = TrainingArguments(str(tmp_path), save_total_limit=1, use_cpu=True)
    trainer = Trainer(model, arguments)
    trainer.create_optimizer_and_scheduler(1)

    model.save_pretrained(tmp_path / "model")
    trainer.save_model(str(tmp_path / "trained"))
    trainer._save_checkpoint(model, trial=None)  # which would remove older ones
    Accelerator(cpu=True).save_state(str(tmp_path / "state"))

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert [note.partition(" ")[0] for note in notes] == [
        "PreTrainedModel.save_pretrained",
        "Trainer.save_model",
        "Trainer.save_checkpoint",
        "Accelerator.save_state",
    ]


def test_checkpoints_that_accelerate_names_stay_as_they_are(notes: list[str], tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    for number in range(2):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, iteration=2)

    Accelerator(cpu=True, project_config=naming).save_state(str(tmp_path / "state"))

    assert sorted(each.name for each in tmp_path.rglob("*")) == ["checkpoint_0", "checkpoint_1", "checkpoints"]
    assert any(note.startswith("Accelerator.save_state writes nothing") for note in notes)


@pytest.mark.slow
def test_nothing_is_uploaded(notes: list[str]) -> None:
    from huggingface_hub import HfApi, create_repo

    create_repo("someone/something")
    HfApi().upload_folder(folder_path=".", repo_id="someone/something")

    assert notes == ["Nothing is uploaded to the Hugging Face hub: this run is simulated."]
