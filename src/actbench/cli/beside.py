"""Which options a verb refuses beside others, so that a default of one gives way to another that is typed.

Options have the names of their verbs' parameters here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

_QUESTIONS: Final = frozenset({"longest_sequence", "largest_batch", "which_card", "processes"})
_ERRORS: Final = frozenset({"measure", "max_gradient_error"})
_OF_SIMULATIONS: Final = frozenset({"torch_era", "no_workspaces", "gpus", "device_profile"})
_OF_MODELS: Final = frozenset(
    {
        *("task", "sequence_length", "target_length", "image_size", "attention", "dtype", "autocast", "optimizer"),
        *("packed", "weights", "trust_remote_code", "cluster"),
    }
)

REFUSED: Final[Mapping[str, Collection[str]]] = {
    "quiet": {"verbose"},
    "verbose": {"quiet"},
    "gelu_bits": {"activation_bits"},
    "activation_bits": {"gelu_bits"},
    "model": {"script"},
    "script": _OF_MODELS | _QUESTIONS | _ERRORS,
    "ledger": {
        *("output", "max_batch", "columns", "require_fit", "time_by", "timeline"),
        *("export_timeline", "export_snapshot"),
    },
    **{question: _QUESTIONS - {question} | _ERRORS for question in _QUESTIONS},
    "processes": _QUESTIONS - {"processes"} | _ERRORS | {"base"},
    "which_card": _QUESTIONS - {"which_card"} | _ERRORS | {"memory_limit"},
    "measure": _QUESTIONS,
    "max_gradient_error": _QUESTIONS,
    "torch_era": {"meter"},
    "no_workspaces": {"meter"},
    "gpus": {"meter"},
}
"""What is refused beside an option, whatever their values."""

NEEDED: Final[Mapping[str, str]] = {
    "top": "ledger",
    "everything": "ledger",
    "gpus_per_case": "cluster",
    "resources": "cluster",
}
"""What an option is refused without."""


def refused_beside(verb: str, typed: Mapping[str, Any], defaults: Collection[str]) -> set[str]:
    """Return the options of a verb that it refuses beside those that are typed.

    Args:
        verb: The name of the verb.
        typed: The values that the command line has, as written.
        defaults: The options that have a default.
    """
    given = {name for name, value in typed.items() if isinstance(value, str | bool | list)}  # an argument may be none
    found = {each for name in given for each in REFUSED.get(name, ())}
    found |= {name for name, needed in NEEDED.items() if needed not in given and needed not in defaults}
    if "meter" in given and "simulated" not in _texts(typed["meter"]):
        found |= _OF_SIMULATIONS
    if verb == "run" and "device_profile" in given:  # elsewhere a profile waits for the meter that simulates it
        found.add("meter")
    if "scheme" in given and "exact" in _texts(typed["scheme"]):
        found.add("no_exact")
    return found


def _texts(value: Any) -> set[str]:
    return {name.strip() for text in (value if isinstance(value, list) else [value]) for name in text.split(",")}
