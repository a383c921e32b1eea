"""Running one command under a launcher such as torchrun: which ranks take part, and which one prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, runtime_checkable

from actbench import plugins
from actbench.cli.app import app
from actbench.errors import UsageError
from actbench.measuring.rank import Rank, is_set, launched_rank

_MEASURE: Final = ("measure", "sweep")
_TRAIN: Final = "train"
RANKS: Final = "ranks"
"""The executor that launched processes are measured by; it is asked for by being launched, and by no flag."""
_HELP: Final = ("-h", "--help")


@runtime_checkable
class Ranks(Protocol):
    """Lets processes that a launcher started measure together; a module may be one."""

    def check(self) -> None:
        """Raise a UsageError where these processes cannot measure together."""

    def lead(self, place: Rank) -> AbstractContextManager[Any]:
        """Lead the other ranks for the duration of the block."""

    def follow(self, place: Rank) -> None:
        """Execute what rank 0 asks for, until rank 0 ends."""


def run_launched(arguments: Sequence[str]) -> None:
    """Run the command line ``arguments`` in this process.

    Of several processes all take part in measuring and in training; the first alone does everything else, prints,
    writes files and has the exit status of the command.
    """
    here = launched_rank(os.environ)
    verb = next((word for word in arguments if not word.startswith("-")), None)
    asks = any(word in _HELP for word in arguments)
    measures = verb in _MEASURE and not asks
    if measures and (here.size > 1 or is_set(os.environ, "ACCELERATE_USE_CPU")):
        _measure(here)
    elif here.is_first or (verb == _TRAIN and not asks):
        app(prog_name="actbench")


def _measure(here: Rank) -> None:
    """Measure with all ranks, by the plug-in for the executor ``ranks``."""
    ranks = plugins.find_plugin("executors", RANKS, Ranks)  # type: ignore[type-abstract]
    if ranks is None:
        raise UsageError(f"{here.size} processes were launched, and no installed package can measure with several")
    ranks.check()
    if here.size == 1:
        app(prog_name="actbench")
    elif here.is_first:
        with ranks.lead(here) as team:
            app(prog_name="actbench", obj=team)
    else:
        ranks.follow(here)
