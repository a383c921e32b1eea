"""Weights that a script loads: the model is built from its config, and no byte of its weights is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from actbench.errors import MeasurementError, ModelError
from actbench.simulator.places import is_card
from actbench.tools.script.libraries import shapes
from actbench.tools.script.libraries.importpatches import Change, changed, rebind
from actbench.workload.names import find_preset

Note = Callable[[str], None]

_UNREAD = "no weights are read: models that are loaded get their shapes from their configs."


class NotThereError(ModelError, OSError):
    """A model is neither a folder, nor in the cache, nor among the shipped configs."""


class PlaceholderStateDict(dict[str, Any]):
    """Stands for the state dict of a checkpoint that was not read; each module accepts it."""


@contextmanager
def no_downloads(note: Note) -> Iterator[None]:
    """Inside the block, let ``torch.hub`` download no weights, and modules accept weights that were not read.

    A file that is in torch's cache is read as torch reads it: in a fake tensor mode, without its bytes.
    """

    def fetching(own: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(url: str, model_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            place = model_dir or os.path.join(torch.hub.get_dir(), "checkpoints")
            if os.path.exists(os.path.join(place, kwargs.get("file_name") or os.path.basename(url))):
                return own(url, model_dir, *args, **kwargs)
            note(f"torch.hub: {_UNREAD}")
            return PlaceholderStateDict()

        return fetch

    def taking(own: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                _IncompatibleKeys([], [])
                if isinstance(state_dict, PlaceholderStateDict)
                else own(self, state_dict, *args, **kwargs)
            )

        return load_state_dict

    with rebind(torch.hub, "load_state_dict_from_url", fetching), changed(nn.Module, "load_state_dict", taking):
        yield


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of libraries that load weights, by the names of their modules."""
    return {
        "transformers.utils.hub": lambda module: rebind(module, "resolve_revision", _unresolved),
        "transformers.utils.peft_utils": lambda module: rebind(module, "find_adapter_config_file", _only_local),
        "transformers.configuration_utils": _configs(note),
        "transformers.generation.configuration_utils": _generation,
        "transformers.modeling_utils": _models(note),
        "peft.utils.save_and_load": _adapters(note),
        "timm.models._builder": lambda module: rebind(module, "load_pretrained", _nothing(note, "timm")),
        "diffusers.models.modeling_utils": _diffusers(note),
    }


def _unresolved(_: Any) -> Callable[..., Any]:
    """Ask no network which commit a branch is at."""
    return lambda path, revision=None, **options: revision


