"""Candidates, what may be changed in a step, and plans, what is changed around its blocks and with each of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError, UsageError
from actbench.model.gradient import GRADIENTS
from actbench.model.measured import Measurement
from actbench.model.records import Case, Optimizer
from actbench.scheme.base import GRADIENTS as USES_GRADIENTS, Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.composed import Composed, refuse_spread
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import InParts, LowPrecision, Periodic
from actbench.tools.fit.describe import NUMBERED, ranges_of
from actbench.tools.fit.records import Training

ADAPTS: Change = "parameters"
"""The change of schemes that train other parameters than the exact step does."""

_OF_BLOCKS: frozenset[Change] = frozenset(("saved tensors", "recomputation"))
_COMPUTING: frozenset[Change] = frozenset(("precision", "memory format", ADAPTS))
"""Changes of single blocks; changes with which blocks hold and take something else."""


@dataclass(frozen=True)
class Candidate:
    """One thing to change in a step: a scheme, or the optimizer.

    Attributes:
        name: The specification of the scheme, or ``--optimizer NAME``.
        scheme: The scheme; None for an optimizer.
        optimizer: The optimizer; None for a scheme.
        same_updates: Whether the optimizer's updates equal those of the case's optimizer.
    """

    name: str
    scheme: Scheme | None = None
    optimizer: Optimizer | None = None
    same_updates: bool = True

    def __hash__(self) -> int:
        return hash(self.name)  # sets of candidates are compared often, and schemes have many fields

    @classmethod
    def of(cls, spec: str) -> Candidate:
        """Return the candidate of a specification."""
        return cls(spec, schemes.build(spec))

    @property
    def changes(self) -> tuple[Change, ...]:
        """What the candidate changes in a step."""
        return ("optimizer",) if self.scheme is None else self.scheme.changes

    @property
    def kind(self) -> str:
        """The name that all values of one scheme share: the scheme's, or the optimizer's."""
        return self.name if self.scheme is None else self.scheme.name

    @property
    def recomputes(self) -> bool:
        """Whether blocks run again in the backward pass."""
        return "recomputation" in self.changes

    @property
    def scales_loss(self) -> bool:
        """Whether it needs a scaled loss, or else gradients vanish."""
        return self._precision is not None and self._precision.scales_loss

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the device has to compute in bfloat16."""
        return self._precision is not None and self._precision.dtype == "bfloat16"

    @property
    def _precision(self) -> LowPrecision | None:
        return None if self.scheme is None else self.scheme.facet(LowPrecision)

    @property
    def takes_gradients(self) -> bool:
        """Whether it uses up the gradients before the backward pass ends."""
        return self.scheme is not None and USES_GRADIENTS in self.scheme.claims

    def training(self, warnings: Sequence[str] = ()) -> Training:
        """Return how training with this candidate alone differs, as far as the scheme and a simulation's warnings say.

        The parts of a batch have the gradient of the whole batch unless rows see each other; the scheme warns of that.
        """
        if self.scheme is None:
            return Training(updates="same" if self.same_updates else "other")
        changes, keeps_updates = self.changes, self.scheme.card.keeps_updates
        if keeps_updates is None:
            keeps_updates = "optimizer" not in changes
        gradient = "exact" if changes == ("precision",) else self.scheme.gradient
        if "batch" in changes and any(text.startswith(f"{self.name}: ") for text in warnings):
            gradient = "approximate"
        return Training(
            trained="adapters" if ADAPTS in changes else "all",
            gradient=gradient,
            updates="same" if keeps_updates else "other",
            precision="other" if "precision" in changes else "same",
        )

    @functools.cache  # noqa: B019 - the parts of plans are compared in pairs, the same ones for each setting
    def stands_with(self, other: Candidate) -> bool:
        """Whether both can be in one stack, as far as the schemes say without a model."""
        if self.scheme is None or other.scheme is None:  # a stack has one optimizer, and no scheme that replaces it
            return not ("optimizer" in self.changes and "optimizer" in other.changes)
        if any(scaled.scales_loss and taker.takes_gradients for scaled, taker in ((self, other), (other, self))):
            return False  # the optimizer would step with gradients of the scaled loss before they are unscaled
        try:
            schemes.build(f"{self.name}+{other.name}")
        except SpecError:
            return False
        return True


