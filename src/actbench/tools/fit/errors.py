"""Errors of the gradient: measured of each change alone, on a small model in the place of the planned one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actbench.machine import available_memory_bytes
from actbench.model.measured import Measurement, Outcome
from actbench.model.modelspecs import is_function
from actbench.model.records import Case, Failure
from actbench.tools.fit.costs import Blocks
from actbench.tools.fit.plan import Action, Candidate, Plan, training_of
from actbench.workload import load_workload
from actbench.workload.names import parse_model_name, with_changes

_ROWS, _TOKENS = 4, 64  # of a batch to measure on
_WIDTH = 128  # at least, of a narrower model
_GROUPS = 4  # of blocks in a row, the errors of which are measured together, where there is no copy
_SMALL_BYTES = 256 * 2**20  # of weights, which need no narrower model
_COPIES = 8  # of weights that a step with its exact gradient may need, in a larger type

Simulate = Callable[[Mapping[Case, Plan]], Iterable[tuple[Case, Outcome]]]
"""Simulates or measures the cases of plans and yields each with its outcome, except cases for which no time is left."""


@dataclass(frozen=True)
class Errors:
    """Squares of relative L2 errors of the gradient, infinite where they are unknown; what is exact has none.

    Attributes:
        of_blocks: Of an action on each block.
        of_rest: Of an action on the modules outside of blocks.
        around: Of a change around the blocks.
        base: Of what every plan has.
        measured_on: The model and the batch; empty if nothing was measured.
        unknown: Why errors are unknown, by the changes that have them.
        known: Whether errors were measured: what is inexact and not among them is then unknown, not exact.
    """

    of_blocks: Mapping[Action, Sequence[float]] = field(default_factory=dict)
    of_rest: Mapping[Action, float] = field(default_factory=dict)
    around: Mapping[Candidate, float] = field(default_factory=dict)
    base: float = 0.0
    measured_on: str = ""
    unknown: Mapping[str, str] = field(default_factory=dict)
    known: bool = False

    def outside(self, around: Iterable[Candidate], rest: Action) -> float:
        """Return the square of the error that comes from outside of the blocks."""
        of_around = (self.around.get(each, self._unmeasured(frozenset({each}))) for each in around)
        return self.base + self.of_rest.get(rest, self._unmeasured(rest)) + math.fsum(of_around)

    def of(self, plan: Plan) -> float:
        """Return the square of a plan's error: the sum of those of its parts."""
        of_blocks = (
            self.of_blocks[action][place] if action in self.of_blocks else self._unmeasured(action)
            for place, action in enumerate(plan.actions)
        )
        return self.outside(plan.around, plan.rest) + math.fsum(of_blocks)

    def _unmeasured(self, candidates: Action) -> float:
        """Return the square of the error of what was not measured: a survey drops changes, whose plans remain."""
        return math.inf if self.known and not training_of(candidates).has_exact_gradient else 0.0

    def remarks(self) -> list[str]:
        """Return sentences about where the errors come from, and which are unknown."""
        found = [f"errors of the gradient were measured on the CPU, of {self.measured_on}"] if self.measured_on else []
        why = [f"the error of {name} is unknown, so no plan has {name}: {each}" for name, each in self.unknown.items()]
        return found + why


