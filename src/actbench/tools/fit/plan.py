"""A plan: what is changed around the blocks of a model, and what is done with each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actbench import scheme as schemes
from actbench.model.records import Case
from actbench.tools.fit.candidate import AS_IT_IS, Action, Candidate, training_of
from actbench.tools.fit.describe import NUMBERED, ranges_of
from actbench.tools.fit.records import Training


@dataclass(frozen=True)
class Places:
    """Where candidates act in a model, to write a plan down.

    Attributes:
        blocks: Paths of the blocks, in the order of the forward pass.
        rest: Paths of the modules outside of blocks that a candidate changes; empty where it acts on the whole model or
            not at all, and cannot be limited to the rest of it.
    """

    blocks: tuple[str, ...] = ()
    rest: Mapping[Candidate, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is changed in a step.

    Attributes:
        around: What is changed around the blocks.
        actions: What is done with each block, in the order of the forward pass; empty if nothing is done with any.
        rest: What is done with the modules outside of the blocks.
        peak: The bytes that its parts add up to; NaN if it was not solved for.
        seconds: The time that they add up to.
    """

    around: Action = AS_IT_IS
    actions: tuple[Action, ...] = ()
    rest: Action = AS_IT_IS
    peak: float = field(default=math.nan, compare=False)
    seconds: float = field(default=math.nan, compare=False)

    @property
    def candidates(self) -> Action:
        """All that is changed."""
        return self.around.union(self.rest, *self.actions)

    @property
    def is_uniform(self) -> bool:
        """Whether it does the same with all blocks."""
        return len(set(self.actions)) < 2

    def training(self, warnings: Sequence[str] = ()) -> Training:
        """Return how training differs from the exact step's, given the warnings of its simulation."""
        return training_of(self.candidates, warnings)

    def case(self, exact: Case, places: Places) -> Case:
        """Return the case of the plan, from that of the exact step."""
        parts = [each.name for each in self.around if each.scheme is not None]
        parts += [self._spec(each, places) for each in self.rest.union(*self.actions)]
        parts += [] if exact.scheme == "exact" else [exact.scheme]
        spec = schemes.build("+".join(sorted(parts))).spec if parts else "exact"
        optimizer = next((each.optimizer for each in self.around if each.optimizer is not None), exact.optimizer)
        return exact.model_copy(update={"scheme": spec, "optimizer": optimizer})

    def _spec(self, candidate: Candidate, places: Places) -> str:
        """Return the specification of what acts on some blocks; what acts on all and on the rest needs no paths."""
        chosen = [path for path, action in zip(places.blocks, self.actions, strict=False) if candidate in action]
        in_rest = candidate in self.rest
        if len(chosen) == len(places.blocks) and (in_rest or candidate.recomputes):
            return candidate.name
        paths = [*(places.rest.get(candidate, ()) if in_rest else ()), *chosen]
        assert candidate.scheme is not None
        return candidate.scheme.model_copy(update={"only": patterns_of(paths)}).spec


def patterns_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of ``only=`` for paths: numbers in a row become a range, as in ``layers.[0-5]``."""
    found: dict[tuple[str, str], list[int]] = {}
    others = []
    for path in paths:
        if matched := NUMBERED.fullmatch(path):
            found.setdefault((matched[1], matched[3]), []).append(int(matched[2]))
        else:
            others.append(path)
    return tuple(others) + tuple(
        f"{before}{first if first == last else f'[{first}-{last}]'}{after}"
        for (before, after), numbers in found.items()
        for first, last in ranges_of(sorted(numbers))
    )