Action = frozenset[Candidate]
"""Candidates that act together: on a block, on the rest of the model, or around the blocks; empty to change nothing."""

AS_IT_IS: Action = frozenset()


def stand_together(candidates: Iterable[Candidate]) -> bool:
    """Whether candidates can be in one stack, as far as their schemes say."""
    return all(one.stands_with(two) for one, two in itertools.combinations(candidates, 2))


def training_of(candidates: Iterable[Candidate], warnings: Sequence[str] = ()) -> Training:
    """Return how training with some candidates differs, given the warnings of a simulation."""
    found = [each.training(warnings) for each in candidates]
    return Training(
        trained="adapters" if any(each.trained == "adapters" for each in found) else "all",
        gradient=max((each.gradient for each in found), key=GRADIENTS.index, default="exact"),
        updates="other" if any(each.updates == "other" for each in found) else "same",
        precision="other" if any(each.precision == "other" for each in found) else "same",
    )


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


@dataclass(frozen=True)
class Candidates:
    """All that may be changed.

    Attributes:
        around: What is changed around the blocks: the loss, the optimizer, gradients.
        of_blocks: What may be done with one block and not with another.
        computing: What changes how all blocks compute: precision, memory format, adapters.
        in_parts: Micro-batches, each with their number, the fewest first.
        kept: What the model brings that none of them changes, each with why.
    """

    around: Sequence[Candidate] = ()
    of_blocks: Sequence[Candidate] = ()
    computing: Sequence[Candidate] = ()
    in_parts: Sequence[tuple[int, Candidate]] = ()
    kept: tuple[str, ...] = ()

    @property
    def all(self) -> list[Candidate]:
        """Every candidate."""
        return [*self.around, *self.of_blocks, *self.computing, *(each for _, each in self.in_parts)]

    def suited(self, exact: Case, measured: Measurement) -> Candidates:
        """Return the candidates that go with the types and the optimizer of a model, seen in its exact step."""
        if exact.script is not None:  # whose own lines choose both
            return self
        computing, around, kept = list(self.computing), list(self.around), list[str]()
        if exact.dtype is None and measured.dtype != "float32":
            computing = [each for each in computing if each.changes != ("precision",)]
            kept.append(
                f"the model's parameters are {measured.dtype}: no other precision was tried; --dtype casts them"
            )
        moments = 2 * (measured.gradients_bytes or 0)  # of torch's AdamW, two for each gradient
        operators = measured.estimated.by_operator if measured.estimated else ()
        is_fused = any(each.name.startswith("_fused_adam") for each in operators)
        steps_as_adamw = measured.optimizer == "AdamW" and moments <= (measured.optimizer_bytes or 0) < 1.5 * moments
        if exact.optimizer is None and (is_fused or not steps_as_adamw):
            around = [each for each in around if each.optimizer is None or not each.same_updates]
            optimizer = f"the model's own optimizer, {measured.optimizer}"
            kept.append(f"no other implementation of {optimizer}, was tried; --optimizer names another")
        return replace(self, computing=computing, around=around, kept=tuple(kept))


