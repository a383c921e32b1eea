"""How many small updates bfloat16 weights lose, and what keeps them: for comments in the code of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.model.modelspecs import OPTIMIZER
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.scheme.base import OPTIMIZER_STATE, Scheme
from actbench.scheme.facets import LowPrecision, OwnOptimizer
from actbench.units import format_bytes

NEAREST: Final = 0.28
BY_CHANCE: Final = 0.65
"""Shares of the weights of a small Llama that change in ten steps of AdamW at a rate of 2e-5, with weights of bfloat16.

They are rounded to the nearest, or up or down by chance; ``tests/tools/fit/test_rounding.py`` counts them.
"""

RATE: Final = "2e-5"
"""The learning rate in code: usual in fine-tuning; users set their own."""

_ADAMW: Final = f"torchao.optim._AdamW({{}}, lr={RATE}, bf16_stochastic_round=True)"
"""An optimizer of torchao that keeps moments in the type of the weights as torch's do, as code."""


@dataclass(frozen=True)
class Remedy:
    """What keeps small updates of bfloat16 weights.

    Attributes:
        scheme: The scheme of the case with stochastic rounding; empty if it cannot round so.
        optimizer: The optimizer in place of the case's, as code with ``{}`` for the parameters; empty if there is none.
        comments: What the weights lose of updates, and what keeps them.
    """

    scheme: str = ""
    optimizer: str = ""
    comments: Sequence[str] = ()


def remedy(case: Case, parts: Sequence[Scheme], measured: Measurement, command: Callable[[Case], str]) -> Remedy:
    """Return what keeps small updates; nothing if no trained weight is of bfloat16, or if updates are kept already.

    ``command`` returns the command that measures a case.
    """
    types = case.dtype or measured.dtype or ""
    is_half = types.startswith("bfloat16") or any(_is_of_bfloat16(part) for part in parts)
    if not is_half or any("parameters" in part.changes for part in parts):  # adapters are of float32
        return Remedy()
    spec = _by_chance(parts)
    if spec == case.scheme:
        return Remedy()
    is_free = not any(OPTIMIZER_STATE in part.claims for part in parts)
    is_own = case.optimizer is None and measured.optimizer != "AdamW"
    is_adamw = not is_own and (case.optimizer or OPTIMIZER) in ("adamw", "adamw-fused")
    optimizer = _ADAMW if is_free and is_adamw else ""
    nearest, by_chance = f"{100 * NEAREST:.0f} %", f"with stochastic rounding {100 * BY_CHANCE:.0f} %"
    lines = [
        "The weights are bfloat16, which rounds small updates away. An example: in ten steps of AdamW at a learning",
        f"rate of {RATE}, {nearest} of a small Llama's weights change. In float32 all do, {by_chance}.",
    ]
    if optimizer or spec:
        lines.append("Lines that begin with 'instead' round stochastically, in the same bytes; they need torchao.")
    if in_float32 := _in_float32(case, parts, measured, command):
        lines += in_float32
    elif not (optimizer or spec):
        lines.append("Float32 weights with autocast to bfloat16 keep small updates, and need about twice the memory.")
    return Remedy(spec, optimizer, [f"# {line}" for line in lines])


def _by_chance(parts: Sequence[Scheme]) -> str:
    """Return the scheme with stochastic rounding in place of rounding to the nearest; empty if no part can do it."""
    if not any(_rounds(part) for part in parts):
        return ""
    update = {"bf16_stochastic_round": True}
    specs = [part.model_copy(update=update).spec if _rounds(part) else part.spec for part in parts]
    return schemes.build("+".join(specs)).spec


def _rounds(part: Scheme) -> bool:
    own = part.facet(OwnOptimizer)
    return own is not None and own.rounds_by_chance is not None


def _is_of_bfloat16(part: Scheme) -> bool:
    precision = part.facet(LowPrecision)
    return precision is not None and precision.of_weights and precision.dtype == "bfloat16"


def _in_float32(
    case: Case, parts: Sequence[Scheme], measured: Measurement, command: Callable[[Case], str]
) -> list[str]:
    """Return what is said of the case with float32 weights under autocast; nothing if there is no room for it.

    Everything takes at most twice the bytes, and operators read copies of the weights in bfloat16.
    """
    need, limit = needed_bytes(measured), measured.memory_limit_bytes
    most = 2 * need + measured.weights_bytes
    if limit is None or most > limit:
        return []
    others = [part.spec for part in parts if "precision" not in part.changes]
    update = {"dtype": "float32", "autocast": "bfloat16", "scheme": "+".join(others) or "exact"}
    at_most = f"at most {format_bytes(most)} of {format_bytes(limit)}"
    return [
        "The same plan with float32 weights and autocast to bfloat16 loses no update and fits, too. It needs more",
        f"than this one's {format_bytes(need)}, but {at_most}. To measure it:",
        f"  {command(case.model_copy(update=update))}",
    ]
