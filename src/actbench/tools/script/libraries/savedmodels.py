"""Models and checkpoints that a script saves: nothing is written there, and the same run finds them again.

What such a folder would hold beside tensors is in a folder of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from actbench.device.patches import attribute
from actbench.tempfiles import temporary_folder
from actbench.tools.script.libraries.checkpoints import Contents
from actbench.tools.script.libraries.importpatches import Change, changed, rebind
from actbench.tools.script.libraries.saving import Note


class SavedModels:
    """The folders that stand for those of a script, by the names of these."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._root: Path | None = None
        self._folders: dict[str, Path] = {}

    def is_ours(self, path: Any) -> bool:
        """Return whether a path is in a folder that stands for one of the script."""
        is_path = isinstance(path, str | os.PathLike)
        return is_path and self._root is not None and Path(os.path.abspath(path)).is_relative_to(self._root)

    def place(self, folder: str | os.PathLike[str]) -> Path:
        """Return the folder that stands for one of the script, which may be a new one."""
        name = os.path.abspath(folder)
        if self.is_ours(name):
            Path(name).mkdir(parents=True, exist_ok=True)
            return Path(name)
        if name not in self._folders:
            if self._root is None:
                self._root = self._stack.enter_context(temporary_folder())
            self._folders[name] = self._root / str(len(self._folders))
            self._folders[name].mkdir()
        return self._folders[name]

    def found(self, folder: Any) -> Path | None:
        """Return the folder that stands for one of the script; None if it saved nothing there."""
        if not (isinstance(folder, str | os.PathLike) and folder):
            return None
        name = Path(os.path.abspath(folder))
        for above in (name, *name.parents):
            if (place := self._folders.get(str(above))) is not None:
                found = place / name.relative_to(above)
                return found if found.is_dir() else None
        return None

    def keep(self, model: Any, folder: str | os.PathLike[str]) -> None:
        """Keep what is saved of a model of transformers beside its weights."""
        place = self.place(folder)
        config = model.config
        config.dtype, config.architectures = model.dtype, [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(place)
        if model.can_generate():
            model.generation_config.save_pretrained(place)

    def keep_adapters(self, model: Any, folder: str | os.PathLike[str]) -> None:
        """Keep the configs of a model of peft."""
        place = self.place(folder)
        for name, config in model.peft_config.items():
            config.save_pretrained(place if name == "default" else place / name)

    def keep_config(self, model: Any, folder: str | os.PathLike[str]) -> None:
        """Keep the config of a model of diffusers."""
        model.save_config(self.place(folder))


def changes(saved: SavedModels, contents: Contents, note: Note) -> dict[str, Change]:
    """Return the changes of libraries that save and load models, by the names of their modules.

    They go around those of :mod:`actbench.tools.script.libraries.saving`.
    """
    return {
        "transformers.modeling_utils": _methods("PreTrainedModel", save_pretrained=_keeping(saved.keep)),
        "transformers.trainer": _of_trainer(saved, contents, note),
        "accelerate.accelerator": _of_accelerator(saved, note),
        **{f"{name}.plugins.io.torch_io": _of_lightning(saved, note) for name in _FABRIC},
        **{f"{name}.trainer.trainer": _methods("Trainer", save_checkpoint=_unsharded(note)) for name in _LIGHTNING},
        "transformers.trainer_utils": lambda module: rebind(module, "get_last_checkpoint", _looking(saved)),
        "transformers.utils.hub": lambda module: rebind(module, "cached_files", _finding(saved)),
        "peft.peft_model": _methods("PeftModel", save_pretrained=_keeping(saved.keep_adapters)),
        "peft.config": _redirected(saved, "PeftConfigMixin", "from_pretrained", "_get_peft_type"),
        "diffusers.models.modeling_utils": _methods("ModelMixin", save_pretrained=_keeping(saved.keep_config)),
        "diffusers.configuration_utils": _redirected(saved, "ConfigMixin", "load_config"),
    }


def _of_trainer(saved: SavedModels, contents: Contents, note: Note) -> Change:
    """Let a Trainer write its checkpoints into a folder of ours, and resume from there."""

    def checkpointing(own: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
            note("Trainer.save_checkpoint writes nothing: tensors of a simulated run have no values.")
            if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # which save shards
                with attribute(trainer.args, "output_dir", str(saved.place(trainer.args.output_dir))):
                    own(trainer, *args, **options)

        return save_checkpoint

    def training(own: Callable[..., Any]) -> Callable[..., Any]:
        def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
            place = saved.found(resume_from_checkpoint)
            return own(trainer, resume_from_checkpoint if place is None else str(place), *args, **options)

        return train

    return _methods(
        "Trainer", save_model=_keeping_trained(saved, contents), _save_checkpoint=checkpointing, train=training
    )


_LIGHTNING, _FABRIC = ("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric")

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
"""Strategies of Lightning whose checkpoints hold shards, by ways of writing of their own."""


def _unsharded(note: Note) -> Callable[[Any], Any]:
    """Return the change of Lightning's ``save_checkpoint``: none of shards is written."""

    def change(own: Callable[..., None]) -> Callable[..., None]:
        def save_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
            if any(each.__name__ in _SHARDING for each in type(trainer.strategy).__mro__):
                note("Trainer.save_checkpoint writes nothing: tensors of a simulated run have no values.")
            else:
                own(trainer, *args, **options)

        return save_checkpoint

    return change


def _of_accelerator(saved: SavedModels, note: Note) -> Change:
    """Let accelerate write its state into a folder of ours, and load it from there; what is sharded is not written."""

    def saving(own: Callable[..., Any]) -> Callable[..., Any]:
        def save_state(self: Any, output_dir: Any = None, *args: Any, **options: Any) -> Any:
            note("Accelerator.save_state writes nothing: tensors of a simulated run have no values.")
            kind = getattr(self.distributed_type, "name", "")
            # with names of its own it writes into the project's folder, and removes old checkpoints there
            names_itself = self.project_configuration.automatic_checkpoint_naming
            if output_dir is None or names_itself or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
                return output_dir
            own(self, str(saved.place(output_dir)), *args, **options)
            return output_dir

        return save_state

    def loading(own: Callable[..., Any]) -> Callable[..., Any]:
        def load_state(self: Any, input_dir: Any = None, *args: Any, **options: Any) -> Any:
            place = saved.found(input_dir)
            return own(self, input_dir if place is None else str(place), *args, **options)

        return load_state

    return _methods("Accelerator", save_state=saving, load_state=loading)


def _of_lightning(saved: SavedModels, note: Note) -> Change:
    """Let Lightning write checkpoints into a folder of ours, and find them again."""

    def file_of(path: Any) -> Path | None:
        folder = saved.found(os.path.dirname(os.path.abspath(path)))
        file = None if folder is None else folder / os.path.basename(path)
        return file if file is not None and file.exists() else None

    def saving(own: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(self: Any, checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
            note("Trainer.save_checkpoint writes nothing: tensors of a simulated run have no values.")
            torch.save(checkpoint, saved.place(os.path.dirname(os.path.abspath(path))) / os.path.basename(path))

        return save_checkpoint

    def loading(own: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(self: Any, path: Any, *args: Any, **options: Any) -> Any:
            file = file_of(path)
            return own(self, path, *args, **options) if file is None else torch.load(file, map_location="cpu")

        return load_checkpoint

    def removing(own: Callable[..., Any]) -> Callable[..., Any]:
        def remove_checkpoint(self: Any, path: Any) -> None:
            if (file := file_of(path)) is not None:  # the user's stay
                file.unlink()

        return remove_checkpoint

    return _methods("TorchCheckpointIO", save_checkpoint=saving, load_checkpoint=loading, remove_checkpoint=removing)


def _looking(saved: SavedModels) -> Callable[[Any], Any]:
    def change(own: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        def get_last_checkpoint(folder: Any) -> str | None:
            return own(saved.found(folder) or folder)

        return get_last_checkpoint

    return change


def _methods(owner: str, **changes: Callable[[Any], Any]) -> Change:
    """Return the change of methods of a class of a module, by their names."""

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for name, each in changes.items():
                stack.enter_context(changed(vars(module)[owner], name, each))
            return stack.pop_all()

    return change


def _keeping(keep: Callable[[Any, Any], object]) -> Callable[[Any], Any]:
    """Return the change of ``save_pretrained`` that first calls ``keep`` with the model and the folder."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
            keep(self, save_directory)
            return own(self, save_directory, *args, **options)

        return save_pretrained

    return change


def _keeping_trained(saved: SavedModels, contents: Contents) -> Callable[[Any], Any]:
    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def save_model(self: Any, output_dir: Any = None, *args: Any, **options: Any) -> Any:
            folder = output_dir or self.args.output_dir
            model = self.accelerator.unwrap_model(self.model)
            if hasattr(model, "peft_config") and not hasattr(model, "can_generate"):
                saved.keep_adapters(model, folder)
            elif hasattr(model, "can_generate"):
                saved.keep(model, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)  # files without tensors, as when a script saves it
            if saved.is_ours(folder):  # a checkpoint, from which it may resume
                kind = "adapter_model" if hasattr(model, "peft_config") else "model"
                contents.keep_named(saved.place(folder) / f"{kind}.safetensors", model.state_dict())
            return own(self, output_dir, *args, **options)

        return save_model

    return change


def _finding(saved: SavedModels) -> Callable[[Any], Any]:
    """Let transformers find files that were saved in this run before those that are in the script's folder."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def cached_files(path_or_repo_id: Any, filenames: Sequence[str], *args: Any, **options: Any) -> Any:
            place = saved.found(path_or_repo_id)
            if place is None:
                return own(path_or_repo_id, filenames, *args, **options)
            has_all = all((place / (options.get("subfolder") or "") / name).exists() for name in filenames)
            is_there = os.path.isdir(path_or_repo_id)
            return own(path_or_repo_id if is_there and not has_all else str(place), filenames, *args, **options)

        return cached_files

    return change


def _redirected(saved: SavedModels, owner: str, *names: str) -> Change:
    """Let class methods that read a config from a folder read it where it was kept in this run."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def read(cls: Any, folder: Any, *args: Any, **options: Any) -> Any:
            place = saved.found(folder)
            return own(cls, folder if place is None else str(place), *args, **options)

        return read

    def change_all(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(changed(vars(module)[owner], name, change))
            return stack.pop_all()

    return change_all
