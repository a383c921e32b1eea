"""The steps of a training script: where one ends, and which part of it runs.

A step ends when the optimizer that stepped first has stepped again; one that takes over from it is the first then. So
the micro-batches of an accumulation are one step, and so are the steps of a generator's and a discriminator's
optimizer. The forward pass lasts until a backward pass begins. What runs between the last backward pass and the end of
a step, clipping too, is the optimizer's part.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actbench.measuring.meters import footprint
from actbench.model.records import Phase
from actbench.ops.simulation import plain_tensors
from actbench.simulator.cost.recorder import Done, Recorder
from actbench.simulator.optimizerstate import use_foreach
from actbench.simulator.overrides import replaced
from actbench.simulator.tracker import StorageTracker

_MOST = 8
"""Steps after which a run ends even if no two were equal: each batch may have its own shape."""


class Ended(BaseException):
    """The steps that are read have run; no ``except Exception`` of a script stops it."""


_LEFT = 8
"""Steps of another optimizer after which the one that stepped first is left: a GAN's critic takes fewer in a row."""

_ALIKE = 1e-4
"""The share of the bytes in which steps that are alike may differ."""


_LITTLE = 1e-6
"""The share of the bytes by which a step has to grow for anybody to care."""


@dataclass
class Step:
    """One step, by numbers of events of the tracker.

    Attributes:
        begun: Events before the step; ``ended`` those before its end, ``updating`` before the optimizer's part.
        forwards: The beginning and the end of each forward pass.
        peak_bytes: Most bytes alive; ``live_bytes`` are those at the end.
        peak_at: Events before the peak.
        gradients: Names of the storages of gradients, which have ``gradients_bytes``.
        done: What the operators did.
        cyclic_bytes: What reference cycles held at the end, until Python's collector ran.
    """

    begun: int
    updating: int = 0
    ended: int = 0
    forwards: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: int = 0
    live_bytes: int = 0
    gradients: set[int] = field(default_factory=set)
    gradients_bytes: int = 0
    cyclic_bytes: int = 0
    done: Sequence[Done] = ()

    def is_like(self, other: Step) -> bool:
        """Return whether another step reached about the same peak and left about the same bytes.

        A loss that one step in two keeps, or a batch with one token more, makes no other step.
        """
        pairs = ((self.peak_bytes, other.peak_bytes), (self.live_bytes, other.live_bytes))
        return all(abs(one - another) <= _ALIKE * max(one, another) for one, another in pairs)

    def has_grown_from(self, other: Step) -> bool:
        """Return whether it left a little more than another step: whether a third one does, too, is worth a step."""
        return _LITTLE * self.live_bytes < self.live_bytes - other.live_bytes


class Counting(Protocol):
    """Counts what a script allocates, and knows moments by numbers that grow.

    Attributes:
        is_cuda: Whether optimizers take their default implementations for CUDA parameters.
    """

    is_cuda: bool

    def now(self) -> int:
        """Return the number of this moment."""

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that is not counted."""

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Note gradients that an optimizer has used in a step."""

    def end(self, step: Step) -> None:
        """Fill in what is known of a step when it ends, after Python's collector ran."""

    def begin(self) -> int:
        """Begin the next step, whose peak begins at the bytes of now, and return the number of this moment."""


class Tracked(Counting):
    """Counts by the events of a tracker of storages."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self.is_cuda = tracker.host_is_free

    def now(self) -> int:
        """Return the number of events; a sum of gradients that waits to be counted is counted now."""
        assert self._tracker.live_bytes >= 0
        return len(self._tracker.events)

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in host memory, and not on a card."""
        return self._tracker.leaves_out(tensor)

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Note the names of gradients."""
        step.gradients |= self._tracker.names(gradients)

    def end(self, step: Step) -> None:
        """Read the tracker before and after Python's collector ran."""
        tracker, before = self._tracker, self._tracker.live_bytes
        gc.collect()
        step.live_bytes, step.ended = tracker.live_bytes, len(tracker.events)
        step.cyclic_bytes = before - step.live_bytes
        step.peak_bytes, step.peak_at = tracker.peak_bytes, tracker.peak_at

    def begin(self) -> int:
        """Begin a new peak."""
        self._tracker.reset_peak()
        return self.now()