@dataclass
class ErrorMeter:
    """Measures the errors of changes in a planned step, ``exact``, with the weights and the blocks of its model."""

    exact: Case
    weights_bytes: int
    blocks: Blocks
    measure: Simulate
    _case: Case | None = None
    _base: float = 0.0
    _unknown: dict[str, str] = field(default_factory=dict)

    def run(self, actions: Sequence[Action], rests: Sequence[Action], around: Sequence[Candidate]) -> Errors:
        """Measure the errors of changes that are not exact."""
        for case in self._stand_ins():
            unchanged = self._outcome(case, Plan())
            if isinstance(unchanged, Measurement):
                self._case, self._base = case, (unchanged.gradient_error or 0.0) ** 2
                break
        of_blocks = {action: self._of_blocks(action) for action in actions}
        of_rest = {}
        for rest in rests:
            if self.blocks.are_changed_with(rest):
                whole = self._of(Plan(frozenset(), tuple(rest for _ in self.blocks.part.blocks), rest))
                of_rest[rest] = max(0.0, whole - math.fsum(of_blocks[rest])) if math.isfinite(whole) else math.inf
            else:
                of_rest[rest] = self._of(Plan(rest=rest))
        of_around = {candidate: self._of(Plan(frozenset({candidate}))) for candidate in around}
        about = ""
        if self._case is not None:
            tokens = f" of {self._case.sequence_length} tokens" if self._case.sequence_length else ""
            about = f"{self._case.model} at batch {self._case.batch_size}{tokens}"
        return Errors(of_blocks, of_rest, of_around, self._base, about, self._unknown, known=True)

    def _of_blocks(self, action: Action) -> Sequence[float]:
        """Return the squares of the errors of an action on each block of the planned model.

        They are measured of each block of a copy, or else of some blocks in a row together, which then have equal
        shares. The error of all blocks together does not depend on their number: each has less of a longer model's.
        """
        count = len(self.blocks.part.blocks)
        size = 1 if self.blocks.copy else max(1, math.ceil(count / _GROUPS))
        found = []
        for start in range(0, count, size):
            end = min(start + size, count)
            chosen = tuple(action if start <= place < end else frozenset() for place in range(count))
            found += [self._of(Plan(frozenset(), chosen), idle=0.0) / (end - start)] * (end - start)
        if count and not 0 < math.fsum(found) < math.inf:  # none on a small model may be some on a large one
            return [math.inf] * len(self.blocks.paths)
        longer = [found[place] for place in self.blocks.places]
        return [each * (math.fsum(found) / (math.fsum(longer) or 1.0)) for each in longer]

    def _stand_ins(self) -> Iterator[Case]:
        """Yield cases to measure on, each to be tried if the one before cannot run: narrow, and as wide as it is."""
        own = self.exact.model_copy(
            update={
                "model": self.blocks.copy or self.exact.model,
                "meter": "cpu",
                "device_profile": None,
                "memory_limit_bytes": None,
                "gradient_quality": True,
                "autocast": None,
                "weights": "random" if self.blocks.copy else self.exact.weights,
                "dtype": None if is_function(self.exact.model) else "float32",
                "batch_size": min(self.exact.batch_size, _ROWS),
                "sequence_length": self.exact.sequence_length and min(self.exact.sequence_length, _TOKENS),
                "min_steps": 1,
                "min_seconds": 0.0,
                "warmup_steps": 0,
            }
        )
        if self.weights_bytes > _SMALL_BYTES and parse_model_name(own.model).kind in ("preset", "hub", "folder"):
            from actbench.workload.huggingface import HuggingFaceWorkload

            workload = load_workload(own)
            changes = workload.narrowed(_WIDTH) if isinstance(workload, HuggingFaceWorkload) else {}
            if changes:
                yield own.model_copy(update={"model": with_changes(own.model, changes), "weights": "random"})
        if _COPIES * self.weights_bytes <= (available_memory_bytes() or math.inf):
            yield own

    def _outcome(self, stand_in: Case, plan: Plan) -> Outcome | None:
        case = plan.case(stand_in, self.blocks.part)
        return next((outcome for _, outcome in self.measure({case: plan})), None)

    def _of(self, plan: Plan, idle: float = math.inf) -> float:
        """Return the square of the error of a plan, without that of what every plan has; infinite if it is unknown.

        ``idle`` is returned if the plan changes nothing.
        """
        found = self._outcome(self._case, plan) if self._case else None
        if isinstance(found, Measurement) and found.gradient_error is not None and math.isfinite(found.gradient_error):
            return max(0.0, found.gradient_error**2 - self._base)
        if isinstance(found, Failure) and found.reason == "nothing-converted":
            return idle
        name = "+".join(sorted(candidate.name for candidate in plan.candidates))
        why = "no small model to measure on can be built" if self._case is None else "there was no time to measure it"
        self._unknown[name] = getattr(found, "message", why)
        return math.inf
