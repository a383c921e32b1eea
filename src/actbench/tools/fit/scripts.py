"""Training scripts in the place of models: another plug-in simulates their steps, and their own lines set the rest."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from actbench import plugins
from actbench.errors import UsageError
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.run.worker import Bench

if TYPE_CHECKING:
    from actbench.scheme.base import Change

_SCRIPT: Final = "script"
_OF_MODELS: Final = "actbench.tools.fit.bench"


@runtime_checkable
class ScriptBench(Bench, Protocol):
    """What simulates scripts, an entry point of ``actbench.benches``; a module may be one."""

    CHANGES: Set[Change]
    """What schemes may change in a script."""

    def check(self, script: Script) -> None:
        """Check that a script can be run; a UsageError if not."""


def check(script: Script, named: Iterable[tuple[str, str]]) -> None:
    """Check that a script and some schemes, each behind its flag, can be simulated.

    Raises:
        UsageError: The script cannot be run, no installed package simulates it, or its own lines set what a scheme
            changes.
    """
    from actbench.scheme import build  # which imports torch: a command asks for the module first

    bench = _bench()
    bench.check(script)
    for flag, spec in named:
        if others := sorted(set(build(spec).changes) - bench.CHANGES):
            raise UsageError(
                f"{flag} {spec} changes {' and '.join(others)}, which a script sets in its own lines: change the "
                "script, and leave the scheme out"
            )


def changed_in(case: Case) -> Set[Change] | None:
    """Return what schemes may change in the step of a case; None for all."""
    return None if case.script is None else _bench().CHANGES


def bench_of(case: Case) -> str:
    """Return the module that simulates a case."""
    return _OF_MODELS if case.script is None else plugins.installed("benches")[_SCRIPT].entry.module


def name_of(case: Case) -> str:
    """Return the name under which the simulations of a case are kept: a script's, whatever its arguments."""
    if case.script is None:
        return case.model
    return case.script.target if case.script.is_module else Path(case.script.target).stem


def _bench() -> ScriptBench:
    found = plugins.find_plugin("benches", _SCRIPT, ScriptBench)  # type: ignore[type-abstract]
    if found is None:
        raise UsageError("--script: no installed package simulates scripts, or it cannot be used")
    return found
