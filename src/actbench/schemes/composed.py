from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from actbench.errors import SpecError
from actbench.schemes.base import Scheme
from actbench.setup import Batch, TrainingSetup


class Composed(Scheme):
    """Several schemes as one: their functions composed in order of rank, then name."""

    parts: tuple[Scheme, ...]

    @classmethod
    def of(cls, parts: Sequence[Scheme], text: str) -> Composed:
        """Compose schemes, refusing those that cannot stand together.

        Raises:
            SpecError: ``exact`` is composed with something, one scheme stands twice, or two would both change what
                one alone may.
        """
        seen: set[str] = set()
        for part in parts:
            if part.name == "exact":
                raise SpecError(f"scheme {text!r}: exact is the unchanged model and cannot be composed; leave it out")
            if part.name in seen:
                raise SpecError(f"scheme {text!r}: {part.name} stands twice; give it once, with all its keys")
            seen.add(part.name)
        for first, second in itertools.combinations(parts, 2):
            for what in first.exclusive:
                if what in second.exclusive:
                    hint = " (gact:L3 does both)" if "offload" in (first.name, second.name) else ""
                    raise SpecError(
                        f"scheme {text!r}: {first.name} and {second.name} both {what}; leave one of them out{hint}"
                    )
        return cls(parts=tuple(sorted(parts, key=lambda part: (part.rank, part.name))))

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Apply each part to the result of the one before."""
        for part in self.parts:
            setup = part.apply(setup)
        return setup

    def diagnostics(self, setup: TrainingSetup, batch: Batch, seed: int) -> Mapping[str, float]:
        """Return what all parts have to say of the whole."""
        return {name: value for part in self.parts for name, value in part.diagnostics(setup, batch, seed).items()}

    @contextmanager
    def as_after_a_step(self, setup: TrainingSetup) -> Iterator[None]:
        """Let weights be what all parts make of them."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.as_after_a_step(setup))
            yield

    @property
    def adapts(self) -> bool:
        """Whether any part adapts."""
        return any(part.adapts for part in self.parts)

    @property
    def runs_files(self) -> tuple[str, ...]:
        """The files that the parts run."""
        return tuple(file for part in self.parts for file in part.runs_files)

    @property
    def spec(self) -> str:
        """The parts' specifications joined by ``+``, in the order in which they are applied."""
        return "+".join(part.spec for part in self.parts)
