"""From specifications to schemes: schemes by name, and several as one."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from actbench import schemes, spec
from actbench.errors import ConversionError, SpecError
from actbench.results.gradient import GRADIENTS, Gradient
from actbench.results.measured import Diagnostic
from actbench.schemes.base import PLACEMENT, TENSOR_PARALLEL, Change, Scheme
from actbench.schemes.only import common_part
from actbench.setup import Batch, TrainingSetup


@functools.cache
def find() -> dict[str, type[Scheme]]:
    """Return every scheme by name, found by importing each file of this package."""
    for module in pkgutil.iter_modules(schemes.__path__):
        importlib.import_module(f"{schemes.__name__}.{module.name}")
    found = [cls for cls in _subclasses(Scheme) if cls.name]
    return {cls.name: cls for cls in sorted(found, key=lambda cls: cls.name)}


def names() -> list[str]:
    """Return the names of all schemes."""
    return list(find())


def alone() -> list[str]:
    """Return the names of the schemes that one process runs alone."""
    return [name for name, scheme in find().items() if not scheme.model_construct().mesh_axes]


def changing(changes: Collection[str]) -> list[str]:
    """Return the names of the schemes that may change any of these; see :data:`actbench.schemes.base.Change`."""
    return [name for name, scheme in find().items() if not set(changes).isdisjoint(scheme.model_construct().changes)]


def lookup(name: str, text: str | None = None) -> type[Scheme]:
    """Return the scheme of a name.

    Raises:
        SpecError: There is no such scheme; the message names the closest one, and ``text``, the whole specification.
    """
    return spec.find(name, find(), "scheme", text or name)


def build(text: str) -> Scheme:
    """Build the scheme that a specification names; several joined by ``+`` become one composed scheme.

    Raises:
        SpecError: A name, key or value is wrong; the message names it and what is allowed.
    """
    parts = [_build_part(part, text) for part in spec.parse(text)]
    return parts[0] if len(parts) == 1 else Composed.of(parts, text)


def _build_part(part: spec.Part, text: str) -> Scheme:
    cls = lookup(part.name, text)
    built = spec.build(cls, cls.positional, part, f"scheme {text!r}", f" (see 'actbench schemes {cls.name}')")
    spec.check_sizes(built, f"scheme {text!r}")
    return built


def _subclasses(cls: type[Scheme]) -> list[type[Scheme]]:
    return [sub for child in cls.__subclasses__() for sub in [child, *_subclasses(child)]]


class Composed(Scheme):
    """Several schemes as one: their functions composed in order of rank, then name."""

    parts: tuple[Scheme, ...]

    @classmethod
    def of(cls, parts: Sequence[Scheme], text: str) -> Composed:
        """Compose schemes; refuse those that exclude each other.

        Raises:
            SpecError: ``exact`` is among them, or two do to the whole model what only one may.
        """
        for part in parts:
            if part.name == "exact":
                raise SpecError(f"scheme {text!r}: exact is the unchanged model and cannot be composed; leave it out")
        for first, second in itertools.combinations(parts, 2):
            if first.only and second.only:
                continue  # apply checks on the model whether they overlap
            if first.name == second.name:
                raise SpecError(
                    f"scheme {text!r}: {first.name} stands twice; give it once, with all its keys, or each with only= "
                    "for parts of the model that do not overlap"
                )
            for what in _both(first, second):
                hint = " (gact:L3 does both)" if "offload" in (first.name, second.name) else ""
                raise SpecError(
                    f"scheme {text!r}: {first.name} and {second.name} both {what}; leave one of them out{hint}"
                )
        _refuse_apart(parts, text)
        return cls(parts=tuple(sorted(parts, key=lambda part: (part.rank, part.name, part.only))))

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

    def parted(self) -> tuple[Scheme | None, Scheme | None]:
        """Return the parts up to the last that changes parameters, in the order of :meth:`apply`, and the others."""
        places = [place for place, part in enumerate(self.parts, 1) if part.parted()[0] is not None]
        return self._cut(max(places, default=0))

    def placed(self) -> tuple[Scheme | None, Scheme | None]:
        """Return the parts up to the last that spreads nothing over processes, and the others."""
        places = [place for place, part in enumerate(self.parts, 1) if PLACEMENT not in part.changes]
        return self._cut(max(places, default=0))

    def _cut(self, end: int) -> tuple[Scheme | None, Scheme | None]:
        first, others = self.parts[:end], self.parts[end:]
        return Composed(parts=first) if first else None, Composed(parts=others) if others else None

    def diagnostics(self, setup: TrainingSetup, batch: Batch, seed: int) -> tuple[Diagnostic, ...]:
        """Return the diagnostics of all parts, one of each name."""
        found = [each for part in self.parts for each in part.diagnostics(setup, batch, seed)]
        return tuple({each.name: each for each in found}.values())

    @contextmanager
    def as_after_a_step(self, setup: TrainingSetup) -> Iterator[None]:
        """Change weights as all parts do in each training step."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.as_after_a_step(setup))
            yield

    @property
    def changes(self) -> tuple[Change, ...]:
        """All that the parts change."""
        return tuple(dict.fromkeys(change for part in self.parts for change in part.changes))

    @property
    def period(self) -> int | None:
        """After how many blocks all parts begin again."""
        periods = [part.period for part in self.parts]
        return None if None in periods else math.lcm(*filter(None, periods))

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """The axes of all parts."""
        return {axis: size for part in self.parts for axis, size in part.mesh_axes.items()}

    @property
    def gradient(self) -> Gradient:
        """The worst of the parts' gradients."""
        return max((part.gradient for part in self.parts), key=GRADIENTS.index)

    @property
    def keeps_updates(self) -> bool:
        """Whether all parts keep the optimizer's updates."""
        return all(part.keeps_updates for part in self.parts)

    @property
    def untraceable(self) -> str:
        """Why fake tensors do not show what one of the parts does."""
        return next(filter(None, (part.untraceable for part in self.parts)), "")

    @property
    def draws_alike(self) -> bool:
        """Whether dropout draws the masks of the exact model with all parts."""
        return all(part.draws_alike for part in self.parts)

    @property
    def adapts(self) -> bool:
        """Whether a step of any part changes what later steps save."""
        return any(part.adapts for part in self.parts)

    @property
    def runs_files(self) -> tuple[str, ...]:
        """The files that the parts run."""
        return tuple(file for part in self.parts for file in part.runs_files)

    @property
    def spec(self) -> str:
        """The parts' specifications joined by ``+``, in the order in which they are applied."""
        return "+".join(part.spec for part in self.parts)


def _refuse_apart(parts: Sequence[Scheme], text: str) -> None:
    """Refuse what learns from gradients of which each process sees its part: what all have would be packed apart."""
    sharing = next((part for part in parts if TENSOR_PARALLEL in part.claims), None)
    adapting = next((part for part in parts if part.bits_by_gradients), None)
    if sharing and adapting:
        raise SpecError(
            f"scheme {text!r}: {adapting.name} shares out bits by gradients, of which each process of {sharing.name} "
            f"has others: what all of them have would be packed otherwise in each; take {adapting.name} with bits that "
            "are fixed (gact:L1, actnn:L2), or leave one of the two out"
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
