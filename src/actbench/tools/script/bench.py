"""Measures a case that is a user's script; the runner opens its sessions in processes of their own."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from actbench import livememory, scheme as schemes
from actbench.errors import ActbenchError, CodeError, MeasurementError, UntraceableError
from actbench.measuring import failures
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.scripts import Script
from actbench.simulator import profiles
from actbench.tools.script import launching
from actbench.tools.script.answers.suggestions import suggestions
from actbench.tools.script.ondevice import CudaRun
from actbench.tools.script.preloading import preload
from actbench.tools.script.real import RealRun
from actbench.tools.script.simulation import Simulation
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.schemes import Snapshot, refused
from actbench.tools.script.steps.steps import Ended
from actbench.tools.script.trials import Finish, Forked, largest_batch
from actbench.tools.script.values.hostrng import GeneratorStates
from actbench.units import format_bytes

_NO_STEP = (
    "{} ended, and no optimizer of torch has stepped. 'actbench run' reads training steps, which end with "
    "optimizer.step(): give the script the arguments with which it trains"
)

_ONLY_PASSES = (
    "{} ended after its backward passes, and no optimizer of torch has stepped: is optimizer.step() missing, or "
    "did a GradScaler leave out all steps, as it does with its first ones? 'actbench run' reads training steps"
)


_OFF_THE_CARD = (
    "{} trains on the CPU: none of its tensors is on the card; give it its argument for the card, such as --device "
    "cuda, or run it with --meter cpu"
)

_TELL_SECONDS = 9.0
"""Time between two words on a long step: before progress repeats the last one."""


_SNAPPED = 2
"""The step of a whole run after which schemes can be tried on its models, which are gone when it has ended."""


def before_forks() -> None:
    """Import torch's compiler once for all runs of a script: each would, with its first optimizer, for seconds."""
    importlib.import_module("torch._dynamo")


