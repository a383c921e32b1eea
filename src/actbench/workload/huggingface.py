"""Hugging Face models; this file imports transformers, so it is imported only for such a model."""

from __future__ import annotations

import copy
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from actbench.errors import ModelError, boundary
from actbench.model.imagesizes import ImageSize, edges
from actbench.model.modelspecs import brings_dtype
from actbench.model.records import Attention, Built, Case, Task
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.simulator.overrides import missing_kernels
from actbench.workload import architectures, base, batches, folder, losses, narrow, sources, text
from actbench.workload.base import construct, float_type
from actbench.workload.batches import image_part
from actbench.workload.generation import generating
from actbench.workload.names import ModelName
from actbench.workload.sources import Source

_MOST_COUNTED: Final = (
    (re.compile(r"labels|classes"), 1_000_000),  # extreme classification has 670,000
    (re.compile(r"layer|block(?!_size)|stage|depth|expert|predict"), 100_000),
    (re.compile(r"(?:^|_)(?:num|n)_"), 10_000_000),
)
"""The most that an integer may be by its name; the first name that is found counts."""

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HuggingFaceWorkload(base.Workload):
    """A Hugging Face model on random, full-length inputs, with the loss that the model itself computes.

    Depth models other than GLPN compute no loss, and get the mean absolute error. Vision models ignore the sequence
    length, text models the image size.

    Raises:
        ModelError: The config cannot be found or read, the model does not do the task, or actbench can make no batch
            for the class that its config names.
    """

    def __init__(self, name: ModelName, case: Case) -> None:
        self.case = case
        self.spec = case.model
        self._source = sources.find_source(name, case)
        with quiet():
            config = _config(self._source, case.trust_remote_code)
            choice = architectures.choose(config, case.task, self._source, trusted=case.trust_remote_code)
            architectures.check_fed(choice, config, self.spec)
            self.task, self._class = choice.task, choice.cls
            if case.generate is not None and self.task != "causal-lm":
                raise ModelError(f"--generate: {self.spec} does {self.task}; causal language models write text")
            self._config = _settled(config, self.task, case.image_size)
            self.longest = text.longest_sequence(self._config)
            self._sizes = batches.sizes(self._config, self.task, self._class, case)
            if case.generate is not None:
                whole = (self._sizes.length or 0) + case.generate
                text.sequence_length(self._config, whole, self.spec, flag="--prompt and --generate, together")
            asked, names = case.task != "auto", set(self.batch(1, seed=0)) - {losses.TARGET}
            unread = architectures.check_inputs(choice, names, self._config, self.spec, asked=asked)
            self.warnings = self._found = choice.warnings + unread

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Raises:
            ModelError: The model cannot be built, or its weights are not available or do not fit.
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
        # Any error of a constructor comes from the config, which actbench did not write.
        cannot = f"model {self.spec!r} cannot be built from its config"
        with quiet(), boundary(cannot, ModelError), _square(image_part(self._config), self.case.image_size):
            module = construct(make, materialize=materialize, seed=seed)
        loss, own = losses.loss_of(module, self.task, self.spec, architectures.fed_tasks(self._config))
        self.warnings += own + self._slow(module)
        if self.task == "causal-lm" and getattr(module, "loss_type", "") is None:
            vars(module)["loss_type"] = "ForCausalLM"  # transformers chooses it too, with a warning
        built = Built(
            model_class=type(module).__name__,
            task=self.task,
            sequence_length=self._sizes.length,
            target_length=None if self._sizes.target == self._sizes.length else self._sizes.target,
            image_size=self._sizes.image,
            audio_shape=self._sizes.audio,
        )
        micro_batching = losses.in_parts(module, self.task)
        setup = base.setup_of(self.case, module, loss, micro_batching=micro_batching, built=built)
        return setup if self.case.generate is None else generating(self.case, setup)

    def narrowed(self, least: int) -> dict[str, Any]:
        """Return the changes of the config that make the model narrow; see :mod:`actbench.workload.narrow`."""
        return narrow.narrowed(self._config.to_dict(), least)

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make random inputs with labels; :mod:`actbench.workload.batches` has the shapes."""
        made = batches.make(self._config, self.task, self._class, self._sizes, batch_size, self._dtype, seed)
        return made if self.case.generate is None else {"input_ids": made["input_ids"]}

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the case, or else of the config of a folder or the hub."""
        saved = getattr(self._config, "dtype", None) if self._source.folder and self.case.dtype is None else None
        return saved if saved in _TRAINABLE else float_type(self.case)

    def _attention(self) -> tuple[Attention, tuple[str, ...]]:
        """Return the attention implementation, and a warning if it is not the requested one."""
        if self.case.attention == "sdpa" and not self._class._supports_sdpa:
            has_attention = hasattr(self._config, "num_attention_heads")
            warning = f"{self.spec}: {self._class.__name__} has no sdpa attention; eager attention is used"
            return "eager", (warning,) if has_attention else ()
        return self.case.attention, ()

    def _cast(self) -> tuple[str, ...]:
        """Return a warning if the model of a folder with a bare name is cast to another dtype than its own."""
        saved = getattr(self._config, "dtype", None)
        if not self._source.local or brings_dtype(self.spec) or saved not in _TRAINABLE or saved == self._dtype:
            return ()
        types = f"its config says {saved}, it is built in {self._dtype}".replace("torch.", "")
        return (f"{self.spec}: {types}; ./{self.spec} keeps its own type, and --dtype names one",)

    def _asked(self, attention: Attention) -> Attention | None:
        """Return the attention to ask transformers for; None lets a backbone without sdpa keep its own."""
        return None if attention == "sdpa" and getattr(self._config, "backbone_config", None) else attention

    def _slow(self, module: nn.Module) -> tuple[str, ...]:
        """Return a warning if transformers runs reference code because kernels are missing."""
        missing = " and ".join(missing_kernels(module))
        if not missing:
            return ()
        code = f"{self.spec}: transformers runs {type(module).__name__} by slow reference code"
        return (f"{code} ({missing} cannot be imported here): bytes and seconds are of this code, not of the kernels",)

    def _random(self, attention: Attention) -> Callable[[], nn.Module]:
        # _from_config writes the attention and the dtype into the config that it is given
        config = copy.deepcopy(self._config)
        apart = {**self._source.config, **self._source.changes}.get("tie_word_embeddings") is False

        def make() -> nn.Module:
            module = self._class._from_config(config, attn_implementation=self._asked(attention), dtype=self._dtype)
            head = module.get_output_embeddings() if apart else None
            if head is not None and head.weight is module.get_input_embeddings().weight:
                # newer versions tie each T5 that they make, and none that they load, such as FLAN's
                head.weight = nn.Parameter(head.weight.detach().clone())
            return module  # type: ignore[no-any-return]

        return make

    def _loaded(self, attention: Attention, files: tuple[Any, ...]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            module, report = self._class.from_pretrained(
                # no name: nothing is looked up in the cache or on the hub beside the tensors given
                None,
                config=copy.deepcopy(self._config),
                state_dict=folder.read_tensors(files),
                attn_implementation=self._asked(attention),
                dtype=self._dtype,
                # what does not fit is reported, and then refused in words of ours
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            self.warnings += _judge(module, report, self.spec, files)
            return module  # type: ignore[no-any-return]

        return make


def renamed(model: nn.Module, tensors: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of a model's, where transformers has written others.

    They are returned as they are for a model that is not of transformers.

    Raises:
        ModelError: transformers cannot load them into a model of this class and config.
    """
    if not isinstance(model, PreTrainedModel):
        return tensors
    cls: Any = type(model)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    with quiet(), boundary(f"{place} cannot be loaded as a {cls.__name__}", ModelError):
        loaded, report = cls.from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=dict(tensors),
            # the widest of the folder's types, so that no tensor is rounded
            dtype=functools.reduce(torch.promote_types, dtypes or {torch.float32}),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _refuse_unfit(report, place)
    return loaded.state_dict()  # type: ignore[no-any-return]


def _refuse_unfit(report: dict[str, Any], place: Path) -> None:
    """Raise a ModelError if transformers loaded some tensors of a model, but not all, or not all of the folder's."""
    for kind, problem in (
        ("missing", "has no tensor for"),
        ("unexpected", "has tensors that the model lacks:"),
        ("mismatched", "has another shape of"),
    ):
        keys = sorted(key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"])
        if keys:
            raise ModelError(f"{place} does not fit the model: it {problem} {keys[0]} ({len(keys)} in all)")


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
    """Make the config of a source, with the changes in the specification."""
    kind = source.config["model_type"]
    cls = architectures.own_code(source, "AutoConfig") if trusted else None
    if cls is None and kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        code = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in source.config else ""
        raise ModelError(f"{source.place}: transformers knows no model_type {kind!r}{hint}{code}")
    cls = cls or CONFIG_MAPPING[kind]
    check_counts({**source.config, **source.changes}, source.place)
    with boundary(f"{source.place} is not a valid {kind} config", ModelError):
        plain = cls.from_dict(source.config)
        return cls.from_dict({**source.config, **source.renamed_changes(plain)}) if source.changes else plain


def _settled(config: Any, task: Task, image_size: ImageSize | None) -> Any:
    """Set what this task needs in a config and pretraining did not."""
    _set_image_size(image_part(config), image_size)
    if task == "sequence-classification":
        # classifiers of decoders take several rows only with a padding token (GenericForSequenceClassification)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = (text.special_ids(config, "eos_token_id") or [0])[0]
        if config.problem_type is None and config.num_labels > 1:
            config.problem_type = "single_label_classification"  # our labels are; else DeBERTa reads their values
    # without it BertLMHeadModel and its like attend to later tokens
    if task == "causal-lm" and "masked-lm" in architectures.tasks(config):
        config.is_decoder = True
    return config


def _set_image_size(part: Any, requested: ImageSize | None) -> None:
    found = getattr(part, "image_size", None)
    if requested is None or found is None:
        return
    patch = getattr(part, "patch_size", None)
    if isinstance(patch, int) and min(edges(requested)) < patch:
        raise ModelError(f"--image-size {requested}: one patch of this model alone is {patch} px wide")
    is_square = isinstance(found, int) and isinstance(requested, int)
    part.image_size = requested if is_square else (list if isinstance(found, int) else type(found))(edges(requested))


@contextmanager
def _square(part: Any, requested: ImageSize | None) -> Iterator[None]:
    """Say that a model takes square images only where its constructor computes with the edge of a square."""
    try:
        yield
    except TypeError as error:
        if requested is None or not isinstance(part.image_size, list) or "'list'" not in str(error):
            raise
        raise ModelError(f"--image-size {requested}: this model takes square images only") from error


def _judge(module: PreTrainedModel, report: dict[str, Any], spec: str, files: tuple[Any, ...]) -> tuple[str, ...]:
    """Return warnings about tensors that a checkpoint lacks; a ModelError if it belongs to another model."""
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


def check_counts(config: Mapping[str, Any], place: str) -> None:
    """Check the counts in a config and in those inside it, before a constructor sees them.

    Other integers, such as sizes, are those of tensors; torch refuses what does not fit the memory.

    Raises:
        ModelError: One is larger than that of any model; ``place`` says where.
    """
    for name, value in _integers(config, ""):
        most = next((most for pattern, most in _MOST_COUNTED if pattern.search(name)), None)
        if most is not None and value > most:
            raise ModelError(f"{place}: {name} is {value:,}, and may be {most:,} at most; correct the config")


def _integers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, at any depth, with the names that they have there."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value
