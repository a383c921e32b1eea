"""Describes a plan in words: which schemes act on which blocks, as read from its specification."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from actbench.model.spec import SpecPart, parse_spec

_ONLY = "only"
NUMBERED = re.compile(r"(.*\D|)(\d+)(\D*)")
"""The path of a block, around its number."""

_RANGE = re.compile(r"(.*)\[(\d+)-(\d+)\](.*)")
_FEW = 2  # paths outside of blocks; more are counted


class Part(NamedTuple):
    """Schemes, their specifications without places, with the blocks on which they act and patterns of other modules.

    Both are empty if they act on the whole step.
    """

    names: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def parts_of(spec: str, blocks: Sequence[str], base: str = "exact") -> list[Part]:
    """Return what a specification does: with blocks, those that are treated equally together, and then with the rest.

    ``blocks`` are the paths of the model's blocks, in the order of the forward pass; none are known of older records.
    ``base`` is what every plan has, and is left out.
    """
    always = [str(part) for part in parse_spec(base)]
    found = [part for part in parse_spec(spec) if str(part) not in (*always, "exact")]
    placed = []
    for part in found:
        options = {key: each for key, each in part.options.items() if key != _ONLY}
        placed.append((str(SpecPart(part.name, part.value, options)), *_places(part, blocks)))
    groups: dict[tuple[str, ...], list[str]] = {}  # blocks by the names of what is done with them
    for path in blocks:
        if names := tuple(name for name, inside, _ in placed if path in inside):
            groups.setdefault(names, []).append(path)
    outside: dict[tuple[str, ...], list[str]] = {}
    for name, inside, others in placed:
        if others or not inside:
            outside.setdefault(others, []).append(name)
    limited = {tuple(names): others for others, names in outside.items() if others}
    return [
        *(Part(names, tuple(paths), limited.pop(names, ())) for names, paths in groups.items()),
        *(Part(names, (), others) for names, others in limited.items()),
        *(Part((name,)) for name in outside.get((), [])),
    ]


def short(spec: str, blocks: Sequence[str], base: str = "exact") -> str:
    """Return a plan for a cell of a table, such as ``checkpoint blocks 0-10, chunked_loss:8``."""
    parts = [(part.names, _where(part, blocks, "/".join)) for part in parts_of(spec, blocks, base)]
    texts = [f"{'+'.join(names)} {' and '.join(where)}".rstrip() for names, where in parts]
    return ", ".join(texts) or (spec if spec == base else "exact")


def sentence(spec: str, blocks: Sequence[str], base: str = "exact") -> str:
    """Return a plan in words, such as ``checkpoint on blocks 0-10, msln on blocks 11-31, chunked_loss:8``."""
    texts = []
    for part in parts_of(spec, blocks, base):
        first, *more = part.names
        names, where = f"{first} with {_and(more)}" if more else first, _where(part, blocks, _and)
        texts.append(f"{names} on {' and on '.join(where)}" if where else names)
    return ", ".join(texts) or (spec if spec == base else "exact")


def is_uniform(spec: str, blocks: Sequence[str]) -> bool:
    """Whether a plan does the same with all blocks."""
    if not blocks:
        return f",{_ONLY}=" not in spec
    inside = [_places(part, blocks)[0] for part in parse_spec(spec)]
    return all(len(paths) in (0, len(blocks)) for paths in inside)


def _where(part: Part, blocks: Sequence[str], joined: Callable[[Sequence[str]], str]) -> list[str]:
    """Return the blocks, and the modules outside of blocks: their paths, or how many they are."""
    found = []
    if part.blocks:
        several = f"block{'' if len(part.blocks) == 1 else 's'} {joined(_numbers(part.blocks, blocks))}"
        found.append("all blocks" if len(part.blocks) == len(blocks) else several)
    if len(part.others) > _FEW:
        found.append(f"{len(part.others)} modules outside of blocks")
    elif part.others:
        found.append(" and ".join(part.others))
    return found


def _and(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def _places(part: SpecPart, blocks: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the blocks that a part is limited to, and other patterns; both are empty if it is not limited."""
    known, inside, others = set(blocks), list[str](), list[str]()
    for pattern in filter(None, part.options.get(_ONLY, "").split("/")):
        paths = [pattern]
        if matched := _RANGE.fullmatch(pattern):
            before, first, last, after = matched.groups()
            paths = [f"{before}{number}{after}" for number in range(int(first), int(last) + 1)]
        if known.issuperset(paths):
            inside += paths
        else:
            others.append(pattern)
    return inside, tuple(others)


def _numbers(chosen: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Return chosen blocks as ranges: ``0-10``, or ``layer1.0-2`` if not all blocks are in one list."""
    found: dict[tuple[str, str], list[int]] = {}  # by what stands around each number; a path without one has -1
    for path in blocks:
        matched = NUMBERED.fullmatch(path)
        around, number = ((matched[1], matched[3]), int(matched[2])) if matched else ((path, ""), -1)
        found.setdefault(around, []).extend([number] if path in chosen else [])
    names = [before.split(".") for before, _ in found]
    count = next((n for n, each in enumerate(zip(*names, strict=False)) if len(set(each)) > 1), 0)
    shared = "".join(f"{name}." for name in names[0][:count])
    texts = []
    for (before, after), numbers in found.items():
        begin, end = ("", "") if len(found) == 1 else (before[len(shared) :], after)
        for first, last in ranges_of(sorted(numbers)) if numbers else ():
            row = str(first) if first == last else f"{first}-{last}"
            texts.append(f"{begin}{'' if row == '-1' else row}{end}")
    return texts


def ranges_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of numbers in a row, from ascending ones."""
    gaps = [each for each in pairwise(numbers) if each[1] != each[0] + 1]
    ends = [numbers[0], *(end for gap in gaps for end in gap), numbers[-1]]
    return list(zip(ends[::2], ends[1::2], strict=True))