def candidates_for(
    exact: Case,
    optimizers: Mapping[Optimizer, bool],
    *,
    only_exact: bool = False,
    names: Sequence[str] | None = None,
    limits_error: bool = False,
    has_bfloat16: bool = True,
    changes: Set[Change] | None = None,
) -> Candidates:
    """Return the candidates for the case of an exact step.

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
    found = [Candidate(scheme.spec, scheme) for scheme in map(schemes.build, specs)]
    if names is not None:
        for each in found:
            _check_named(each)
    elif has_bfloat16:  # it costs what float16 costs, and needs no scaled loss
        found = [each for each in found if not each.scales_loss]
    if exact.dtype not in (None, "float32") or exact.autocast is not None:  # chosen; another cast does nothing
        found = [each for each in found if each.changes != ("precision",)]
    if exact.autocast == "float16":
        found = [each for each in found if not each.takes_gradients]
    if not has_bfloat16:
        found = [each for each in found if not each.needs_bfloat16]
    if exact.scheme != "exact":  # what always stands beside the plan
        base = Candidate.of(exact.scheme)
        found = [each for each in found if each.name != base.name and each.stands_with(base)]
    found += [Candidate(f"--optimizer {name}", None, name, same) for name, same in optimizers.items()]
    found = [each for each in found if each.training().is_exact or not only_exact]
    allowed = [each for each in found if changes is None or set(each.changes) <= changes]
    kinds = sorted({each.kind for each in found if each not in allowed})
    kept = (f"no plan has {', '.join(kinds)}: the script's own lines set what these change",) if kinds else ()
    return replace(_sorted(allowed), kept=kept)


def _sorted(candidates: Sequence[Candidate]) -> Candidates:
    """Sort candidates by what they change."""
    parts, periodic = dict[Candidate, int](), set[Candidate]()
    for each in candidates:
        if each.scheme is not None:
            in_parts, period = each.scheme.facet(InParts), each.scheme.facet(Periodic)
            parts.update({each: in_parts.parts} if in_parts else {})
            periodic.update([each] if period and period.blocks > 1 else [])
    blocks = [each for each in candidates if set(each.changes) <= _OF_BLOCKS and each not in periodic]
    computing = [each for each in candidates if not _COMPUTING.isdisjoint(each.changes)]
    left = [each for each in candidates if each not in {*parts, *periodic, *blocks, *computing}]
    around = [each for each in left if _OF_BLOCKS.isdisjoint(each.changes)]  # else another value does one of both
    return Candidates(around, blocks, computing, sorted((count, each) for each, count in parts.items()))


# -- what users name -------------------------------------------------------------------------------------------------


def _check_named(candidate: Candidate) -> None:
    """Refuse what spreads a model, has no time, or says on which blocks it acts: a plan says so itself."""
    scheme, given = candidate.scheme, f"--scheme {candidate.name}"
    assert scheme is not None
    _refuse_spread(scheme, given, "'actbench measure MODEL --scheme …' or 'actbench sweep'")
    period = scheme.facet(Periodic)
    said = [*(["only="] if scheme.only else []), *(["every="] if period and period.blocks > 1 else [])]
    if said and not _OF_BLOCKS.isdisjoint(scheme.changes):
        raise UsageError(f"{given}: fit chooses the blocks itself; leave {' and '.join(said)} out")
    _refuse_untimed(scheme, given)


def _refuse_spread(scheme: Scheme, given: str, other_commands: str) -> None:
    try:
        refuse_spread(
            scheme, f"{given}: fit plans for one process", f"{other_commands} simulates it with other schemes"
        )
    except ConversionError as error:
        raise UsageError(str(error)) from None


def _refuse_untimed(scheme: Scheme, given: str) -> None:
    limits = scheme.facet(Limits)
    if limits and limits.untraceable:
        raise UsageError(
            f"{given}: fit compares estimated times, and a step with it has none; 'actbench measure' shows its peak"
        )


def base_of(spec: str) -> str:
    """Return the schemes that every plan has, of ``--base``, in canonical form.

    Raises:
        SpecError: There is no such scheme, or they do not stand together.
        UsageError: They spread the model over processes, or a step with them has no estimated time.
    """
    scheme = schemes.build(spec)
    _refuse_spread(scheme, f"--base {spec}", "'actbench sweep'")
    _refuse_untimed(scheme, f"--base {spec}")
    return scheme.spec


def singles_of(among: Sequence[str]) -> list[str]:
    """Return the schemes of ``--scheme`` in canonical form, each once.

    Raises:
        SpecError: There is no such scheme.
        UsageError: A specification is a stack of several schemes.
    """
    built = {text: schemes.build(text) for text in among}
    stack = next((text for text, scheme in built.items() if isinstance(scheme, Composed)), None)
    if stack is not None:
        raise UsageError(f"--scheme {stack}: fit combines schemes itself; name them one by one, each with --scheme")
    return list(dict.fromkeys(scheme.spec for scheme in built.values() if scheme.spec != "exact"))
