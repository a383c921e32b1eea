"""The transformers class of a model, and its task: those its config names, unless the user asks for others."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actbench.errors import ModelError, boundary
from actbench.model.records import Task
from actbench.workload.pictures import AMONG_TOKENS
from actbench.workload.sources import Source

# Each task with the transformers class that loads it. If several load a model's class, its task is the first of them.
AUTO_CLASSES: dict[Task, str] = {
    "image-text-contrastive": "AutoModelForZeroShotImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "depth-estimation": "AutoModelForDepthEstimation",
    "object-detection": "AutoModelForObjectDetection",
    "mask-generation": "AutoModelForMaskGeneration",
    "masked-image-modeling": "AutoModelForMaskedImageModeling",
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "next-sentence-prediction": "AutoModelForNextSentencePrediction",
    "pretraining": "AutoModelForPreTraining",
}
# Classes for images and text are usable if their kind of model is among these, classes for pretraining by their labels.
_CAPTIONING = ("blip", "git", "vision-encoder-decoder", *AMONG_TOKENS)
_PRETRAINING_LABELS = ("next_sentence_label", "sentence_order_label")
_PROMPTED = ("sam",)
_PRETRAINING = ("electra", "funnel", "vit_mae", "hiera")
# Inputs of the encoders of models that read more than text.
_SENSES = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "visual_embeds", "visual_feats")
_LONGEST_NAME = 80  # most characters that a message repeats of a name from a file


class Choice(NamedTuple):
    """What a model is built as: a task (never ``auto``), a class, and warnings about the choice."""

    task: Task
    cls: Any
    warnings: tuple[str, ...] = ()


def choose(config: Any, requested: Task, source: Source, *, trusted: bool) -> Choice:
    """Choose by the requested task, the preset's task, the class that the config names, or else the kind of model.

    ``trusted`` tells whether code of the model's folder may run.

    Raises:
        ModelError: The model does not do the task, or the config names no class that can be built and fed.
    """
    if requested not in ("auto", *AUTO_CLASSES):
        raise ModelError(f"--task {requested}: {source.spec} is a model of transformers and does {_able(config)}")
    task = requested if requested != "auto" else source.task
    own = _own_task(source) if trusted and task == "auto" else None
    if task != "auto" or own is not None:
        return _of_task(config, own or task, source, trusted)
    names = tuple(dict.fromkeys(source.config.get("architectures") or ()))
    if len(names) == 1:
        return _named(names[0], config, source)
    if names:
        listed = ", ".join(map(_short, names))
        raise ModelError(f"{source.place}: architectures names several classes, {listed}; {_advice(config)}")
    return _guessed(config, source)


def own_code(source: Source, name: str) -> Any:
    """Return a class from the code in the model's folder, which the user trusts, or None.

    Raises:
        ModelError: The code cannot be loaded.
    """
    reference = source.config.get("auto_map", {}).get(name)
    if reference is None or source.folder is None:
        return None
    with boundary(f"{source.place}: {reference} cannot be loaded", ModelError):
        return get_class_from_dynamic_module(reference, str(source.folder))


def tasks(config: Any) -> dict[Task, tuple[Any, ...]]:
    """Return the tasks for which transformers has classes for this config, with these classes."""
    found: dict[Task, tuple[Any, ...]] = {}
    for task, name in AUTO_CLASSES.items():
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            classes = mapping[type(config)]
            found[task] = classes if isinstance(classes, tuple) else (classes,)
    return found


def fed_tasks(config: Any) -> dict[Task, tuple[Any, ...]]:
    """Return the tasks of a config for which actbench can make batches, with their classes."""
    return {task: classes for task, classes in tasks(config).items() if _is_fed(task, classes[0], config)}


def check_fed(choice: Choice, config: Any, spec: str) -> None:
    """Raise a ModelError if actbench can make no batch for the class."""
    if not _is_fed(choice.task, choice.cls, config):
        raise ModelError(f"model {spec!r} is a {choice.cls.__name__}, {_unfed(config)}")


def check_inputs(choice: Choice, names: set[str], config: Any, spec: str, *, asked: bool) -> tuple[str, ...]:
    """Refuse a class whose forward pass lacks one of the inputs ``names`` of its task, or needs more than these.

    ``asked`` tells whether the user named the task, and so which parts of the model run.

    Returns:
        A warning if the model also takes images or audio, and gets only text.

    Raises:
        ModelError: The inputs do not fit, or the model gets only text although the user named no task.
    """
    cls, parameters = choice.cls, dict(inspect.signature(choice.cls.forward).parameters)
    parameters.pop("self", None)
    usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = {name for name, value in parameters.items() if value.kind in usual and value.default is value.empty}
    senses = [name for name in _SENSES if name in parameters]
    missing = senses if not names & set(senses) else []
    known = cls.__module__.startswith("transformers.")  # a model's own code may take anything by **kwargs
    problem = [f"takes no {name}" for name in sorted(names - set(parameters)) if known]
    problem += [f"wants {name}" for name in sorted(wanted - names)]
    problem += [f"reads {name}" for name in missing if not asked]
    if problem:
        raise ModelError(f"model {spec!r} is a {cls.__name__}, which {' and '.join(problem)}, {_unfed(config)}")
    return tuple(f"{spec}: {cls.__name__} is given no {name}: layers for these are not measured" for name in missing)


def _of_task(config: Any, task: Task, source: Source, trusted: bool) -> Choice:
    cls = own_code(source, AUTO_CLASSES[task]) if trusted and task in AUTO_CLASSES else None
    if cls is None:
        able = tasks(config)
        if task not in able:
            raise ModelError(f"--task {task}: a {config.model_type} model such as {source.spec} does {_able(config)}")
        cls = able[task][0]
    return Choice(task, cls)


def causal_class(model_type: str) -> str | None:
    """Return the name of the class of causal language models of a kind; None if there is none."""
    found: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return found


def _own_task(source: Source) -> Task | None:
    """Return the task of the class in the folder's code; of several tasks, the one whose class the config names."""
    own = source.config.get("auto_map", {})
    able: list[Task] = [task for task, auto_class in AUTO_CLASSES.items() if auto_class in own]
    names = source.config.get("architectures") or ()
    named = [task for task in able if str(own[AUTO_CLASSES[task]]).rpartition(".")[2] in names]
    return next(iter([*named, *able]), None)


