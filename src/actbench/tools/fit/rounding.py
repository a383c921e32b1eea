"""How many small updates bfloat16 weights lose, and what keeps them: for comments in the code of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.model.modelspecs import OPTIMIZER
from actbench.model.records import Case, Optimizer
from actbench.report.advice import needed_bytes
from actbench.scheme.base import OPTIMIZER_STATE, Scheme
from actbench.scheme.facets import LowPrecision, OwnOptimizer
from actbench.units import format_bytes

NEAREST: Final = 0.28
BY_CHANCE: Final = 0.65
"""Shares of the weights of a small Llama that change in ten steps of AdamW at a rate of 2e-5, with weights of bfloat16.

They are rounded to the nearest, or up or down by chance; ``tests/tools/fit/test_rounding.py`` counts them.
"""

_BY_CHANCE: dict[Optimizer, str] = {
    "adamw": "torchao.optim._AdamW({}, lr={rate}, bf16_stochastic_round=True)",
    "adamw-fused": "torchao.optim._AdamW({}, lr={rate}, bf16_stochastic_round=True)",
}
"""Optimizers of torchao that keep moments in the type of the weights as torch's do, as code."""


class Remedy(NamedTuple):
    """What keeps small updates of bfloat16 weights.

    Attributes:
        scheme: The scheme of the case with stochastic rounding; empty if it cannot round so.
        optimizer: The optimizer in place of the case's, as code with ``{}`` for the parameters; empty if there is none.
        float32: The case with weights of float32 under autocast, if there is room for them, or None.
        need: The bytes that the case itself needs.
        float32_bytes: About the most bytes that ``float32`` needs.
        limit: The bytes that it may use.
    """

    scheme: str
    optimizer: str
    float32: Case | None
    need: int
    float32_bytes: int
    limit: int


def remedy(case: Case, parts: Sequence[Scheme], measured: Measurement | None, rate: str) -> Remedy | None:
    """Return what keeps small updates; None if no trained weight is of bfloat16, or if updates are kept already."""
    types = case.dtype or (measured.dtype if measured else None) or ""
    is_half = types.startswith("bfloat16") or any(_is_of_bfloat16(part) for part in parts)
    if not is_half or any("parameters" in part.changes for part in parts):  # adapters are of float32
        return None
    spec = _by_chance(parts)
    if spec == case.scheme:
        return None
    is_free = not any(OPTIMIZER_STATE in part.claims for part in parts)
    is_own = case.optimizer is None and measured is not None and measured.optimizer != "AdamW"
    known = "" if is_own else _BY_CHANCE.get(case.optimizer or OPTIMIZER, "")
    optimizer = known.replace("{rate}", rate) if is_free else ""
    float32, needs, limit = _in_float32(case, parts, measured)
    need = needed_bytes(measured) if measured else 0
    return Remedy(spec, optimizer, float32, need, needs, limit)


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


def _in_float32(case: Case, parts: Sequence[Scheme], measured: Measurement | None) -> tuple[Case | None, int, int]:
    """Return the case with float32 weights under autocast, None without room for it, its bytes, and the limit.

    Everything takes at most twice the bytes, and operators read copies of the weights in bfloat16.
    """
    limit = measured.memory_limit_bytes if measured else None
    if measured is None or limit is None:
        return None, 0, 0
    needs = 2 * needed_bytes(measured) + measured.weights_bytes
    others = [part.spec for part in parts if "precision" not in part.changes]
    update = {"dtype": "float32", "autocast": "bfloat16", "scheme": "+".join(others) or "exact"}
    return (case.model_copy(update=update) if needs <= limit else None), needs, limit


def comments(kept: Remedy, rate: str, command: Callable[[Case], str]) -> list[str]:
    """Return comments on what bfloat16 weights lose of updates, and what keeps them.

    ``rate`` is the learning rate of the code, and ``command`` returns the command that measures a case.
    """
    lines = [
        "The weights are bfloat16, which rounds small updates away. An example: in ten steps of AdamW at a learning",
        (
            f"rate of {rate}, {100 * NEAREST:.0f} % of a small Llama's weights change. In float32 all do, "
            f"with stochastic rounding {100 * BY_CHANCE:.0f} %."
        ),
    ]
    if kept.optimizer or kept.scheme:
        lines.append("Lines that begin with 'instead' round stochastically, in the same bytes; they need torchao.")
    if kept.float32 is not None:
        most = f"at most {format_bytes(kept.float32_bytes)} of {format_bytes(kept.limit)}"
        lines += [
            "The same plan with float32 weights and autocast to bfloat16 loses no update and fits, too. It needs more",
            f"than this one's {format_bytes(kept.need)}, but {most}. To measure it:",
            f"  {command(kept.float32)}",
        ]
    elif not (kept.optimizer or kept.scheme):
        lines.append("Float32 weights with autocast to bfloat16 keep small updates, and need about twice the memory.")
    return [f"# {line}" for line in lines]
