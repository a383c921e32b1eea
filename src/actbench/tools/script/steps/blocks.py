"""What each block of the model that a script trains holds and takes in each of its steps; and these steps as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from actbench.model.blocks import BlockReadings
from actbench.model.measured import Measurement
from actbench.model.records import Phase
from actbench.simulator import blockmarks
from actbench.simulator.blockmarks import Block, BlockMarks
from actbench.simulator.cost.clock import estimate
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.join import Joiner
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.segments import Place
from actbench.simulator.trace import BEFORE, STATE, Segment, Trace, labels_of
from actbench.simulator.tracker import StorageTracker
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.schemes import trained
from actbench.tools.script.steps.steps import Steps

_MORE_SECONDS = 0.02
"""Share of the time of micro-batches like the last one by which others may make a step's time another one."""


class StepMarks(BlockMarks):
    """Marks the blocks of a model in one step of a script, which may evaluate the model, too, or cut its batch.

    Blocks that run without a graph are left out. The last forward pass with a backward pass counts. What runs between
    two micro-batches, such as the move of the next one to the card, belongs to the second.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], tracker: StorageTracker, recorder: Recorder) -> None:
        super().__init__(model, blocks, tracker, recorder)
        self._model = model
        self._whole = self._pass
        self._evaluations = self.micro_batches = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark what runs inside the block, which is one step."""
        with super().watching(), ExitStack() as handles:
            enter = self._model.register_forward_pre_hook(self._begin, prepend=True)
            handles.callback(enter.remove)
            leave = self._model.register_forward_hook(self._end, always_call=True)
            handles.callback(leave.remove)
            self.turn()
            yield

    def forwarded(self) -> None:
        """A backward pass begins."""
        if self._pass is not None and self._pass.forwarded is None:
            self.turn()

    def ended(self) -> None:
        """A backward pass has ended, or a part of the step without one."""
        if self._pass is not None and self._pass.forwarded is not None and self._pass.ended is None:
            super().ended()
            self._whole = self._pass
            self.micro_batches += 1

    def readings(self) -> BlockReadings | None:
        """Return what each block holds and takes; None where the blocks are no chain, or there are none."""
        self._pass = self._whole
        return super().readings()

    def trace_of(self, step: Step, state: Set[int]) -> Trace | None:
        """Return the step, which has ended, as a value; None where the blocks are no chain, or there are none.

        As in the trace of a case, optimizer state, which ``state`` names, is made between the passes and the update.
        """
        self._pass = self._whole
        if self._pass is None or self._pass.ended is None:
            return None
        self.updates = self._pass.ended, self._pass.ended
        on_host = sum(1 for event in self._tracker.host if event.at <= step.ended)
        found = self._traced(Place(step.ended, len(step.done), on_host), step.done)
        return found and _with_state_apart(found, state, step.gradients)

    def _running(self) -> Any:
        return None if self._evaluations else super()._running()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._evaluations += 1
        elif self._pass is not None and (ended := self._pass.ended) is not None:  # of another micro-batch
            self.turn()
            self._pass.begun = ended

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._evaluations -= 1


class StepBlocks:
    """Marks the blocks of the model that a script trains, step by step.

    Several models have no blocks here: what is done with a block has to name it in all of them.
    """

    def __init__(
        self, steps: Steps, tracker: StorageTracker, recorder: Recorder, profile: DeviceProfile, *, is_on: bool
    ) -> None:
        self._steps, self._tracker, self._recorder, self._profile = steps, tracker, recorder, profile
        self._model: nn.Module | None = None
        self._blocks: Sequence[Block] = ()
        self._marks: dict[int, StepMarks] = {}
        self._watching = ExitStack()
        self._is_on = is_on
        steps.turned = self._turned

    def find(self, models: Sequence[nn.Module]) -> None:
        """Find the blocks of the model that is trained, before schemes replace parts; a second call does nothing.

        The next step is the first whose blocks are marked.
        """
        found = [model for model, _ in trained(models, self._steps.optimizers)]
        if self._is_on and self._model is None and len(found) == 1:
            self._model, self._blocks = found[0], blockmarks.found(found[0])

    def passed(self, step: Step) -> list[float]:
        """Return the list that receives the seconds until the device has come past each operator of a step."""
        return self._marks[step.begun].passed if step.begun in self._marks else []

    def readings(self, step: Step) -> BlockReadings | None:
        """Return what each block holds and takes in a step, once these seconds are known; None if it has no blocks."""
        return self._marks[step.begun].readings() if step.begun in self._marks else None

    def trace(self, step: Step, found: Measurement, state: Set[int], *, expandable: bool) -> Trace | None:
        """Return a step as a value, if it tells what was measured of the step; None also if the step has no blocks.

        It would tell something else where an earlier micro-batch is larger than the last one, or where another model
        or optimizer steps between them. ``state`` names storages of optimizer state; segments grow if ``expandable``.
        """
        trace = self._marks[step.begun].trace_of(step, state) if step.begun in self._marks else None
        if trace is None or found.estimated is None:
            return None
        trace = replace(trace, expandable=expandable)
        again, profile = Joiner(trace, {}).unchanged, self._profile
        assert profile.rates is not None
        seconds = estimate(again.done, profile.rates, profile.efficiencies, asynchronous=profile.is_cuda).step_seconds
        more = found.estimated.step_seconds - seconds
        is_told = again.phases == found.phase_peaks and abs(more) <= _MORE_SECONDS * seconds
        return replace(trace, more_seconds=more) if is_told else None

    def _turned(self, phase: Phase) -> None:
        """A part of a step begins."""
        if not self._blocks or self._model is None:
            return
        step = self._steps.running
        if phase == "forward":
            self._watching.close()
            marks = StepMarks(self._model, self._blocks, self._tracker, self._recorder)
            self._watching.enter_context(marks.watching())
            self._marks[step.begun] = marks
        elif (running := self._marks.get(step.begun)) is not None:
            running.forwarded() if phase == "backward" else running.ended()


def _with_state_apart(trace: Trace, state: Set[int], gradients: Set[int]) -> Trace:
    """Return a trace in which optimizer state is made after the passes, and gradients from before are named."""
    before, (_, *passes) = trace.segments[BEFORE].events, labels_of(len(trace.blocks))[:-2]
    own = state - {name for label in passes for name, _ in trace.segments[label].events}
    made = tuple(event for event in before if event[0] in own)
    left = tuple(event for event in before if event[0] not in own)
    return replace(
        trace,
        segments={**trace.segments, BEFORE: Segment(left), STATE: Segment(made)},
        gradients=tuple(name for name, _ in left if name in gradients),
        follows=True,
        state_bytes=sum(amount for _, amount in made),
    )
