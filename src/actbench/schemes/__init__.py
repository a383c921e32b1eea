"""Schemes: methods that change what a training step keeps for backward.

A scheme is a frozen value whose fields are its parameters. It lives in one file of this package, derives from
:class:`Scheme` and gives ``name``, ``summary`` and ``apply``; nothing else has to be told of it.
"""

from __future__ import annotations

from actbench.schemes.base import Scheme
from actbench.schemes.registry import build, changing, find, lookup, names

__all__ = ["Scheme", "build", "changing", "find", "lookup", "names"]
