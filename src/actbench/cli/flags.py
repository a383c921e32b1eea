"""The flags that verbs share, and from flags to the fields of a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from actbench.cli.app import (
    ActivationBitsOption,
    AttentionOption,
    AutocastOption,
    BatchOption,
    CsvOption,
    DtypeOption,
    GeluBitsOption,
    HtmlOption,
    ImageOption,
    JsonOption,
    LinearOption,
    MarkdownOption,
    MaxBatchOption,
    MemoryLimitOption,
    MeterOption,
    OptimizerOption,
    ProfileOption,
    SchemeOption,
    SecondsOption,
    SeedOption,
    SequenceOption,
    StepsOption,
    TaskOption,
    TrustOption,
    WeightsOption,
)
from actbench.errors import SpecError, UsageError


@dataclass(frozen=True)
class SchemeFlags:
    """Which schemes are applied."""

    scheme: SchemeOption = None
    gelu_bits: GeluBitsOption = None
    activation_bits: ActivationBitsOption = None
    linear: LinearOption = None

    @property
    def schemes(self) -> list[str]:
        """The schemes, the short forms among them; see :func:`composed`."""
        return composed(self.scheme, self.gelu_bits, self.linear, self.activation_bits)

    @property
    def scheme_flags(self) -> str:
        """The flags that :attr:`schemes` come from, as they are typed; empty where none was given."""
        names = (field.name for field in fields(SchemeFlags) if getattr(self, field.name))
        return " and ".join("--" + name.replace("_", "-") for name in names)


@dataclass(frozen=True)
class CaseFlags(SchemeFlags):
    """Which schemes are applied to what, and how that is measured."""

    batch_size: BatchOption = None
    max_batch: MaxBatchOption = False
    memory_limit: MemoryLimitOption = None
    meter: MeterOption = None
    device_profile: ProfileOption = None
    task: TaskOption = None
    sequence_length: SequenceOption = None
    image_size: ImageOption = None
    attention: AttentionOption = None
    dtype: DtypeOption = None
    autocast: AutocastOption = None
    optimizer: OptimizerOption = None
    weights: WeightsOption = None
    trust_remote_code: TrustOption = False
    seed: SeedOption = None
    steps: StepsOption = None
    seconds: SecondsOption = None

    @property
    def workload(self) -> dict[str, Any]:
        """What is trained; see :func:`workload_flags`."""
        return workload_flags(vars(self))

    @property
    def measure(self) -> dict[str, Any]:
        """How to measure; see :func:`measure_flags`."""
        return measure_flags(vars(self))


@dataclass(frozen=True)
class ExportFlags:
    """Files to write results to."""

    export_markdown: MarkdownOption = None
    export_csv: CsvOption = None
    export_json: JsonOption = None
    export_html: HtmlOption = None

    @property
    def files(self) -> tuple[Path | None, ...]:
        """The files of Markdown, CSV, JSON and HTML."""
        return self.export_markdown, self.export_csv, self.export_json, self.export_html


def expanded(verb: Callable[..., None]) -> Callable[..., None]:
    """Show each field of a parameter that is a dataclass of flags as a flag of its own, in its place.

    Args:
        verb: Takes everything by name.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters = [
        each for parameter in inspect.signature(verb, eval_str=True).parameters.values() for each in _flags(parameter)
    ]

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        verb(**given, **made)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    group = parameter.annotation
    if not (is_dataclass(group) and isinstance(group, type)):
        return [parameter]
    hints = get_type_hints(group, include_extras=True)
    return [
        parameter.replace(name=field.name, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


@contextmanager
def schemes_from(place: str) -> Iterator[None]:
    """Say of a scheme that is refused in the block where it was written: a flag, or a recipe."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{place}: {error}") from None


_WORKLOAD = (
    "batch_size",
    "task",
    "sequence_length",
    "image_size",
    "attention",
    "dtype",
    "autocast",
    "optimizer",
    "weights",
)


def workload_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that say what is trained, those not given left out."""
    flags = {name: given[name] for name in _WORKLOAD if given[name] is not None}
    if given["trust_remote_code"]:
        flags["trust_remote_code"] = True
    return flags


def measure_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that say how to measure, those not given left out."""
    flags = {
        "meters": meters(given["meter"]),
        "device_profile": given["device_profile"],
        "memory_limit": given["memory_limit"],
        "largest_batch": True if given["max_batch"] else None,
        "seed": given["seed"],
        "min_steps": given["steps"],
        "min_seconds": given["seconds"],
    }
    if flags["device_profile"] is None and {"simulated", "cpu"} == set(flags["meters"] or ()):
        flags["device_profile"] = "cpu"  # an estimate of what is measured beside it
    return {name: value for name, value in flags.items() if value is not None}


def default_meter() -> str:
    """Return the meter of a model for which none is named: what runs on the best device of this machine."""
    from actbench.machine import gpu

    return "cuda" if gpu.find() else "simulated"


def meters(given: list[str] | None) -> list[str] | None:
    """Split ``simulated,cpu`` and repeated flags into one list."""
    return None if given is None else [name.strip() for text in given for name in text.split(",")]


def composed(
    scheme: list[str] | None, gelu_bits: str | None, linear: str | None, activation_bits: str | None = None
) -> list[str]:
    """Return the schemes that flags ask for; the short forms compose into one, or are added to the one that is given.

    Raises:
        UsageError: A short form stands beside several schemes, and it is not plain which one it should join; or there
            are two short forms of one scheme.
    """
    if gelu_bits is not None and activation_bits is not None:
        raise UsageError("--gelu-bits and --activation-bits are both short for fewbit: give one of them")
    short = [] if gelu_bits is None else [f"fewbit:{gelu_bits},functions=gelu"]
    short += [] if activation_bits is None else [f"fewbit:{activation_bits}"]
    short += [] if linear is None else [linear]
    if not short:
        return scheme or []
    if len(scheme or []) > 1:
        raise UsageError(
            "--gelu-bits, --activation-bits and --linear join one scheme: give at most one --scheme beside them"
        )
    return ["+".join([*(scheme or []), *short])]
