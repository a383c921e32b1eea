"""Choices for a training step, and stacks of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from actbench import scheme as schemes
from actbench.errors import ConversionError, UsageError
from actbench.model.gradient import GRADIENTS
from actbench.model.measured import Measurement
from actbench.model.records import Case, Optimizer
from actbench.scheme.base import Change
from actbench.scheme.composed import refuse_spread
from actbench.tools.fit.choice import ADAPTS, Choice
from actbench.tools.fit.records import Training

OF_COMPUTING: frozenset[Change] = frozenset(("precision", "memory format"))
OF_SAMPLES: frozenset[Change] = frozenset(("saved tensors", "recomputation", "loss", "batch"))
OF_MODEL: frozenset[Change] = frozenset(("optimizer", "gradients"))
"""Changes of how operators compute; of what grows with the batch; of what grows with the model."""


Rung = tuple[str, tuple[Change, ...], tuple[Any, ...]]
"""What values of one scheme have in common."""

Stack = frozenset[Choice]
"""Choices that are tried together; empty for the exact step."""


def training_of(stack: Iterable[Choice], warnings: Sequence[str] = ()) -> Training:
    """Return how training with a whole stack differs, given the warnings of simulations of its choices."""
    found = [choice.training_of(warnings) for choice in stack]
    return Training(
        trained="adapters" if any(each.trained == "adapters" for each in found) else "all",
        gradient=max((each.gradient for each in found), key=GRADIENTS.index, default="exact"),
        updates="other" if any(each.updates == "other" for each in found) else "same",
        precision="other" if any(each.precision == "other" for each in found) else "same",
    )


def case_of(stack: Stack, exact: Case) -> Case:
    """Return the case of a stack, with its scheme in canonical form."""
    parts = [choice.name for choice in stack if choice.scheme is not None]
    spec = schemes.build("+".join(sorted(parts))).spec if parts else exact.scheme
    optimizer = next((choice.optimizer for choice in stack if choice.optimizer is not None), exact.optimizer)
    return exact.model_copy(update={"scheme": spec, "optimizer": optimizer})


def name_of(stack: Stack) -> str:
    """Return the name of a stack for messages."""
    return " + ".join(sorted(choice.name for choice in stack)) or "exact"


@dataclass(frozen=True)
class Choices:
    """All choices for a case, and which of them can be in one stack.

    Attributes:
        all: The choices; values of one scheme are next to each other.
        kept: What the model brings that none of them changes, each with why.
    """

    all: Sequence[Choice]
    kept: tuple[str, ...] = ()
    _together: dict[frozenset[Choice], bool] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def rungs(self) -> Mapping[Rung, list[Choice]]:
        """The values of each scheme, those that save more last."""
        found: dict[Rung, list[Choice]] = {}
        for choice in self.all:
            found.setdefault(rung_of(choice), []).append(choice)
        return found

    def suited(self, exact: Case, measured: Measurement) -> Choices:
        """Return the choices that go with the types and the optimizer that a model brings, seen in its exact step."""
        left, kept = list(self.all), list[str]()
        if exact.dtype is None and measured.dtype != "float32":
            left = [choice for choice in left if choice.changes != ("precision",)]
            kept.append(
                f"the model's parameters are {measured.dtype}: no other precision was tried; --dtype casts them"
            )
        if exact.optimizer is None and not _steps_as_adamw(measured):
            left = [choice for choice in left if choice.optimizer is None or not choice.same_updates]
            optimizer = f"the model's own optimizer, {measured.optimizer}"
            kept.append(f"of {optimizer}, no other implementation was tried; --optimizer names another")
        return Choices(left, tuple(kept))

    def together(self, stack: Stack, choice: Choice) -> bool:
        """Whether a choice can be added to a stack."""
        return choice not in stack and all(self._pair(choice, other) for other in stack)

    def stands(self, stack: Stack) -> bool:
        """Whether the choices of a stack stand together."""
        return all(self._pair(*pair) for pair in itertools.combinations(stack, 2))

    def from_on(self, choice: Choice) -> list[Choice]:
        """Return the values of a choice's scheme that save as much as the choice or more, itself first."""
        alike = self.rungs[rung_of(choice)]
        return alike[alike.index(choice) :]

    def strongest(self, changes: Set[Change]) -> list[Stack]:
        """Return stacks that may fit where hardly anything does, those that change least of the training first.

        They recompute as much as they can; beside that they train adapters, or save gradients and optimizer state.
        ``changes`` are those that lower the peak; others are left out, but for adapters.
        """
        last = [values[-1] for values in self.rungs.values()]
        most = [each for each in last if each.scheme is not None and changes >= set(each.changes)]
        start = Stack(next(([each] for each in most if each.changes == ("recomputation",)), ()))
        of_state = {each.training.updates: each for each in reversed(most) if each.changes == ("optimizer",)}
        gradients = [each for each in most if each.changes == ("gradients",)]
        adapters = [each for each in self.all if ADAPTS in each.changes]
        of_model = [(each, *gradients) for each in of_state.values()] or [tuple(gradients)]
        wanted = [(), *((each,) for each in adapters), *of_model]
        grown = [self._grown(start, each) for each in wanted]
        return list(dict.fromkeys(stack for stack in grown if stack))

    def _grown(self, stack: Stack, more: Iterable[Choice]) -> Stack:
        for choice in more:
            stack = stack | {choice} if self.together(stack, choice) else stack
        return stack

    def _pair(self, first: Choice, second: Choice) -> bool:
        pair = frozenset((first, second))
        if pair not in self._together:
            self._together[pair] = first.kind != second.kind and first.stands_with(second)
        return self._together[pair]


