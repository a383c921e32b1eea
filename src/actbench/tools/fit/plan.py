"""A plan: what is changed around the blocks of a model, and what is done with each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actbench import scheme as schemes
from actbench.model.gradient import GRADIENTS
from actbench.model.records import Case
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.records import Training
from actbench.tools.fit.words import NUMBERED, rows_of

Around = frozenset[Choice]
"""Choices that act on a whole step: micro-batches, the loss, optimizer, precision, adapters."""

Action = frozenset[Choice]
"""Choices that act on one block together; empty to leave it as it is."""

AS_IT_IS: Action = frozenset()


@dataclass(frozen=True)
class Places:
    """Where choices of blocks act, to write a plan down.

    Attributes:
        blocks: Paths of the blocks, in the order of the forward pass.
        rest: Paths of the modules outside of blocks that a choice changes; empty where it acts on the whole model or
            not at all, and cannot be limited to the rest of it.
    """

    blocks: tuple[str, ...] = ()
    rest: Mapping[Choice, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is changed in a step.

    Attributes:
        around: What is changed around the blocks.
        actions: What is done with each block, in the order of the forward pass; empty if nothing is done with any.
        rest: What is done with the modules outside of the blocks.
    """

    around: Around = frozenset()
    actions: tuple[Action, ...] = ()
    rest: Action = frozenset()

    @property
    def choices(self) -> frozenset[Choice]:
        """All that is changed."""
        return self.around.union(self.rest, *self.actions)

    @property
    def is_uniform(self) -> bool:
        """Whether it does the same with all blocks."""
        return len(set(self.actions)) < 2

    def training(self, warnings: Sequence[str] = ()) -> Training:
        """Return how training differs from the exact step's, given the warnings of its simulation."""
        return training_of(self.choices, warnings)

    def case(self, exact: Case, places: Places) -> Case:
        """Return the case of the plan, from that of the exact step."""
        parts = [choice.name for choice in self.around if choice.scheme is not None]
        parts += [self._of_blocks(choice, places) for choice in self.rest.union(*self.actions)]
        parts += [] if exact.scheme == "exact" else [exact.scheme]
        spec = schemes.build("+".join(sorted(parts))).spec if parts else "exact"
        optimizer = next((choice.optimizer for choice in self.around if choice.optimizer is not None), exact.optimizer)
        return exact.model_copy(update={"scheme": spec, "optimizer": optimizer})

    def _of_blocks(self, choice: Choice, places: Places) -> str:
        """Return the specification of what acts on some blocks; what acts on all and on the rest needs no paths."""
        chosen = [path for path, action in zip(places.blocks, self.actions, strict=False) if choice in action]
        in_rest = choice in self.rest
        if len(chosen) == len(places.blocks) and (in_rest or "recomputation" in choice.changes):
            return choice.name
        paths = [*(places.rest.get(choice, ()) if in_rest else ()), *chosen]
        assert choice.scheme is not None
        return choice.scheme.model_copy(update={"only": ranges(paths)}).spec


def ranges(paths: Iterable[str]) -> tuple[str, ...]:
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
        for first, last in rows_of(sorted(numbers))
    )


def training_of(choices: Iterable[Choice], warnings: Sequence[str] = ()) -> Training:
    """Return how training with some choices differs, given the warnings of a simulation."""
    found = [choice.training_of(warnings) for choice in choices]
    return Training(
        trained="adapters" if any(each.trained == "adapters" for each in found) else "all",
        gradient=max((each.gradient for each in found), key=GRADIENTS.index, default="exact"),
        updates="other" if any(each.updates == "other" for each in found) else "same",
        precision="other" if any(each.precision == "other" for each in found) else "same",
    )