def _named(name: str, config: Any, source: Source) -> Choice:
    """Choose the class of this name, if transformers has it for the config."""
    for task, classes in tasks(config).items():
        for cls in classes:
            if cls.__name__ != name:
                continue
            # transformers also lists decoders of text alone for this task
            if task != "image-text-to-text" or "pixel_values" in inspect.signature(cls.forward).parameters:
                return Choice(task, cls)
    place = f"{source.place}: architectures names {_short(name)}"
    cls = _library_class(name)
    if cls is None:
        code = "; it brings its own code: --trust-remote-code runs it" if "auto_map" in source.config else ""
        raise ModelError(
            f"{place}, a class that transformers {transformers.__version__} lacks{code}; {_advice(config)}"
        )
    if not isinstance(config, cls.config_class or ()):
        raise ModelError(f"{place}, which is not a class for its model_type, {config.model_type!r}; {_advice(config)}")
    base = getattr(transformers.AutoModel, "_model_mapping", {}).get(type(config), ())
    if cls in (base if isinstance(base, tuple) else (base,)):
        raise ModelError(f"{place}, which has no head and so no loss to train by; {_advice(config)}")
    raise ModelError(f"{place}, {_unfed(config)}")


def _library_class(name: str) -> Any:
    """Return the model class that transformers exports under an untrusted name, or None."""
    if name.startswith("_") or name not in dir(transformers):
        return None
    # the file of a class is imported here (_LazyModule), and fails where a library of its is missing
    try:
        found = getattr(transformers, name)
    except (AttributeError, ImportError, RuntimeError):
        return None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _guessed(config: Any, source: Source) -> Choice:
    """Choose the usual task of this kind of model, with a warning, for a config that names no class."""
    able = fed_tasks(config)
    if not able:
        raise ModelError(f"model {source.spec!r}: a {config.model_type} model does none of {', '.join(AUTO_CLASSES)}")
    task = next(iter(able))
    # decoders have classifiers too, but text is what they are trained for
    if task == "sequence-classification" and "causal-lm" in able and "masked-lm" not in able:
        task = "causal-lm"
    cls = able[task][0]
    others = f"; --task takes {', '.join(other for other in able if other != task)} too" if len(able) > 1 else ""
    warning = f"{source.place} names no architectures: it is built as {cls.__name__}, for {task}{others}"
    return Choice(task, cls, (warning,))


def _is_fed(task: Task, cls: Any, config: Any) -> bool:
    parameters = inspect.signature(cls.forward).parameters
    match task:
        case "image-text-contrastive":
            return {"input_ids", "pixel_values", "return_loss"} <= set(parameters)
        case "seq2seq-lm":
            return bool(getattr(config, "is_encoder_decoder", False))
        case "image-text-to-text":
            return config.model_type in _CAPTIONING
        case "mask-generation":
            return config.model_type in _PROMPTED
        case "pretraining":
            return config.model_type in _PRETRAINING or any(name in parameters for name in _PRETRAINING_LABELS)
    return True


def _able(config: Any) -> str:
    return ", ".join(fed_tasks(config)) or "none of the tasks"


def _advice(config: Any) -> str:
    able = fed_tasks(config)
    if not able:
        return f"there is no task for which a {config.model_type} model can be built; {_OWN}"
    return "say what to train: " + ", ".join(f"--task {task} ({classes[0].__name__})" for task, classes in able.items())


def _unfed(config: Any) -> str:
    able = ", ".join(fed_tasks(config))
    others = f"; or give --task: a {config.model_type} model does {able} as well" if able else ""
    return f"for which actbench cannot make batches: {_OWN}{others}"


def _short(name: str) -> str:
    return repr(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…")


_OWN = "write a function that builds it and makes its batches, and give file.py:function"