def choices_for(
    exact: Case,
    optimizers: Mapping[Optimizer, bool],
    *,
    only_exact: bool = False,
    names: Sequence[str] | None = None,
    has_bfloat16: bool = True,
) -> Choices:
    """Return the choices for the case of an exact step.

    ``optimizers`` may replace the case's, and say whether their updates are the same. With ``only_exact`` training must
    equal the exact step's, to rounding. ``names`` are specifications to choose from, None for what schemes propose.

    Raises:
        UsageError: A name is of no scheme, or of one that spreads the model over processes.
    """
    specs = names
    if specs is None:
        cards = {name: scheme.card for name, scheme in schemes.find_schemes().items()}
        specs = [name + value for name, card in cards.items() for value in card.variants_for(exact.batch_size)]
    found = [Choice(scheme.spec, scheme) for scheme in map(schemes.build, specs)]
    if names is not None:
        _refuse_spread(found)
    elif has_bfloat16:  # it costs what float16 costs, and needs no scaled loss
        found = [choice for choice in found if not choice.scales_loss]
    if exact.dtype not in (None, "float32") or exact.autocast is not None:  # chosen; another cast does nothing
        found = [choice for choice in found if choice.changes != ("precision",)]
    if exact.autocast == "float16":
        found = [choice for choice in found if not choice.takes_gradients]
    if not has_bfloat16:
        found = [choice for choice in found if not choice.needs_bfloat16]
    found += [Choice(f"--optimizer {name}", None, name, same) for name, same in optimizers.items()]
    return Choices([choice for choice in found if choice.training.is_exact or not only_exact])


def _steps_as_adamw(measured: Measurement) -> bool:
    """Whether a step's own optimizer is torch's AdamW with two moments, not fused, for each gradient."""
    moments = 2 * (measured.gradients_bytes or 0)
    operators = measured.estimated.by_operator if measured.estimated else ()
    is_fused = any(each.name.startswith("_fused_adam") for each in operators)
    return measured.optimizer == "AdamW" and moments <= (measured.optimizer_bytes or 0) < 1.5 * moments and not is_fused


def _refuse_spread(choices: Sequence[Choice]) -> None:
    try:
        for choice in choices:
            if choice.scheme is not None:
                refuse_spread(
                    choice.scheme,
                    f"--scheme {choice.name}: a fit is of one process",
                    "'actbench measure MODEL --scheme …' or 'actbench sweep' simulates stacks of it",
                )
    except ConversionError as error:
        raise UsageError(str(error)) from None


def rung_of(choice: Choice) -> Rung:
    """Return what the values of one scheme have in common, of which each next one saves more and takes longer.

    Lists say what a scheme works on, such as ``only=`` and ``functions=``: with others it is another thing.
    """
    lists = (value for value in vars(choice.scheme).values() if isinstance(value, tuple)) if choice.scheme else ()
    return choice.kind, choice.changes, tuple(lists)


def group_of(choice: Choice) -> str:
    """Return the group of a choice; stacks within one group are compared with each other."""
    changes = set(choice.changes)
    if ADAPTS in changes:
        return "parameters"
    if changes & OF_COMPUTING:
        return "precision"
    return "samples" if changes & OF_SAMPLES else "model"
