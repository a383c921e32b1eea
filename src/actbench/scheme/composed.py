"""Several schemes as one, and one that is taken apart again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from actbench.errors import ConversionError, SpecError
from actbench.model.gradient import GRADIENTS, Gradient
from actbench.model.spec import check_apart
from actbench.scheme.base import TENSOR_PARALLEL, Change, Kind, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Adaptive, Spread
from actbench.scheme.only import common_part
from actbench.scheme.setup import TrainingSetup


class Composed(Scheme):
    """Several schemes as one: their functions composed in order of rank, then name."""

    card: ClassVar[Card] = Card(summary="several schemes as one")

    parts: tuple[Scheme, ...]

    @classmethod
    def of(cls, parts: Sequence[Scheme], text: str) -> Composed:
        """Compose schemes; refuse those that exclude each other.

        Raises:
            SpecError: ``exact`` is among them, or two do to the whole model what only one may.
        """
        check_apart([(part.name, bool(part.only)) for part in parts], text)
        for first, second in itertools.combinations(parts, 2):
            if first.only and second.only:
                continue  # apply checks on the model whether they overlap
            for what in _both(first, second):
                alternative = first.card.alternative or second.card.alternative
                hint = f" ({alternative} does both)" if alternative else ""
                raise SpecError(
                    f"scheme {text!r}: {first.name} and {second.name} both {what}; leave one of them out{hint}"
                )
        _refuse_apart(parts, text)
        return cls(parts=tuple(sorted(parts, key=lambda part: (part.card.rank, part.name, part.only))))

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Apply each part to the result of the one before.

        Raises:
            ConversionError: Two parts do to one module what only one may, or a part cannot be applied.
        """
        for first, second in itertools.combinations(self.parts, 2):
            _refuse_overlap(first, second, setup.module)
        for part in self.parts:
            setup = part.apply(setup)
        return setup

    @property
    def changes(self) -> tuple[Change, ...]:
        """All that the parts change."""
        return tuple(dict.fromkeys(change for part in self.parts for change in part.changes))

    @property
    def gradient(self) -> Gradient:
        """The worst of the parts' gradients."""
        return max((part.gradient for part in self.parts), key=GRADIENTS.index)

    def facet(self, kind: type[Kind]) -> Kind | None:
        """Return the facets of the parts together, or None if no part has one."""
        found = [facet for part in self.parts if (facet := part.facet(kind)) is not None]
        return kind.together(found) if found else None

    @property
    def spec(self) -> str:
        """The parts' specifications joined by ``+``, in the order in which they are applied."""
        return "+".join(part.spec for part in self.parts)


def parts_in(scheme: Scheme) -> tuple[Scheme, ...]:
    """Return the schemes that a scheme is composed of, in the order in which they are applied; itself if it is one."""
    return scheme.parts if isinstance(scheme, Composed) else (scheme,)


def at_parameters(scheme: Scheme) -> tuple[Scheme | None, Scheme | None]:
    """Return a scheme up to its last change of parameters, and the rest after it; None for an empty half.

    The gradient of the scheme is compared with that of the first half, or of the exact model without one.
    """
    return _cut(scheme, [part for part in parts_in(scheme) if "parameters" in part.changes or _cuts_layers(part)])


def at_placement(scheme: Scheme) -> tuple[Scheme | None, Scheme | None]:
    """Return the part that changes the model of one process, and the part that spreads the result; None for no part.

    What a model saves is traced between the two: afterwards it runs with all its processes only. Parts of layers are of
    the first half: what one process saves of them shows once they are cut.
    """
    return _cut(scheme, [part for part in parts_in(scheme) if part.facet(Spread) is None or _cuts_layers(part)])


def _cuts_layers(part: Scheme) -> bool:
    spread = part.facet(Spread)
    return spread is not None and spread.of_layers


def _cut(scheme: Scheme, first: Sequence[Scheme]) -> tuple[Scheme | None, Scheme | None]:
    """Return the parts of a scheme up to the last of some of them, and the others."""
    parts = parts_in(scheme)
    end = 1 + parts.index(first[-1]) if first else 0
    if end in (0, len(parts)):
        return (scheme, None) if end else (None, scheme)
    return Composed(parts=parts[:end]), Composed(parts=parts[end:])


def refuse_spread(scheme: Scheme, who: str, instead: str) -> None:
    """Raise a ConversionError for a scheme that spreads a model: ``who`` begins the message, ``instead`` ends it."""
    spread = scheme.facet(Spread)
    if spread is not None:
        _, placing = at_placement(scheme)
        named = (placing or scheme).spec
        raise ConversionError(f"{who}, and {named} spreads a model over {math.prod(spread.axes.values())}: {instead}")


def _refuse_apart(parts: Sequence[Scheme], text: str) -> None:
    """Refuse schemes that learn bit widths from gradients under tensor parallelism.

    Ranks would choose different widths for tensors that all of them have.
    """
    sharing = next((part for part in parts if TENSOR_PARALLEL in part.claims), None)
    adapting = next((part for part in parts if (facet := part.facet(Adaptive)) and facet.by_gradients), None)
    if sharing and adapting:
        fixed = (adapting.facet(Adaptive) or Adaptive()).fixed
        raise SpecError(
            f"scheme {text!r}: {adapting.name} allocates bits by gradients, and ranks of {sharing.name} have different "
            f"ones: they would pack the same tensor in different bits; take fixed bits ({fixed}), or leave one of the "
            "two out"
        )


def _both(first: Scheme, second: Scheme) -> list[str]:
    return [claim for claim in first.claims if claim in second.claims]


def _refuse_overlap(first: Scheme, second: Scheme, model: nn.Module) -> None:
    both = first.name == second.name or _both(first, second)
    if not (both and first.only and second.only):
        return
    path = common_part(model, first.only, second.only)
    if path is not None:
        raise ConversionError(
            f"{first.spec} and {second.spec} are both for {path}; name parts in only= that do not overlap"
        )
