"""Operators on lists of tensors, which an optimizer runs: one of each form runs, and the others are made like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator.opcache import NewTensor, has_equal_metadata, signature


class Few(NamedTuple):
    """The arguments with one place of each form.

    Attributes:
        args: Arguments whose lists are shorter.
        places: For each place of the whole lists, where the shorter ones have its like.
    """

    args: tuple[Any, ...]
    places: Sequence[int]

    def spread(self, result: Any) -> Any:
        """Return the result of the whole lists from that of the shorter ones; NotImplemented if they must run."""
        if result is None:  # the operator wrote to its first list
            return None
        makes = [NewTensor.of(leaf, None, 0) for leaf in result]
        if not all(
            has_equal_metadata(make(leaf.fake_mode, (), 0), leaf) for make, leaf in zip(makes, result, strict=True)
        ):
            return NotImplemented
        return type(result)(makes[place](result[0].fake_mode, (), 0) for place in self.places)


def few(func: Any, args: tuple[Any, ...]) -> Few | None:
    """Return the arguments of an operator on lists with one place of each form; None for another operator."""
    if func.namespace != "aten" or not func._schema.name.startswith("aten::_foreach_"):
        return None
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    if len({len(each) for each in lists}) != 1:
        return None
    forms: dict[tuple[Any, ...], int] = {}
    places = [forms.setdefault(tuple(map(_form, place)), len(forms)) for place in zip(*lists, strict=True)]
    if len(forms) == len(places):
        return None
    firsts = [places.index(number) for number in range(len(forms))]
    return Few(
        tuple([arg[place] for place in firsts] if isinstance(arg, list | tuple) else arg for arg in args), places
    )


def _form(value: Any) -> tuple[Any, ...]:
    return signature(value) if isinstance(value, FakeTensor) else (type(value), value)
