"""Identifies the saved tensors of a step, so that each gets the bits that an earlier step allocated to it.

A saved tensor is identified by the operator that made it, its shape without the batch, and the number of such tensors
that the step saved before it. So a branch that runs only in some steps shifts nothing but its own kind. If the inputs
have other lengths than in the first step, shapes do not identify a tensor: its operator, number of dimensions and turn
among such tensors do, and it gets the bits of the tensor with this turn in the first step. So fifty lengths have no
more sites than two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from actbench.packing import SiteState

Family = tuple[str, str, int]
"""The recomputed block that a tensor is saved in (or empty), the operator that made it, its number of dimensions."""
Kind = tuple[str, str, tuple[int, ...]]
"""The same, with the shape without the batch in place of the number of dimensions."""
Shapes = tuple[tuple[int, ...], ...]

MOST_LATE = 32
"""Kinds of one family that may appear after the first step. Beyond these, shapes that change in each step are not
distinguished, even if the inputs have their first lengths.
"""


class Occurrences:
    """The sites of a model's saved tensors, made as they are first seen; ``bits`` are those of a new site."""

    def __init__(self, bits: float) -> None:
        self.bits = bits
        self._sites: dict[Kind, list[SiteState]] = {}
        self._in_turn: dict[Family, list[SiteState]] = {}
        self._late: Counter[Family] = Counter()
        self._seen: dict[Kind, list[SiteState]] = {}
        self._turns: Counter[Family] = Counter()
        self._first: Shapes | None = None
        self._is_usual, self._is_late, self._block = True, False, ""

    def begin(self, shapes: Iterable[Iterable[int]] = ()) -> None:
        """Begin a forward pass whose inputs have these shapes, without the batch."""
        found = tuple(tuple(shape) for shape in shapes)
        self._is_late = self._first is not None
        self._first = found if self._first is None else self._first
        self._is_usual = found == self._first
        self.forget_seen()

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """Count what is saved inside as one run of a recomputed block."""
        # a further run of the block saves the same tensors again, from the first turn on
        for kind in [kind for kind in self._seen if kind[0] == path]:
            del self._seen[kind]
        for family in [family for family in self._turns if family[0] == path]:
            del self._turns[family]
        outer, self._block = self._block, path
        try:
            yield
        finally:
            self._block = outer

    def site(self, tensor: Tensor) -> SiteState:
        """Return the site of a tensor that is being saved."""
        node, shape, block = tensor.grad_fn, tensor.shape, self._block
        maker = "output" if node is None else node.name()
        kind, family = (block, maker, tuple(shape[1:])), (block, maker, len(shape))
        seen, turn = self._seen.get(kind), self._turns[family]
        if seen is None:
            seen = self._seen[kind] = []
        self._turns[family] = turn + 1
        sites = self._sites.get(kind, ())
        if self._is_usual and len(seen) < len(sites) and turn < len(self._in_turn.get(family, ())):  # as nearly always
            site = sites[len(seen)]
        elif self._is_usual and self._is_known(kind, family):
            site = _nth(self._sites.setdefault(kind, []), len(seen), partial(_name, kind), self.bits)
            if turn == len(self._in_turn.setdefault(family, [])):
                self._in_turn[family].append(site)
        else:
            site = _nth(self._in_turn.setdefault(family, []), turn, partial(_name_in_turn, family), self.bits)
        seen.append(site)
        return site

    def _is_known(self, kind: Kind, family: Family) -> bool:
        if kind not in self._sites and self._is_late:
            self._late[family] += 1
            return self._late[family] <= MOST_LATE
        return True

    def forget_seen(self) -> None:
        """Forget which tensors were seen in the last forward pass; their sites stay."""
        self._seen.clear()
        self._turns.clear()

    def seen(self) -> dict[Kind, list[SiteState]]:
        """Return the sites of the last forward pass, by kind, in order of time."""
        return dict(self._seen)

    def adapted(self) -> Any:
        """Return the bits of all sites, and what codecs keep there; which :meth:`adapt` takes."""
        at = {site: (kind, index) for kind, sites in self._sites.items() for index, site in enumerate(sites)}
        kept = [(*place, site.kept) for site, place in at.items() if site.kept is not None]
        return ({"kept": kept} if kept else {}) | {
            "first": self._first,
            "places": [(kind, [site.bits for site in sites]) for kind, sites in self._sites.items()],
            "in_turn": [
                (family, [at.get(site, site.bits) for site in sites]) for family, sites in self._in_turn.items()
            ],
        }

    def adapt(self, state: Any) -> None:
        """Restore what :meth:`adapted` returned."""
        first = state["first"]
        self._first = None if first is None else tuple(tuple(shape) for shape in first)
        self._sites, self._in_turn = {}, {}
        for (block, maker, shape), widths in state["places"]:
            kind = (block, maker, tuple(shape))
            self._sites[kind] = [SiteState(_name(kind, index), bits) for index, bits in enumerate(widths)]
        for (block, maker, shape), index, kept in state.get("kept", ()):
            self._sites[block, maker, tuple(shape)][index].kept = kept
        for (block, maker, dims), given in state["in_turn"]:
            family = (block, maker, dims)
            self._in_turn[family] = [self._read(family, turn, entry) for turn, entry in enumerate(given)]

    def _read(self, family: Family, turn: int, entry: Any) -> SiteState:
        if isinstance(entry, int | float):
            return SiteState(_name_in_turn(family, turn), entry)
        (block, maker, shape), index = entry
        site: SiteState = self._sites[block, maker, tuple(shape)][index]
        return site

    def __iter__(self) -> Iterator[SiteState]:
        found = [*self._sites.values(), *self._in_turn.values()]
        return iter(dict.fromkeys(site for sites in found for site in sites))


def _nth(sites: list[SiteState], index: int, name: Callable[[int], str], bits: float) -> SiteState:
    """Return a site of a list; append it if it is the next."""
    if index == len(sites):
        sites.append(SiteState(name(index), bits))
    return sites[index]


def _name(kind: Kind, index: int) -> str:
    block, maker, shape = kind
    return f"{block} {maker} {list(shape)} #{index}".lstrip()


def _name_in_turn(family: Family, turn: int) -> str:
    block, maker, dims = family
    return f"{block} {maker} of {dims} dimensions #{turn}".lstrip()
