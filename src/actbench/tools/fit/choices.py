"""What may be changed in a step: around its blocks, and in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from actbench import scheme as schemes
from actbench.errors import UsageError
from actbench.model.measured import Measurement
from actbench.model.records import Case, Optimizer
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import InParts, Periodic
from actbench.tools.fit.choice import ADAPTS, Choice
from actbench.tools.fit.given import refuse_several, refuse_untimed

_OF_BLOCKS: frozenset[Change] = frozenset(("saved tensors", "recomputation"))
_COMPUTING: frozenset[Change] = frozenset(("precision", "memory format", ADAPTS))
"""Changes of single blocks; changes with which blocks hold and take something else."""


@dataclass(frozen=True)
class Choices:
    """All that may be changed.

    Attributes:
        around: What is changed around the blocks: the loss, the optimizer, gradients.
        of_blocks: What may be done with one block and not with another.
        computing: What changes how all blocks compute: precision, memory format, adapters.
        in_parts: Micro-batches, each with their number, the fewest first.
        kept: What the model brings that none of them changes, each with why.
    """

    around: Sequence[Choice] = ()
    of_blocks: Sequence[Choice] = ()
    computing: Sequence[Choice] = ()
    in_parts: Sequence[tuple[int, Choice]] = ()
    kept: tuple[str, ...] = ()

    @property
    def all(self) -> list[Choice]:
        """Every choice."""
        return [*self.around, *self.of_blocks, *self.computing, *(choice for _, choice in self.in_parts)]

    @classmethod
    def sorted(cls, choices: Sequence[Choice]) -> Choices:
        """Sort choices by what they change."""
        schemes_of = {choice: choice.scheme for choice in choices if choice.scheme is not None}
        parts = {each: found.parts for each, scheme in schemes_of.items() if (found := scheme.facet(InParts))}
        periodic = {
            each for each, scheme in schemes_of.items() if (period := scheme.facet(Periodic)) and period.blocks > 1
        }
        blocks = [each for each in choices if set(each.changes) <= _OF_BLOCKS and each not in periodic]
        computing = [each for each in choices if not _COMPUTING.isdisjoint(each.changes)]
        left = [each for each in choices if each not in {*parts, *periodic, *blocks, *computing}]
        around = [each for each in left if _OF_BLOCKS.isdisjoint(each.changes)]  # else another value does one of both
        return cls(around, blocks, computing, sorted((count, each) for each, count in parts.items()))

    def suited(self, exact: Case, measured: Measurement) -> Choices:
        """Return the choices that go with the types and the optimizer that a model brings, seen in its exact step."""
        if exact.script is not None:  # whose own lines choose both
            return self
        computing, around, kept = list(self.computing), list(self.around), list[str]()
        if exact.dtype is None and measured.dtype != "float32":
            computing = [choice for choice in computing if choice.changes != ("precision",)]
            kept.append(
                f"the model's parameters are {measured.dtype}: no other precision was tried; --dtype casts them"
            )
        if exact.optimizer is None and not _steps_as_adamw(measured):
            around = [choice for choice in around if choice.optimizer is None or not choice.same_updates]
            optimizer = f"the model's own optimizer, {measured.optimizer}"
            kept.append(f"no other implementation of {optimizer}, was tried; --optimizer names another")
        return replace(self, computing=computing, around=around, kept=tuple(kept))


def choices_for(
    exact: Case,
    optimizers: Mapping[Optimizer, bool],
    *,
    only_exact: bool = False,
    names: Sequence[str] | None = None,
    limits_error: bool = False,
    has_bfloat16: bool = True,
    changes: Set[Change] | None = None,
) -> Choices:
    """Return the choices for the case of an exact step.

    ``optimizers`` may replace the case's, and say whether their updates are the same. With ``only_exact`` training must
    equal the exact step's, to rounding. ``names`` are specifications to choose from, None for what schemes propose,
    more of it with ``limits_error``: where the error of the gradient is limited, one of small error may be wanted.
    ``changes`` is what schemes may change; None for all.

    Raises:
        UsageError: A name is of no scheme, or of one that spreads the model over processes, or it says on which blocks
            a scheme acts.
    """
    specs = names
    if specs is None:
        cards = {name: scheme.card for name, scheme in schemes.find_schemes().items()}
        proposed = Card.variants_for if limits_error else Card.leading_for
        specs = [name + value for name, card in cards.items() for value in proposed(card, exact.batch_size)]
    built = [schemes.build(spec) for spec in specs]
    found = [Choice(scheme.spec, scheme) for scheme in built]
    if names is not None:
        for refuse in (_refuse_spread, _refuse_places, refuse_untimed):
            for scheme in built:
                refuse(scheme, f"--scheme {scheme.spec}")
    elif has_bfloat16:  # it costs what float16 costs, and needs no scaled loss
        found = [choice for choice in found if not choice.scales_loss]
    if exact.dtype not in (None, "float32") or exact.autocast is not None:  # chosen; another cast does nothing
        found = [choice for choice in found if choice.changes != ("precision",)]
    if exact.autocast == "float16":
        found = [choice for choice in found if not choice.takes_gradients]
    if not has_bfloat16:
        found = [choice for choice in found if not choice.needs_bfloat16]
    if exact.scheme != "exact":  # what always stands beside the plan
        base = Choice(exact.scheme, schemes.build(exact.scheme))
        found = [choice for choice in found if choice.name != base.name and choice.stands_with(base)]
    found += [Choice(f"--optimizer {name}", None, name, same) for name, same in optimizers.items()]
    found = [choice for choice in found if choice.training.is_exact or not only_exact]
    allowed = [choice for choice in found if changes is None or set(choice.changes) <= changes]
    return replace(Choices.sorted(allowed), kept=_kept(dict.fromkeys(each for each in found if each not in allowed)))


def _kept(left_out: Iterable[Choice]) -> tuple[str, ...]:
    """Return what is said of choices that a script leaves none."""
    kinds = sorted({choice.kind for choice in left_out})
    said = f"no plan has {', '.join(kinds)}: the script's own lines set what these change"
    return (said,) if kinds else ()


def _steps_as_adamw(measured: Measurement) -> bool:
    """Whether a step's own optimizer is torch's AdamW with two moments, not fused, for each gradient."""
    moments = 2 * (measured.gradients_bytes or 0)
    operators = measured.estimated.by_operator if measured.estimated else ()
    is_fused = any(each.name.startswith("_fused_adam") for each in operators)
    return measured.optimizer == "AdamW" and moments <= (measured.optimizer_bytes or 0) < 1.5 * moments and not is_fused


def _refuse_spread(scheme: Scheme, given: str) -> None:
    refuse_several(scheme, given, "'actbench measure MODEL --scheme …' or 'actbench sweep'")


def _refuse_places(scheme: Scheme, given: str) -> None:
    """Refuse what says on which blocks it acts: a plan says so itself."""
    if _OF_BLOCKS.isdisjoint(scheme.changes):
        return
    period = scheme.facet(Periodic)
    said = ["only="] if scheme.only else []
    said += ["every="] if period and period.blocks > 1 else []
    if said:
        raise UsageError(f"{given}: fit chooses the blocks itself; leave {' and '.join(said)} out")
