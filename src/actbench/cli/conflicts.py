"""Rules for options that conflict: verbs refuse them, and a default yields to what is typed.

Options have the names of their verbs' parameters here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from actbench.errors import UsageError
from actbench.model.declared.schemes import shorthands

_QUESTIONS: Final = ("longest_sequence", "largest_batch", "which_card", "processes")
_OF_TRAINING: Final = (
    *("scheme", "cumulative", "no_exact", "packed", "optimizer", "ledger", "time_by"),
    *("timeline", "export_timeline", "export_snapshot", "export_trace", *(each.name for each in shorthands())),
)
_OF_SIMULATIONS: Final = frozenset({"torch_era", "no_workspaces", "gpus", "device_profile"})


@dataclass(frozen=True)
class Rule:
    """An option that is refused with others, whatever their values.

    Attributes:
        option: The option.
        others: The options that do not go with ``option``.
        why: The end of the message.
    """

    option: str
    others: Collection[str]
    why: str


RULES: Final = (
    Rule("verbose", ("quiet",), "which shows more: leave one out"),
    *(
        Rule(second.name, (first.name,), f"both are short for {second.scheme}: give one of them")
        for first, second in itertools.combinations(shorthands(), 2)
        if first.scheme == second.scheme
    ),
    Rule(
        "ledger",
        (
            *("output", "max_batch", "columns", "require_fit", "time_by", "force", "retry_failed"),
            *("timeline", "export_timeline", "export_flamegraph", "export_speedscope", "export_perfetto"),
            *("export_snapshot", "export_trace"),
        ),
        "which lists what is saved, and runs no step; --export-csv and the other exports work",
    ),
    *(Rule(one, _OF_TRAINING, "where nothing is trained: leave one out") for one in ("infer", "generate")),
    Rule(
        "script",
        (*_QUESTIONS, "measure", "max_gradient_error", "cluster"),
        "whose model and data are its own",
    ),
    Rule(
        "script",
        (
            *("model", "task", "sequence_length", "target_length", "image_size", "attention", "dtype", "autocast"),
            *("packed", "optimizer", "weights", "trust_remote_code"),
        ),
        "whose own lines and arguments set this; quote the script with its arguments: --script 'train.py --lr 3e-4'",
    ),
    *(Rule(one, _QUESTIONS[:place], "ask one at a time") for place, one in enumerate(_QUESTIONS)),
    *(Rule(one, ("measure",), "measure the plan that it finds by 'actbench measure'") for one in _QUESTIONS),
    *(Rule(one, ("max_gradient_error",), "which measures no errors of gradients") for one in _QUESTIONS),
    Rule("longest_sequence", ("packed",), "which finds the length itself"),
    Rule("which_card", ("memory_limit",), "where each card has its own memory"),
)
"""The conflicts; of several broken rules, the first is reported."""

NEEDED: Final[Mapping[str, str]] = {
    "top": "ledger",
    "everything": "ledger",
    "gpus_per_case": "cluster",
    "resources": "cluster",
}
"""What an option is refused without."""

_NAMES: Final = {"everything": "--all", "model": "MODEL"}


def check_conflicts(given: Mapping[str, Any]) -> None:
    """Check the options of a verb that are not at their defaults, by the names of its parameters.

    Raises:
        UsageError: Two do not go together, or one needs another.
    """
    for rule in RULES:
        if rule.option in given and (others := [name for name in given if name in rule.others]):
            raise UsageError(f"{_typed(others)}: not with {_typed([rule.option])}, {rule.why}")
    for option in dict.fromkeys(NEEDED.values()):
        if option not in given and (others := [name for name in given if NEEDED.get(name) == option]):
            raise UsageError(f"{_typed(others)}: only with {_typed([option])}, which is not given")


def _typed(names: Collection[str]) -> str:
    return " and ".join(_NAMES.get(name) or "--" + name.replace("_", "-") for name in names)


def _refused_with(option: str) -> Iterator[str]:
    for rule in RULES:
        if option == rule.option:
            yield from rule.others
        elif option in rule.others:
            yield rule.option


def conflicting_options(verb: str, typed: Mapping[str, Any], defaults: Collection[str]) -> set[str]:
    """Return the options of a verb that conflict with those that are typed.

    Args:
        verb: The name of the verb.
        typed: The values that the command line has, as written.
        defaults: The options that have a default.
    """
    given = {name for name, value in typed.items() if isinstance(value, str | bool | list)}  # an argument may be none
    found = {each for name in given for each in _refused_with(name)}
    found |= {name for name, needed in NEEDED.items() if needed not in given and needed not in defaults}
    if given & (_OF_SIMULATIONS - {"device_profile"}):
        found.add("meter")
    if "meter" in given and "simulated" not in _texts(typed["meter"]):
        found |= _OF_SIMULATIONS
    if verb == "run" and "device_profile" in given:  # elsewhere a profile waits for the meter that simulates it
        found.add("meter")
    if "scheme" in given and "exact" in _texts(typed["scheme"]):
        found.add("no_exact")
    return found


def _texts(value: Any) -> set[str]:
    return {name.strip() for text in (value if isinstance(value, list) else [value]) for name in text.split(",")}
