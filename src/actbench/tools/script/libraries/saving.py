"""What a script would write: tensors without values are not written, and nothing is uploaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.storage import TypedStorage, UntypedStorage

from actbench.ops.simulation import plain_tensors
from actbench.tools.script.libraries.importpatches import Change, changed, rebind

Note = Callable[[str], None]

_DEEPEST = 12


def holds_fake(value: Any) -> bool:
    """Return whether a value is a tensor without values, or holds one: in containers, modules and attributes."""
    return _holds(value, set(), 0)


def _holds(value: Any, seen: set[int], depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(each, FakeTensor) or each.device.type == "meta" for each in plain_tensors(value))
    if isinstance(value, UntypedStorage | TypedStorage):
        return value.device.type == "meta"
    if id(value) in seen or depth > _DEEPEST or isinstance(value, str | bytes | int | float | type(None) | type):
        return False
    seen.add(id(value))
    return any(_holds(part, seen, depth + 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif dataclasses.is_dataclass(value) or not isinstance(value, ModuleType):
        yield from getattr(value, "__dict__", {}).values()


def left_out(
    note: Note, what: str, looks_at: Callable[..., Any] | None = None, answer: Callable[[], Any] = lambda: None
) -> Callable[[Any], Any]:
    """Return the change of a function that writes: it does nothing, and notes ``what``, if it would write fake tensors.

    Args:
        note: Receives the sentence.
        what: What is not done, such as "torch.save writes nothing".
        looks_at: From the arguments to what is looked at for fake tensors; None leaves out every call.
        answer: Makes what the function returns then.
    """

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            if looks_at is not None and not holds_fake(looks_at(*args, **kwargs)):
                return own(*args, **kwargs)
            note(f"{what}: tensors of a simulated run have no values.")
            return answer()

        return write

    return change


def _first(*args: Any, **kwargs: Any) -> Any:
    """Return what a function is told to write: its first argument, whatever the name of it."""
    return args[0] if args else list(kwargs.values())


def _none() -> None: ...


def _nothing_awaited() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


_SHARDED = "torch.distributed.checkpoint"
_FUNCTIONS: dict[str, dict[str, tuple[str, Callable[[], Any]]]] = {
    f"{_SHARDED}.state_dict_saver": {
        **dict.fromkeys(("save", "save_state_dict"), (f"{_SHARDED}.{{}} writes nothing", _none)),
        "async_save": (f"{_SHARDED}.{{}} writes nothing", _nothing_awaited),
    },
    f"{_SHARDED}.state_dict_loader": dict.fromkeys(
        ("load", "load_state_dict"), (f"{_SHARDED}.{{}} reads nothing", _none)
    ),
}
"""By module and name: functions that write or read tensors, what is not done, and what makes their result."""

METHODS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers.modeling_utils": (("PreTrainedModel", "save_pretrained"),),
    "transformers.trainer": tuple(("Trainer", name) for name in ("save_model", "save_state", "create_model_card")),
    "trl.trainer.base_trainer": (("_BaseTrainer", "create_model_card"),),
    "peft.peft_model": (("PeftModel", "save_pretrained"),),
    "diffusers.models.modeling_utils": (("ModelMixin", "save_pretrained"),),
    "diffusers.pipelines.pipeline_utils": (("DiffusionPipeline", "save_pretrained"),),
    "diffusers.training_utils": (("EMAModel", "save_pretrained"),),
    "accelerate.accelerator": (("Accelerator", "save_model"),),
    "lightning.pytorch.trainer.trainer": (),
    "pytorch_lightning.trainer.trainer": (),
    "lightning.fabric.fabric": (("Fabric", "save"),),
    "sentence_transformers.SentenceTransformer": (("SentenceTransformer", "save_pretrained"),),
}
"""Methods that write a model or a checkpoint, and may remove older ones."""

CHECKPOINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers.trainer": (("Trainer", "_save_checkpoint"),),
    "accelerate.accelerator": (("Accelerator", "save_state"),),
    "lightning.pytorch.trainer.trainer": (("Trainer", "save_checkpoint"),),
    "pytorch_lightning.trainer.trainer": (("Trainer", "save_checkpoint"),),
}
"""Methods that write a checkpoint into a folder of ours, which
:mod:`actbench.tools.script.libraries.savedmodels` finds."""

_UPLOADS = (
    *("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder"),
    *("create_branch", "create_tag", "delete_file", "delete_folder", "delete_repo", "super_squash_history"),
)
_UPLOADED = "Nothing is uploaded to the Hugging Face hub"


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of the libraries that write models or send them away, by the names of their modules."""
    found: dict[str, Change] = {}
    for module, functions in _FUNCTIONS.items():
        found[module] = _functions(note, functions)
    for module, methods in METHODS.items():
        found[module] = methods_changed(methods, lambda name: left_out(note, f"{name} writes nothing"))
    found["huggingface_hub.hf_api"] = _hub(note)
    return found


def _functions(note: Note, functions: Mapping[str, tuple[str, Callable[[], Any]]]) -> Change:
    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for name, (what, answer) in functions.items():
                stack.enter_context(rebind(module, name, left_out(note, what.format(name), _first, answer)))
            return stack.pop_all()

    return change


def methods_changed(methods: tuple[tuple[str, str], ...], made: Callable[[str], Callable[[Any], Any]]) -> Change:
    """Return the change of methods of a module's classes; ``made`` returns that of a method, such as "Trainer.save"."""

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for owner, name in methods:
                if owner in vars(module):
                    stack.enter_context(changed(vars(module)[owner], name, made(f"{owner}.{name.lstrip('_')}")))
            return stack.pop_all()

    return change


def _hub(note: Note) -> Change:
    def sends_nothing(_: Any) -> Callable[..., _Sent]:
        def send(*args: Any, **kwargs: Any) -> _Sent:
            note(f"{_UPLOADED}: this run is simulated.")
            return _Sent()

        return send

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for name in _UPLOADS:  # functions of the module are bound methods of one object of the class
                stack.enter_context(rebind(module, name, sends_nothing))
                stack.enter_context(changed(module.HfApi, name, sends_nothing))
            return stack.pop_all()

    return change


class _Sent(str):
    """What the hub would answer: an empty address, with the attributes that scripts read."""

    repo_id = commit_url = oid = pr_url = ""
