"""Hugging Face models. This file, and with it transformers, is imported when one of them is asked for."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from actbench.errors import ModelError
from actbench.records import Attention, Case, Task
from actbench.training import Batch, Loss, TrainingSetup
from actbench.workloads import batches, folder, hub, sequences, sources
from actbench.workloads.construct import construct
from actbench.workloads.names import ModelName
from actbench.workloads.optimizers import make_optimizer
from actbench.workloads.sources import Source

# Each task with the transformers class that loads it, in the order in which `auto` prefers them.
AUTO_CLASSES: dict[Task, str] = {
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


class HuggingFaceWorkload:
    """A Hugging Face model on random, full-length inputs, with the loss that the model itself computes.

    Args:
        name: A preset, a model of the hub or a local folder.
        case: Gives task, sizes, types, attention, weights policy and optimizer. A sequence length means nothing to
            vision models, an image size nothing to text models.

    Raises:
        ModelError: The config cannot be found or read, or the model does not do the task.
    """

    def __init__(self, name: ModelName, case: Case) -> None:
        self.case = case
        self.spec = case.model
        self.weights_origin = "random"
        self.warnings: tuple[str, ...] = ()
        self._source = sources.find(name, case)
        with quiet():
            config = _config(self._source, case.trust_remote_code)
            self.task = _task(config, case.task, self._source)
            self._class = _model_class(config, self.task, self._source, case.trust_remote_code)
            self._config = _settled(config, self.task, case.image_size)
        self._length = batches.sequence_length(self._config, case.sequence_length, self.spec) if self._is_text else 0

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Raises:
            ModelError: The model cannot be built, or its weights cannot be had or do not fit.
        """
        attention, self.warnings = self._attention()
        if not materialize:
            make = self._random(attention)
            self.weights_origin = hub.without_values(self.case.weights)
        else:
            weights = self._source.weights(self.case.weights)
            self.weights_origin = weights.origin
            self.warnings += weights.warnings
            make = self._loaded(attention, weights.files) if weights.files else self._random(attention)
        with quiet():
            module = self._checked(lambda: construct(make, materialize=materialize, seed=seed))
        if self.task == "causal-lm" and getattr(module, "loss_type", "") is None:
            vars(module)["loss_type"] = "ForCausalLM"  # transformers takes it too, but warns at the first step
        return TrainingSetup(
            module=module,
            loss=_loss(module),
            make_optimizer=make_optimizer(self.case.optimizer),
            autocast_dtype=getattr(torch, self.case.autocast) if self.case.autocast else None,
        )

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make random inputs with labels; the shapes are those of :mod:`actbench.workloads.batches`."""
        if self._is_text:
            return batches.text_batch(self._config, self.task, batch_size, self._length, seed)
        return batches.image_batch(self._config, batch_size, self._dtype, seed)

    @property
    def _is_text(self) -> bool:
        return self.task != "image-classification"

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.case.dtype)
        return dtype

    def _attention(self) -> tuple[Attention, tuple[str, ...]]:
        """Return the attention implementation to use, and a warning when it is not the one asked for."""
        if self.case.attention == "sdpa" and not self._class._supports_sdpa:
            has_attention = hasattr(self._config, "num_attention_heads")
            warning = f"{self.spec}: {self._class.__name__} has no sdpa attention; eager attention is used"
            return "eager", (warning,) if has_attention else ()
        return self.case.attention, ()

    def _random(self, attention: Attention) -> Callable[[], nn.Module]:
        config = copy.deepcopy(self._config)
        return lambda: self._class._from_config(config, attn_implementation=attention, dtype=self._dtype)

    def _loaded(self, attention: Attention, files: tuple[Any, ...]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            module, report = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._config),
                state_dict=folder.read_tensors(files),
                attn_implementation=attention,
                dtype=self._dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            self.warnings += _judge(module, report, self.spec, files)
            return module  # type: ignore[no-any-return]

        return make

    def _checked(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Run a constructor; whatever goes wrong there goes wrong because of a config that we did not write."""
        try:
            return build()
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"model {self.spec!r} cannot be built from its config: {type(error).__name__}: {error}"
            ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging and drawing progress bars inside the block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _config(source: Source, trusted: bool) -> Any:
    """Make the config object of a source, with the changes of the specification."""
    kind = source.config["model_type"]
    cls = _own_code(source, "AutoConfig") if trusted else None
    if cls is None and kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        code = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in source.config else ""
        raise ModelError(f"{source.place}: transformers knows no model_type {kind!r}{hint}{code}")
    cls = cls or CONFIG_MAPPING[kind]
    try:
        plain = cls.from_dict(source.config)
        return cls.from_dict({**source.config, **source.renamed_changes(plain)}) if source.changes else plain
    except ModelError:
        raise
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ModelError(f"{source.place} is not a valid {kind} config: {problem}") from error