class Steps:
    """Follows the steps of a script, by hooks on all optimizers and on autograd.

    Args:
        counting: Counts what is allocated.
        ended: Called at the end of each step.
        recorder: Notes what operators do.

    Attributes:
        done: The steps that have ended.
        optimizers: All optimizers that have stepped.
        phase: The part of the step that runs.
        passes: Backward passes so far.
        turned: Told of the part of the step that begins.
        passing: Called by the line of the script that begins a backward pass.
    """

    def __init__(self, counting: Counting, ended: Callable[[Step], object], recorder: Recorder | None = None) -> None:
        self._counting, self._ended = counting, ended
        self._recorder = recorder or Recorder(lambda: self.phase)
        self.done: list[Step] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.phase: Phase = "forward"
        self._step = Step(0)
        self._forward_at = 0
        self._recorded = 0
        self._depth = self.passes = 0
        self.turned: Callable[[Phase], object] = lambda phase: None
        self.passing: Callable[[], object] = lambda: None
        self._turns: Counter[int] = Counter()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow steps inside the block."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_update).remove)
            stack.enter_context(replaced(torch.autograd, "_engine_run_backward", self._running_backward))
            yield

    def are_enough(self, limit: int | None, began: int = 1) -> bool:
        """Return whether enough steps have ended: ``limit`` of them; without a limit, two equal ones in a row.

        ``began`` is the number of the step that makes optimizer state, which counts as the first.
        """
        count = len(self.done)
        if limit is not None:
            return count >= began - 1 + limit
        if count >= began + _MOST:
            return True
        is_settled = count > began + 1 and self.done[-1].is_like(self.done[-2])
        return is_settled and (count > began + 2 or not self.done[-1].has_grown_from(self.done[-2]))

    def steady(self, began: int = 1) -> list[Step]:
        """Return the steps after the first ``began``, the largest of which counts; else the last."""
        return self.done[began:] or self.done[-1:]

    @property
    def running(self) -> Step:
        """The step that runs."""
        return self._step

    def restart(self) -> None:
        """Forget all steps: memory ran out, and the script tries something else."""
        self.done.clear()
        self.optimizers.clear()
        self._begin()

    def _begin(self) -> None:
        begun = self._counting.begin()
        before = self._step.gradients  # which may be alive until the backward pass of the new step
        self._step = Step(begun, gradients=set(before))
        self._forward_at, self._recorded, self.phase = begun, 0, "forward"
        self._recorder.begin()
        self.turned(self.phase)

    def _running_backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a block that is run again inside of the backward pass
                return own(*args, **kwargs)
            self._end_forward()
            self.passing()
            self.passes += 1
            self._depth += 1
            try:
                return own(*args, **kwargs)
            finally:
                self._depth -= 1
                self._end_backward()

        return run

    def _end_forward(self) -> None:
        if self.phase == "optimizer":  # what ran since the last backward pass was another forward pass
            done = self._recorder.done
            done[self._recorded :] = [each._replace(phase="forward") for each in done[self._recorded :]]
        self._step.forwards.append((self._forward_at, self._counting.now()))
        self.phase = "backward"
        self.turned(self.phase)

    def _end_backward(self) -> None:
        self._forward_at = self._step.updating = self._counting.now()
        self._recorded = len(self._recorder.done)
        self.phase = "optimizer"
        self.turned(self.phase)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counting.is_cuda:
            use_foreach(optimizer)
        self.phase = "optimizer"

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)
        self._note_gradients(optimizer)  # now, and not when the update begins: a closure runs both passes inside of it
        if optimizer is not self.optimizers[0] and not self._takes_over(optimizer):
            self._end_backward()
            return
        self._turns.clear()
        step = self._step
        self._counting.end(step)
        step.done = list(self._recorder.done)
        self.done.append(step)
        self._ended(step)
        self._begin()

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        made = [*plain_tensors(*(each.grad for each in parameters if each.grad is not None))]
        gradients = [each for each in made if not self._counting.leaves_out(each)]
        self._counting.gradients(self._step, gradients)
        self._step.gradients_bytes += footprint.stored_bytes(gradients)

    def _takes_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has stepped so often since the first did that the script has left that one."""
        self._turns[id(optimizer)] += 1
        if self._turns[id(optimizer)] <= _LEFT:
            return False
        self.optimizers[:] = [optimizer]
        self.done.clear()
        return True
