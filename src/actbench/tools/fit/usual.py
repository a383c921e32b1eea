"""Stacks that most people know, which a fit tries before it looks for better plans."""

from __future__ import annotations

from typing import Final

from actbench.model.spec import parse_spec

USUAL: Final = (
    ("lora:16", "checkpoint", "chunked_loss:8"),
    ("qlora:16", "checkpoint", "chunked_loss:8"),
    ("checkpoint", "chunked_loss:8", "adam8bit:torchao"),
    ("lora:16", "checkpoint"),
    ("checkpoint", "adam8bit:torchao"),
    ("checkpoint",),
)
"""The schemes of each, those first that need least: on a slow machine the time may end before the others."""

_KNOWN: Final = frozenset(map(frozenset, USUAL))


def is_usual(spec: str, base: str) -> bool:
    """Whether a plan is a usual stack, with or without ``base``, which every plan has."""
    return frozenset(map(str, parse_spec(spec))) - set(map(str, parse_spec(base))) in _KNOWN