class ScriptError(MeasurementError):
    """A script that failed in its process; ``failure`` is the record of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """Return the record of an error."""
    return error.failure if isinstance(error, ScriptError) else failures.failure_of(error)


class Session:
    """One script measured in this process.

    Attributes:
        reads_blocks: Whether a simulation tells what each block of the model holds and takes.
        seconds: How long the script took, once it ran.
        tried: Told of each trial of a search for the largest batch.
        said: Told of each step.
        ends_at: The time of ``time.monotonic()`` at which the case is ended.
        chosen: The share of elements that are taken to be chosen where only a real run knows which.
        drawn: What runs of the script have drawn of the host's generator.
    """

    reads_blocks: ClassVar[bool] = False

    def __init__(self, case: Case, *, timeline: bool = True, drawn: GeneratorStates | None = None) -> None:
        if case.script is None:
            raise MeasurementError(f"{case.name}: the case names no script")
        self.case, self.script = case, case.script
        self._wants_timeline = timeline
        self._profile = profiles.get(case.device_profile or profiles.DEFAULT)
        self._scheme = schemes.build(case.scheme)
        self.seconds, self.chosen, self.ends_at = 0.0, 1.0, math.inf
        self.tried: Callable[[int, bool], object] = lambda batch_size, fits: None
        self.note: Callable[[str], object] = lambda text: None
        self._snapshot: Snapshot | None = None
        self.drawn = drawn or GeneratorStates()

    def memory(self) -> Measurement:
        """Run the script until its steps are equal, and return what a step needs.

        Raises:
            ActbenchError: The script came to no step; see :func:`actbench.tools.script.launching.run`.
        """
        if self.case.meter == "simulated":
            preload(self.script, self._profile)
        began = time.monotonic()
        searched, found = None, Forked(lambda finish: self._run(self.script, self._say, finish)).outcome()
        self.seconds = time.monotonic() - began
        if isinstance(found, Failure):
            raise ScriptError(found)
        if self.case.find_largest_batch:
            limit = found.memory_limit_bytes  # the script may have set a smaller one
            assert limit is not None
            searched = largest_batch(self._trial, found, limit, self.tried)
        return found.model_copy(
            update={
                "timeline": found.timeline if self._wants_timeline else None,
                "largest_batch": searched and searched.batch_size,
                "largest_batch_search": searched,
            }
        )

    def run_as_it_is(self, finish: Finish) -> Measurement:
        """Run the script in this process, which is its own, and say nothing of its steps."""
        return self._run(self.script, _quiet, finish)

    def time(self, steps: int) -> None:
        """Return None: a script times its own steps, as far as they are computed."""

    def _trial(self, rows: int, finish: Finish) -> Measurement:
        return self._run(self.script.model_copy(update={"batch_size": rows}), _quiet, finish)

    def _run(self, script: Script, stepped: Callable[[int, Step], object], finish: Finish) -> Measurement:
        is_asked = stepped == self._say  # and no trial, of which numbers alone are wanted

        def ended(found: Measurement) -> NoReturn:
            try:
                finish(self._about_script(found, run, is_asked=is_asked, is_stopped=True))
            except MeasurementError as error:
                finish(failure_of(error))

        def snapped(number: int, step: Step) -> None:
            stepped(number, step)
            if number == _SNAPPED and is_asked and isinstance(run, Simulation):
                self._snapshot = Snapshot(run.lines.roots, run.steps.optimizers)

        torch.manual_seed(self.case.seed)
        quiet = nullcontext() if is_asked else livememory.report_to(None)
        with quiet:
            run = self._opened(script, snapped if script.whole else stepped, ended)
        is_whole, failed = False, None
        try:
            with run:
                if is_asked and isinstance(run, Simulation):
                    self._tell_passes(run)
                is_whole, failed = _launched(script, run, finish)
                run.ending.done()
                if run.steps.done and isinstance(run, Simulation):  # schemes are tried where models are simulated
                    found = run.measurement
                    return self._about_script(found, run, is_asked=is_asked, is_stopped=not is_whole, failed=failed)
        except ActbenchError:
            if not run.ending.has_begun:  # what a script raises while it ends, in a finally block, is no failure
                raise
        if not run.steps.done:
            raise MeasurementError((_ONLY_PASSES if run.steps.passes else _NO_STEP).format(script.shown))
        return self._about_script(run.measurement, run, is_asked=is_asked, is_stopped=not is_whole, failed=failed)

    def _about_script(
        self,
        found: Measurement,
        run: Simulation | RealRun | CudaRun,
        *,
        is_asked: bool,
        is_stopped: bool,
        failed: str | None = None,
    ) -> Measurement:
        """Return a measurement with where the script was stopped, and with the schemes that may help or are refused."""
        assert found.built is not None
        if (
            isinstance(run, Simulation)
            and run.profile.is_cuda
            and not max(found.peak_bytes, found.script_peak_bytes or 0)
        ):
            raise MeasurementError(_OFF_THE_CARD.format(self.script.shown))
        more: dict[str, Any] = {"stopped_after": len(run.steps.done) if is_stopped else None, "failed": failed}
        if is_asked and not self._scheme.changes and not self.reads_blocks:
            asked = (*(each.scheme for each in suggestions(found, most=None)), *found.remedies)
            if self._snapshot is not None:
                no = self._snapshot.refused(asked)
            else:
                simulated = isinstance(run, Simulation)
                no = refused(asked, run.lines.roots, run.steps.optimizers, are_fake=simulated)
            again = [each for each in asked if run.lines.runs_again and "recomputation" in schemes.build(each).changes]
            more["refused"] = tuple(dict.fromkeys((*no, *again)))
        built = found.built.model_copy(update=more)
        helping = tuple(name for name in found.remedies if name not in built.refused)
        return found.model_copy(update={"built": built, "remedies": helping})

    def _opened(
        self, script: Script, stepped: Callable[[int, Step], object], ended: Callable[[Measurement], NoReturn]
    ) -> Simulation | RealRun | CudaRun:
        target = Path(script.target)
        options: dict[str, Any] = {
            "memory_limit_bytes": self.case.memory_limit_bytes,
            "scheme": self._scheme if self._scheme.changes else None,
            "batch_size": script.batch_size,
            "needs_batches": self.case.find_largest_batch,
            "steps": script.steps,
            "whole": script.whole,
            "folder": Path.cwd() if script.is_module else target.resolve().parent,
            "script": None if script.file is None else Path(script.file),
            "stepped": stepped,
            "ended": ended,
        }
        if self.case.meter == "cuda":
            del options["whole"]  # which the command refuses
            return CudaRun(**_without_schemes(options))
        if self.case.meter == "cpu":
            return RealRun(**options)
        options |= {"raise_oom": script.raise_oom, "processes": script.processes, "reads_blocks": self.reads_blocks}
        options |= {"chosen": self.chosen, "own_process": True, "drawn": self.drawn}
        is_plain = not script.whole and not self._scheme.changes and not self.reads_blocks
        options["looks_ahead"] = stepped == self._say and is_plain
        return Simulation(self._profile, **options)

    def _tell_passes(self, run: Simulation) -> None:
        """Tell now and then how many passes of models a long step has had, such as one of GRPO with its completions."""
        ran, told, passes, of_step = run.lines.ran, time.monotonic(), 0, 1

        def passed() -> None:
            nonlocal told, passes, of_step
            ran()
            step = len(run.steps.done) + 1
            now = time.monotonic()
            if step != of_step:
                told, passes, of_step = now, 0, step
            passes += 1
            if now - told >= _TELL_SECONDS:
                told = now
                self.note(f"step {step}: {passes:,} {'pass' if passes == 1 else 'passes'} of models so far")

        run.lines.ran = passed

    def _say(self, number: int, step: Step) -> None:
        self.note(f"step {number}: peak {format_bytes(step.peak_bytes)}")


def _launched(script: Script, run: Simulation | RealRun | CudaRun, finish: Finish) -> tuple[bool, str | None]:
    """Run a script; return whether it came to its end, and why it failed in a whole run whose first steps are known."""
    try:
        launching.run(script, lambda error: finish(failure_of(error)))
    except Ended:
        return False, None
    except (CodeError, UntraceableError) as error:
        if not script.whole or run.ending.has_begun or len(run.steps.done) < _SNAPPED:
            raise
        return False, str(error)
    return True, None


def _without_schemes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that change a script; a MeasurementError if one is asked for."""
    flags = {"scheme": "--scheme", "batch_size": "--batch-size", "needs_batches": "--max-batch"}
    for name, flag in flags.items():
        if options.pop(name):
            raise MeasurementError(
                f"{flag}: --meter cuda runs a script as it is; use --meter cpu or simulate it, or change the script"
            )
    return options


def _quiet(number: int, step: Step) -> None:
    """Say nothing of the steps of a trial."""