def _tasks(config: Any) -> dict[Task, Any]:
    """Return the tasks that transformers has a class for with this config, each with the class."""
    found = {}
    for task, name in AUTO_CLASSES.items():
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found[task] = mapping[type(config)]
    return found


def _task(config: Any, requested: Task, source: Source) -> Task:
    """Return the task: the requested one, the preset's, what the config was saved for, or what its kind is for."""
    if requested != "auto":
        return requested
    if source.task != "auto":
        return source.task
    tasks = _tasks(config)
    for task, cls in tasks.items():
        if cls.__name__ in (config.architectures or ()):
            return task
    for task, auto_class in AUTO_CLASSES.items():
        if auto_class in source.config.get("auto_map", {}):
            return task
    if getattr(config, "is_encoder_decoder", False) and "seq2seq-lm" in tasks:
        return "seq2seq-lm"
    if "causal-lm" in tasks and "masked-lm" not in tasks:
        return "causal-lm"
    if not tasks:
        raise ModelError(f"model {source.spec!r}: a {config.model_type} model does none of {', '.join(AUTO_CLASSES)}")
    return next(task for task in AUTO_CLASSES if task in tasks)


def _model_class(config: Any, task: Task, source: Source, trusted: bool) -> Any:
    cls = _own_code(source, AUTO_CLASSES[task]) if trusted and task in AUTO_CLASSES else None
    tasks = _tasks(config)
    if cls is None and task not in tasks:
        able = ", ".join(tasks) or "none of the tasks"
        raise ModelError(f"--task {task}: a {config.model_type} model such as {source.spec} does {able}")
    return cls or tasks[task]


def _settled(config: Any, task: Task, image_size: int | None) -> Any:
    """Give a config what training on this task needs and pretraining did not."""
    if image_size is not None and hasattr(config, "image_size"):
        patch = getattr(config, "patch_size", None)
        if isinstance(patch, int) and image_size < patch:
            raise ModelError(f"--image-size {image_size}: one patch of this model alone is {patch} px wide")
        config.image_size = image_size
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = (batches.token_ids(getattr(config, "eos_token_id", None)) or [0])[0]
    if task == "causal-lm" and "masked-lm" in _tasks(config):
        config.is_decoder = True
    return config


def _own_code(source: Source, name: str) -> Any:
    """Return a class that the model's folder brings along and whose code the user trusts, or None."""
    reference = source.config.get("auto_map", {}).get(name)
    if reference is None or source.folder is None:
        return None
    try:
        return get_class_from_dynamic_module(reference, str(source.folder))
    except Exception as error:  # anything may go wrong in code that the model brings along
        raise ModelError(f"{source.place}: {reference} cannot be loaded: {type(error).__name__}: {error}") from error


def _judge(module: PreTrainedModel, report: dict[str, Any], spec: str, files: tuple[Any, ...]) -> tuple[str, ...]:
    """Return warnings on what a checkpoint lacks; raise if it is not one of this model."""
    missing, total = sorted(report["missing_keys"]), len(list(module.named_parameters()))
    if report["mismatched_keys"]:
        key, found, wanted = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"{files[0]} does not fit {spec}: {key} is {tuple(found)} there and {tuple(wanted)} in the model; "
            "use --weights random, or leave the config as it is"
        )
    if len(missing) >= total:
        raise ModelError(f"{files[0]} holds no weight of {spec}: nothing in it has the name of a parameter")
    if not missing:
        return ()
    named = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
    return (f"{spec}: {len(missing)} of {total} tensors are not in the weights and start at random: {named}",)


def _loss(module: nn.Module) -> Loss:
    """Return the loss that the model computes from its labels, without the key-value cache of generation."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        with sequences.one_a_row():
            value: Tensor = module(**batch, **options).loss
        return value

    return loss