def _only_local(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: own(*args, **{**options, "local_files_only": True})


def _configs(note: Note) -> Change:
    def reading(own: Callable[..., Any]) -> Callable[..., Any]:
        def get_config_dict(cls: Any, name: Any, **options: Any) -> Any:
            if os.path.exists(name) or options.get("gguf_file"):
                return own(cls, name, **options)
            try:
                return own(cls, name, **{**options, "local_files_only": True})
            except OSError:
                if _prepares_data():
                    raise NotThereError(
                        f"the tokenizer, or what else prepares data, of {name!r} is neither a folder here nor in the "
                        f"cache of the hub, and data is prepared for real; fetch it with 'hf download {name}'"
                    ) from None
                return _preset(str(name), note), {key: options[key] for key in options if key not in _OF_FILES}

        return get_config_dict

    return lambda module: changed(module.PreTrainedConfig, "_get_config_dict", reading)


def _prepares_data() -> bool:
    """Return whether a tokenizer or the like asks for a config: without files of its own it would be an empty one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename).startswith(_OF_DATA):
            return True
        frame = frame.f_back
    return False


_OF_DATA = ("tokenization_", "processing_", "feature_extraction_", "image_processing_", "video_processing_")
"""How the names of transformers' files that prepare data begin."""


def _generation(module: ModuleType) -> AbstractContextManager[object]:
    """Let a model that is not there have transformers' own settings of generation, which training does not use."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            try:
                return own(cls, name, *args, **{**options, "local_files_only": True})
            except OSError:
                return cls()

        return from_pretrained

    return changed(module.GenerationConfig, "from_pretrained", change)


_OF_FILES = frozenset(
    (
        *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "trust_remote_code"),
        *("subfolder", "gguf_file", "user_agent"),
        *("_from_pipeline", "_from_auto", "_commit_hash", "_configuration_file"),
    )
)
"""Options about files, which do not reach the config."""


def _preset(name: str, note: Note) -> dict[str, Any]:
    """Return the config that actbench ships for a model; a NotThereError if it ships none."""
    if not name:
        raise NotThereError(
            "a config is asked for by an empty name, which is that of a model made from a config; name a folder, or a "
            "model of the hub"
        )
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        raise NotThereError(f"the folder {name!r} is not there, and this run saved no model in it")
    last = name.rpartition("/")[2]
    found = next((each for each in map(find_preset, (name, last, last.lower())) if each is not None), None)
    if found is None:
        raise NotThereError(
            f"the model {name!r} is neither a folder here nor in the cache of the hub, and actbench ships no config of "
            f"it; fetch its config with 'hf download {name} config.json'"
        )
    note(f"{name} is not in the cache: the config that actbench ships as {found.name} is used.")
    from actbench.workload.architectures import causal_class  # which imports transformers, as the script has

    config = dict(found.config)
    if found.task == "causal-lm" and (made := causal_class(config["model_type"])) is not None:
        config.setdefault("architectures", [made])  # by which TRL makes a reference model
    return config


def _models(note: Note) -> Change:
    def change(module: ModuleType) -> AbstractContextManager[object]:
        model = module.PreTrainedModel
        with ExitStack() as stack:
            stack.enter_context(changed(model, "from_pretrained", _from_shapes(note)))
            stack.enter_context(changed(model, "_load_pretrained_model", shapes.loading(module)))
            stack.enter_context(rebind(module, "_get_resolved_checkpoint_files", _files_if_there))
            stack.enter_context(rebind(module, "_get_dtype", _float_by_default))
            return stack.pop_all()

    return change


def _from_shapes(note: Note) -> Callable[[Any], Any]:
    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            if name is None:
                return own(cls, name, *args, **options)
            if options.get("gguf_file"):
                raise MeasurementError(
                    f"{cls.__name__}.from_pretrained(gguf_file={options['gguf_file']!r}): a model in a GGUF file has "
                    "no config to build it from; name a folder with a config.json"
                )
            note(f"transformers: {_UNREAD}")
            if "device_map" in options:
                options["device_map"] = _one_device(options["device_map"])
            return own(cls, name, *args, **{**options, "local_files_only": True})

        return from_pretrained

    return change


def _one_device(asked: Any) -> Any:
    """Return a map of the whole model to one device; a MeasurementError for a model in several places."""
    if isinstance(asked, str) and asked in ("auto", "balanced", "balanced_low_0", "sequential"):
        return {"": 0}
    if isinstance(asked, dict) and len({str(place) for place in asked.values()}) > 1:
        raise MeasurementError(
            f"device_map places parts of the model on {', '.join(sorted({str(each) for each in asked.values()}))}; a "
            'run simulates one card, with the whole model on it: take device_map={"": 0}'
        )
    places = list(asked.values()) if isinstance(asked, dict) else [asked]
    if any(isinstance(place, int | torch.device) or str(place).startswith("cuda") for place in places):
        is_card(places[0])
    return asked


def _files_if_there(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a folder or cache have a config and no weights. Only the header of a safetensors file is ever read."""

    def found(*args: Any, **options: Any) -> Any:
        try:
            files, sharded = own(*args, **options)
        except OSError:
            return None, None
        return (files, sharded) if files and all(str(file).endswith(".safetensors") for file in files) else (None, None)

    return found


def _float_by_default(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model whose config names no type, and whose weights are not there, be float32."""

    def get_dtype(dtype: Any, files: Any, config: Any, sharded: Any, *args: Any, **options: Any) -> Any:
        unknown = dtype == "auto" and not files and sharded is None and getattr(config, "dtype", None) is None
        return own(torch.float32 if unknown else dtype, files, config, sharded, *args, **options)

    return get_dtype


def _adapters(note: Note) -> Change:
    def taking(own: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(model: Any, state: Any, *args: Any, **options: Any) -> Any:
            return (
                _IncompatibleKeys([], [])
                if isinstance(state, PlaceholderStateDict)
                else own(model, state, *args, **options)
            )

        return set_state

    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            stack.enter_context(rebind(module, "load_peft_weights", _nothing(note, "peft")))
            stack.enter_context(rebind(module, "set_peft_model_state_dict", taking))
            return stack.pop_all()

    return change


def _nothing(note: Note, library: str) -> Callable[[Any], Any]:
    def change(_: Any) -> Callable[..., PlaceholderStateDict]:
        def load(*args: Any, **options: Any) -> PlaceholderStateDict:
            note(f"{library}: {_UNREAD}")
            return PlaceholderStateDict()

        return load

    return change


def _diffusers(note: Note) -> Change:
    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, name: Any, **options: Any) -> Any:
            if options.get("quantization_config") is not None:
                raise MeasurementError(
                    f"{cls.__name__}.from_pretrained(quantization_config=…) of diffusers is not simulated; load the "
                    "model without it"
                )
            places = {key: options[key] for key in ("subfolder", "cache_dir", "revision") if key in options}
            try:
                config = cls.load_config(name, local_files_only=True, **places)
            except OSError as error:
                raise NotThereError(
                    f"the model {name!r} is neither a folder here nor in the cache of the hub; fetch its configs with "
                    f"'hf download {name} --include \"*.json\"' ({error})"
                ) from None
            note(f"diffusers: {_UNREAD}")
            model = cls.from_config(config)
            nn.Module.to(model, options.get("torch_dtype") or options.get("dtype") or torch.float32)
            for path, part in model.named_modules():
                if set(path.split(".")) & set(cls._keep_in_fp32_modules or ()):
                    part.float()
            model.register_to_config(_name_or_path=str(name))
            model.eval()
            if options.get("device_map") is not None:
                _one_device(options["device_map"])
                model.to("cuda")
            info: dict[str, list[str]] = {
                key: [] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
            }
            return (model, info) if options.get("output_loading_info") else model

        return from_pretrained

    return lambda module: changed(module.ModelMixin, "from_pretrained", change)
