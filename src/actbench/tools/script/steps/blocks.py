"""What each block of the model that a script trains holds and takes, in each of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from actbench.model.blocks import BlockReadings
from actbench.model.records import Phase
from actbench.simulator import blockmarks
from actbench.simulator.blockmarks import Block, BlockMarks
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.tracker import StorageTracker
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.schemes import trained
from actbench.tools.script.steps.steps import Steps


class StepMarks(BlockMarks):
    """Marks the blocks of a model in one step of a script, which may evaluate the model, too, or cut its batch.

    What runs without a graph is left out. The last forward pass with a backward pass counts.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], tracker: StorageTracker, recorder: Recorder) -> None:
        super().__init__(model, blocks, tracker, recorder)
        self._model = model
        self._whole = self._pass
        self._evaluations = 0

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

    def readings(self) -> BlockReadings | None:
        """Return what each block holds and takes; None where the blocks are no chain, or there are none."""
        self._pass = self._whole
        return super().readings()

    def _running(self) -> Any:
        return None if self._evaluations else super()._running()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._evaluations += 1
        elif self._pass is not None and self._pass.ended is not None:  # of another micro-batch
            self.turn()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._evaluations -= 1


class StepBlocks:
    """Marks the blocks of the model that a script trains, step by step.

    Several models have no blocks here: what is done with a block has to name it in all of them.
    """

    def __init__(self, steps: Steps, tracker: StorageTracker, recorder: Recorder, *, is_on: bool) -> None:
        self._steps, self._tracker, self._recorder = steps, tracker, recorder
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
