"""The flags that several verbs share, and the recipe fields that they set.

They stand in groups: dataclasses whose fields are flags of a verb. A field with ``flags`` among its metadata, a
function that returns types by name, stands for the flags of plug-ins: its value has theirs by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from actbench.cli import completions
from actbench.cli.app import (
    BadParameter,
    argument,
    count_option,
    named,
    one_of,
    option,
    path_named,
    seconds_option,
    whole_number,
)
from actbench.cli.conflicts import check_conflicts
from actbench.cli.panels import place_of
from actbench.cli.printing import check_exports
from actbench.cli.schemeargs import checked_schemes
from actbench.errors import UsageError
from actbench.model.declared import device_named
from actbench.model.declared.schemes import shorthands
from actbench.model.imagesizes import image_size
from actbench.model.packedrows import packed_row
from actbench.model.records import Attention, Task, WeightsChoice, whole_name


def _float_type(text: str) -> str:
    return one_of(whole_name(text), ("float32", "bfloat16", "float16"))


def _image_size(text: str) -> int | str:
    """Return a size of images, as read by :func:`actbench.model.imagesizes.image_size`."""
    try:
        return image_size(text, whole_number) if "x" in text else whole_number(text)
    except ValueError as error:  # to which typer would add the name of its type
        raise BadParameter(str(error)) from None


def _packed(text: str) -> str:
    try:
        return packed_row(text)
    except ValueError as error:  # to which typer would add the name of its type
        raise BadParameter(str(error)) from None


def _half_type(text: str) -> str:
    return one_of(whole_name(text), ("bfloat16", "float16"))


MODELS = (
    "roberta-base, resnet50, torchvision:NAME, hf:ORG/NAME, NAME@key=value (a changed configuration), a local folder, "
    "or file.py:function"
)
ModelArgument = Annotated[str, argument("MODEL", f"{MODELS}.", named, autocompletion=completions.models)]
SchemeOption = Annotated[
    list[str] | None,
    option(
        "--scheme -s",
        "NAME[:VALUE][,key=value…], joined by +: fewbit:3, randomized:0.2, fewbit:3+checkpoint. Repeat for several "
        "rows. 'actbench schemes' lists them.",
        metavar="SPEC",
        autocompletion=completions.schemes,
    ),
]
TimeoutOption = Annotated[
    float,
    seconds_option("--timeout", "Seconds after which each case, and each trial of --max-batch, is stopped.", least=1),
]
TrustRecipeOption = Annotated[
    bool,
    option(
        "--trust-recipe",
        "Run code that a recipe file names: file.py:function, or the code of hub models.",
        only_typed=True,
    ),
]
RequireFitOption = Annotated[bool, option("--require-fit", "Exit with status 1 if memory is expected to run out.")]
ForceOption = Annotated[
    bool, option("--force", "Measure again the cases that the results file already holds.", only_typed=True)
]
RetryFailedOption = Annotated[
    bool, option("--retry-failed", "Measure again the cases that failed in the results file.")
]
OutputOption = Annotated[
    Path | None,
    option("--output -o", "Folder or file to write to.", metavar="PATH", parser=path_named, show_default=False),
]


def _shorthand_flags() -> dict[str, Any]:
    """Return the types of the flags that schemes declare, by name."""
    return {
        each.name: Annotated[str | None, option(each.flag, each.about, metavar=each.metavar)] for each in shorthands()
    }


@dataclass(frozen=True)
class SchemeFlags:
    """Flags: which schemes are applied."""

    scheme: SchemeOption = None
    short: Mapping[str, str | None] = field(default_factory=dict, metadata={"flags": _shorthand_flags})

    @property
    def schemes(self) -> list[str]:
        """The schemes; the short forms compose into one scheme, or are added to the given one.

        Raises:
            UsageError: A short form is given with several schemes.
            SpecError: A scheme is wrong, as far as is known without torch.
        """
        given = self.scheme or []
        short = [each.spec.replace("{}", value) for each in shorthands() if (value := self.short.get(each.name))]
        if short and len(given) > 1:
            *others, last = (each.flag for each in shorthands())
            raise UsageError(f"{', '.join(others)} and {last} join one scheme: give at most one --scheme with them")
        found = ["+".join([*given, *short])] if short else given
        return checked_schemes(found, self.scheme_flags)

    @property
    def scheme_flags(self) -> str:
        """The flags behind :attr:`schemes`, as a user types them."""
        given = ["--scheme"] if self.scheme else []
        return " and ".join([*given, *(each.flag for each in shorthands() if self.short.get(each.name))])


@dataclass(frozen=True)
class StepFlags:
    """Flags for the training step."""

    task: Annotated[
        Task | None,
        option(
            "--task",
            "masked-lm, causal-lm, seq2seq-lm, sequence-, token- or image-classification, semantic-segmentation, "
            "object-detection, speech-seq2seq and others (docs/models.md); auto (the default) is the task of the "
            "model's config.",
            metavar="TASK",
        ),
    ] = None
    sequence_length: Annotated[
        int | None, count_option("--sequence-length", "Tokens per sample (default 128).", show_default=False)
    ] = None
    target_length: Annotated[
        int | None,
        count_option(
            "--target-length",
            "Tokens that an encoder-decoder model writes (default: as many as it reads).",
            show_default=False,
        ),
    ] = None
    packed: Annotated[
        str | None,
        option(
            "--packed",
            "Lengths of the sequences that are packed into each row for a causal language model: 512,1024,300.",
            metavar="LENGTHS",
            parser=_packed,
            show_default=False,
        ),
    ] = None
    image_size: Annotated[
        str | None,
        option(
            "--image-size",
            "Edge of square images in pixels, or HEIGHTxWIDTH: 224, 512x1024.",
            metavar="SIZE",
            parser=_image_size,
            show_default=False,
        ),
    ] = None
    attention: Annotated[
        Attention | None, option("--attention", "Attention implementation of Hugging Face models.")
    ] = None
    dtype: Annotated[
        str | None,
        option(
            "--dtype",
            "Type of the weights and inputs: float32 (fp32), bfloat16 (bf16) or float16 (fp16). Without it "
            "file.py:function, a folder or a hub model keeps its own types; any other model is float32.",
            metavar="TYPE",
            parser=_float_type,
        ),
    ] = None
    autocast: Annotated[
        str | None,
        option(
            "--autocast",
            "bfloat16 (bf16) or float16 (fp16): train under torch.autocast.",
            metavar="TYPE",
            parser=_half_type,
        ),
    ] = None
    weights: Annotated[
        WeightsChoice | None,
        option(
            "--weights",
            "random (the default, except for convert) never uses the network; auto (of convert) takes the cache or the "
            "hub and, if neither answers within seconds, random weights with a warning; pretrained does or fails.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, option("--trust-remote-code", "Run the Python code that comes with a hub model.", only_typed=True)
    ] = False
    seed: Annotated[int | None, count_option("--seed", "Seed of weights, data and sketches.", least=0)] = None

    def given(self, names: Collection[str]) -> dict[str, Any]:
        """Return the given flags, as far as ``names`` has them."""
        flags = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        return {name: value for name, value in flags.items() if value is not None and value is not False}


@dataclass(frozen=True)
class ModelFlags(StepFlags, SchemeFlags):
    """Flags: which schemes are applied to what."""


def device_option(text: str, **details: Any) -> Any:
    """Return the option ``--device-profile``."""
    complete = completions.device_profiles
    return option("--device-profile", text, metavar="NAME|FILE", autocompletion=complete, parser=_device, **details)


def _device(text: str) -> str:
    """Return the name of a device profile; say on standard error which one another name stands for."""
    name = device_named(text)
    if name != text:
        print(f"--device-profile {text}: {name} is simulated", file=sys.stderr)
    return name


@dataclass(frozen=True)
class DeviceFlags:
    """Flags for the device and its memory limit."""

    max_batch: Annotated[
        bool, option("--max-batch", "Find the largest batch that fits, and prove that the next one does not.")
    ] = False
    memory_limit: Annotated[
        str | None,
        option(
            "--memory-limit",
            "Memory a step may use, such as 16GiB, taken as given (default: a simulated card's without 0.5 GiB for its "
            "CUDA context).",
            metavar="SIZE",
        ),
    ] = None
    device_profile: Annotated[
        str | None,
        device_option(
            "Device that the simulated meter simulates (default cuda-16gib): a name from actbench devices, or a .toml "
            "file that describes one."
        ),
    ] = None


@functools.cache
def _hints(group: type[Any]) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)  # compiles each, and many verbs share a group


def _parameters_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter for each flag of a group; the parameter itself if it is none."""
    group = parameter.annotation
    if not (is_dataclass(group) and isinstance(group, type)):
        return [parameter]
    hints = _hints(group)
    found = []
    for each in fields(group):
        if "flags" in each.metadata:
            plugged = each.metadata["flags"]().items()
            found += [parameter.replace(name=name, default=None, annotation=hint) for name, hint in plugged]
        else:
            found.append(parameter.replace(name=each.name, default=each.default, annotation=hints[each.name]))
    return found


