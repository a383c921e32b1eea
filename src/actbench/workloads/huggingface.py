"""Hugging Face models; this file, and with it transformers, is imported when one of them is asked for."""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from actbench.errors import ModelError, boundary
from actbench.results.records import Attention, Built, Case, Task, brings_dtype
from actbench.setup import Batch, TrainingSetup
from actbench.workloads import architectures, batches, folder, losses, sources, text
from actbench.workloads.batches import image_part
from actbench.workloads.building import construct, float_type
from actbench.workloads.names import ModelName
from actbench.workloads.optimizers import make_optimizer
from actbench.workloads.overrides import missing_kernels
from actbench.workloads.sources import Source

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HuggingFaceWorkload:
    """A Hugging Face model on random, full-length inputs, with the loss that the model itself computes.

    Models for depth other than GLPN compute none, and get the mean absolute error. A sequence length means nothing to
    vision models, an image size nothing to text models.

    Raises:
        ModelError: The config cannot be found or read, the model does not do the task, or no batch can be made for the
            class that its config names.
    """

    def __init__(self, name: ModelName, case: Case) -> None:
        self.case = case
        self.spec = case.model
        self.weights_origin = "random"
        self.warnings: tuple[str, ...] = ()
        self._source = sources.find(name, case)
        with quiet():
            config = _config(self._source, case.trust_remote_code)
            choice = architectures.choose(config, case.task, self._source, trusted=case.trust_remote_code)
            architectures.check_fed(choice, config, self.spec)
            self.task, self._class = choice.task, choice.cls
            self._config = _settled(config, self.task, case.image_size)
            self._sizes = batches.sizes(self._config, self.task, self._class, case)
            asked, names = case.task != "auto", set(self.batch(1, seed=0))
            unread = architectures.check_inputs(choice, names, self._config, self.spec, asked=asked)
            self.warnings = self._found = choice.warnings + unread

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Raises:
            ModelError: The model cannot be built, or its weights cannot be had or do not fit.
        """
        attention, warned = self._attention()
        self.warnings = self._found + warned + self._cast()
        if not materialize:
            make = self._random(attention)
            self.weights_origin = folder.without_values(self.case.weights)
        else:
            weights = self._source.weights(self.case.weights)
            self.weights_origin = weights.origin
            self.warnings += weights.warnings
            make = self._loaded(attention, weights.files) if weights.files else self._random(attention)
        # Whatever goes wrong in a constructor goes wrong because of a config that we did not write.
        with quiet(), boundary(f"model {self.spec!r} cannot be built from its config", ModelError):
            module = construct(make, materialize=materialize, seed=seed)
        loss, own = losses.loss_of(module, self.task, self.spec, architectures.fed_tasks(self._config))
        self.warnings += own + self._slow(module)
        if self.task == "causal-lm" and getattr(module, "loss_type", "") is None:
            vars(module)["loss_type"] = "ForCausalLM"  # transformers takes it too, but warns at the first step
        return TrainingSetup(
            module=module,
            loss=loss,
            make_optimizer=make_optimizer(self.case.optimizer),
            autocast_dtype=getattr(torch, self.case.autocast) if self.case.autocast else None,
            **losses.in_parts(module, self.task),
            built=Built(
                model_class=type(module).__name__,
                task=self.task,
                sequence_length=self._sizes.length,
                image_size=self._sizes.image,
                audio_shape=self._sizes.audio,
            ),
        )

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make random inputs with labels; the shapes are those of :mod:`actbench.workloads.batches`."""
        return batches.make(self._config, self.task, self._class, self._sizes, batch_size, self._dtype, seed)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that is asked for, or else that of the config of a folder or the hub."""
        saved = getattr(self._config, "dtype", None) if self._source.folder and self.case.dtype is None else None
        return saved if saved in _TRAINABLE else float_type(self.case)

    def _attention(self) -> tuple[Attention, tuple[str, ...]]:
        """Return the attention implementation, and a warning when it is not the one asked for."""
        if self.case.attention == "sdpa" and not self._class._supports_sdpa:
            has_attention = hasattr(self._config, "num_attention_heads")
            warning = f"{self.spec}: {self._class.__name__} has no sdpa attention; eager attention is used"
            return "eager", (warning,) if has_attention else ()
        return self.case.attention, ()

    def _cast(self) -> tuple[str, ...]:
        """Return a warning where a folder of a bare name is cast to another type than its own."""
        saved = getattr(self._config, "dtype", None)
        if not self._source.local or brings_dtype(self.spec) or saved not in _TRAINABLE or saved == self._dtype:
            return ()
        types = f"its config says {saved}, it is built in {self._dtype}".replace("torch.", "")
        return (f"{self.spec}: {types}; ./{self.spec} keeps its own type, and --dtype names one",)

    def _asked(self, attention: Attention) -> Attention | None:
        """Return what to ask transformers for; with None a backbone without sdpa keeps its own attention."""
        return None if attention == "sdpa" and getattr(self._config, "backbone_config", None) else attention

    def _slow(self, module: nn.Module) -> tuple[str, ...]:
        """Return a warning where transformers runs reference code for want of kernels."""
        missing = " and ".join(missing_kernels(module))
        if not missing:
            return ()
        code = f"{self.spec}: transformers runs {type(module).__name__} by slow reference code"
        return (f"{code} ({missing} cannot be imported here): bytes and seconds are those of it, not of the kernels",)

    def _random(self, attention: Attention) -> Callable[[], nn.Module]:
        config = copy.deepcopy(self._config)
        return lambda: self._class._from_config(config, attn_implementation=self._asked(attention), dtype=self._dtype)

    def _loaded(self, attention: Attention, files: tuple[Any, ...]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            module, report = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._config),
                state_dict=folder.read_tensors(files),
                attn_implementation=self._asked(attention),
                dtype=self._dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            self.warnings += _judge(module, report, self.spec, files)
            return module  # type: ignore[no-any-return]

        return make


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
    cls = architectures.own_code(source, "AutoConfig") if trusted else None
    if cls is None and kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        code = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in source.config else ""
        raise ModelError(f"{source.place}: transformers knows no model_type {kind!r}{hint}{code}")
    cls = cls or CONFIG_MAPPING[kind]
    with boundary(f"{source.place} is not a valid {kind} config", ModelError):
        plain = cls.from_dict(source.config)
        return cls.from_dict({**source.config, **source.renamed_changes(plain)}) if source.changes else plain


def _settled(config: Any, task: Task, image_size: int | None) -> Any:
    """Set what training on this task needs of a config and pretraining did not."""
    _set_image_size(image_part(config), image_size)
    if task == "sequence-classification":
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = (text.special_ids(config, "eos_token_id") or [0])[0]
        if config.problem_type is None and config.num_labels > 1:
            config.problem_type = "single_label_classification"  # as the labels have it: DeBERTa reads them else
    if task == "causal-lm" and "masked-lm" in architectures.tasks(config):
        config.is_decoder = True
    return config


def _set_image_size(part: Any, requested: int | None) -> None:
    found = getattr(part, "image_size", None)
    if requested is None or found is None:
        return
    patch = getattr(part, "patch_size", None)
    if isinstance(patch, int) and requested < patch:
        raise ModelError(f"--image-size {requested}: one patch of this model alone is {patch} px wide")
    part.image_size = requested if isinstance(found, int) else type(found)((requested, requested))


def _judge(module: PreTrainedModel, report: dict[str, Any], spec: str, files: tuple[Any, ...]) -> tuple[str, ...]:
    """Return warnings on what a checkpoint lacks; a ModelError if it is not of this model."""
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