def _made_of(group: type[Any], given: dict[str, Any]) -> Any:
    """Return a group of flags with its values from ``given``."""
    values: dict[str, Any] = {}
    for each in fields(group):
        if "flags" in each.metadata:  # a function that returns the flags that plug-ins bring
            values[each.name] = {name: given.pop(name) for name in each.metadata["flags"]()}
        else:
            values[each.name] = given.pop(each.name)
    return group(**values)


def expanded(verb: Callable[..., None]) -> Callable[..., None]:
    """Show each field of a dataclass of flags as a flag; the verb takes all parameters by name."""
    written = inspect.signature(verb, eval_str=True).parameters.values()
    kinds = {parameter.name: parameter.annotation for parameter in written}
    groups = {name: kind for name, kind in kinds.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters = [each for parameter in written for each in _parameters_of(parameter)]
    parameters.sort(key=lambda parameter: _place(parameter.annotation))
    defaults = {parameter.name: parameter.default for parameter in parameters}

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        check_exports(given)
        check_conflicts(
            {name: each for name, each in given.items() if each not in (None, []) and each != defaults[name]}
        )
        made = {name: _made_of(kind, given) for name, kind in groups.items()}
        verb(**given, **made)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _place(annotation: Any) -> tuple[int, int]:
    """Return the position of a parameter in the help page: arguments first, then flags in the order of their panels."""
    (details,) = getattr(annotation, "__metadata__", (None,))
    name = getattr(details, "default", None)  # typer puts the first name here until it reads the signature
    return place_of(name) if isinstance(name, str) else (-1, 0)
