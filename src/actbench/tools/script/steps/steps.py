"""The steps of a training script: where one ends, and which part of it runs.

A step ends when all optimizers have had their turn (:mod:`actbench.tools.script.steps.turns`). So the micro-batches of
an accumulation are one step, and so are the steps of a generator's and a discriminator's optimizer. Where hooks step
parameters one by one inside of a backward pass, the step ends with that pass, as it does in a script that makes no
optimizer. The forward pass lasts until a backward pass begins. What runs between the last backward pass and the end of
a step, clipping too, is the optimizer's part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actbench.device.patches import replaced
from actbench.measuring.meters import footprint
from actbench.model.records import Phase
from actbench.ops.simulation import plain_tensors
from actbench.scheme.wrapped import renews_next
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.optimizerstate import use_foreach
from actbench.tools.script.steps.counting import LOADS, Counting, Span, Step
from actbench.tools.script.steps.turns import Turns

_MOST = 7
"""Steps after which a run ends even if no two were equal: each batch may have its own shape."""


_UNUPDATED = 100
"""Backward passes before any optimizer is made after which none is waited for."""


class Ended(BaseException):
    """The steps that are read have run; no ``except Exception`` of a script stops it."""


class Steps:
    """Follows the steps of a script, by hooks on all optimizers and on autograd.

    Args:
        counting: Counts what is allocated.
        ended: Called at the end of each step.
        recorder: Notes what operators do.

    Attributes:
        done: The steps that have ended.
        turns: The turns of all optimizers.
        trains: Whether anything is trained; known when the script has ended.
        makes_state: Whether an optimizer has state after a step; SGD without momentum has none.
        only_timed_from: How many steps are read, if the others are only timed.
        phase: The part of the step that runs.
        passes: Backward passes so far; ``updated_at`` are those at the last update.
        turned: Told of the part of the step that begins.
        passing: Called by the line of the script that begins a backward pass.
        models: Returns the models that run, whose gradients are those of a script without optimizers.
    """

    def __init__(self, counting: Counting, ended: Callable[[Step], object], recorder: Recorder | None = None) -> None:
        self._counting, self._ended = counting, ended
        self._recorder = recorder or Recorder(lambda: self.phase)
        self.done: list[Step] = []
        self.trains = True
        self.only_timed_from: int | None = None
        self.makes_state = False
        self.turns = Turns()
        self._optimizers: list[ref[Optimizer]] = []
        self._updating: list[Optimizer] = []
        self._kept: list[Optimizer] = []
        self.phase: Phase = "forward"
        self._step = Step(0)
        self._forward_at = self._recorded = self._passed_before = 0
        self._depth = self.passes = self.updated_at = 0
        self.turned: Callable[[Phase], object] = lambda phase: None
        self.passing: Callable[[], object] = lambda: None
        self.models: Callable[[], Sequence[nn.Module]] = tuple

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow steps inside the block."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_update).remove)
            stack.enter_context(replaced(torch.autograd, "_engine_run_backward", self._running_backward))
            stack.enter_context(replaced(Optimizer, "__init__", self._making))
            yield

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped; one that the script has dropped is none of them, and its state is freed."""
        return [each for each in (known() for known in self._optimizers) if each is not None]

    def hand_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Put others in the place of the optimizers that have stepped; those that are left have no more turns."""
        self.turns.forget(each for each in self.optimizers if not any(each is other for other in optimizers))
        self._optimizers = [ref(each) for each in optimizers]

    def are_enough(self, limit: int | None, began: int = 1) -> bool:
        """Return whether enough steps have ended: ``limit`` of them; without a limit, two equal ones in a row.

        ``began`` is the number of the step that makes optimizer state, which counts as the first. No two equal ones are
        enough while an optimizer waits for its second turn, which begins with its state.
        """
        count = len(self.done)
        if limit is not None:
            return count >= began - 1 + limit
        if self.turns.waiting(2):
            return count >= min(max(began, self.turns.newest) + _MOST, began + 2 * _MOST)
        if count >= began + _MOST:
            return True
        is_settled = count > began + 1 and self.done[-1].is_like(self.done[-2])
        return is_settled and (count > began + 2 or not self.done[-1].has_grown_from(self.done[-2]))

    def renew(self, began: int = 1) -> None:
        """Once state is made, let the next step make it anew, as only some steps do."""
        if len(self.done) == began:
            for optimizer in self.optimizers:
                renews_next(optimizer)

    @property
    def are_unasked(self) -> bool:
        """Whether the script has neither made an optimizer nor run a backward pass."""
        return not (self.passes or self._optimizers or self.turns.waiting(1))

    @property
    def are_passes(self) -> bool:
        """Whether steps are backward passes: the script makes no optimizer of torch, and updates its weights itself."""
        return self.passes >= _UNUPDATED and not (self._optimizers or self.turns.waiting(1))

    def finish(self, *, has_run: bool) -> None:
        """End the only step when the script has ended: one in which optimizers were waited for, or all of a script.

        A script that trains nothing, such as one that generates, is one forward pass if a model ``has_run``.
        """
        if self.done:
            return
        if self._has_passed and self._optimizers:
            self._end()
        elif has_run and self.are_unasked:
            self.trains = False
            self._step.updating = self._counting.now("forward")
            self._step.forwards.append((self._forward_at, self._step.updating))
            self._end()

    def steady(self, began: int = 1) -> list[Step]:
        """Return the steps after the first ``began``; if there are none, the last."""
        read = self.done[: self.only_timed_from]
        return read[began:] or read[-1:]

    def counted(self, began: int = 1) -> list[Step]:
        """Return the steady steps, and the one that makes optimizer state if none of these has as many rows."""
        steady = self.steady(began)
        most = max((each.rows or 0 for each in steady), default=0)
        return [*(each for each in self.done[began - 1 : began] if (each.rows or 0) > most), *steady]

    def peaks(self, began: int = 1) -> list[int]:
        """Return the peaks of the steps that count."""
        return [each.peak_bytes for each in self.counted(began)]

    def largest(self, began: int = 1) -> Step:
        """Return the step with the largest peak among those that count, the last of several."""
        return max(reversed(self.counted(began)), key=lambda each: each.peak_bytes)

    @property
    def running(self) -> Step:
        """The step that runs."""
        return self._step

    def put_apart(self, span: Span) -> None:
        """End a part of the run that is none of the running step, which begins only now."""
        span.ended = self._counting.now(self.phase)
        self._counting.begin()
        before = self._step.spans[-1] if self._step.spans else None
        if before is not None and before.part in LOADS and span.part in LOADS:
            before.ended, before.part = span.ended, max(before.part, span.part, key=LOADS.index)
        else:
            self._step.spans.append(span)
        self._step.begun = self._forward_at = self._counting.now(self.phase)
        self._recorder.begin()
        self._recorded = 0

    def end_rest(self) -> Step:
        """Count what ran after the last step as one more, which is none of those that are done."""
        self._counting.end(self._step)
        return self._step

    def now(self) -> int:
        """Return the number of this moment."""
        return self._counting.now(self.phase)

    def restart(self) -> None:
        """Forget all steps: memory ran out, and the script tries something else."""
        self.done.clear()
        self._optimizers.clear()
        self._updating.clear()
        self.turns.forget()
        self._begin()

    @property
    def _has_passed(self) -> bool:
        """Whether the step has a backward pass, or the script none at all, and makes gradients in another way."""
        return self.passes > self._passed_before or (not self.passes and self._step.gradients_bytes > 0)

    def _begin(self) -> None:
        begun = self._counting.begin()
        before = self._step.gradients  # which may be alive until the backward pass of the new step
        self._step = Step(begun, gradients=set(before))
        self._forward_at, self._recorded, self.phase = begun, 0, "forward"
        self._passed_before = self.passes
        self._recorder.begin()
        self.turned(self.phase)

    def _end(self) -> None:
        self.turns.end_step()
        step = self._step
        self._counting.end(step)
        step.done = list(self._recorder.done)
        self.done.append(step)
        self.makes_state = self.makes_state or any(map(footprint.optimizer_state, self.optimizers))
        try:
            self._ended(step)
        except Ended:
            self._kept = self.optimizers  # the frames of the script are left; schemes are tried with its optimizers
            raise
        self._begin()

    def _running_backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a block that is run again inside of the backward pass
                return own(*args, **kwargs)
            self.turns.begin_pass()
            self._end_forward()
            self.passing()
            self.passes += 1
            updates = self.turns.updates
            self._depth += 1
            try:
                result = own(*args, **kwargs)
            finally:
                self._depth -= 1
                self._end_backward()
            if self.turns.updates != updates and not self._updating:
                self._end_updates()
            elif self.are_passes:
                self._note_gradients(each for model in self.models() for each in model.parameters())
                self._end()
            return result

        return run

    def _end_forward(self) -> None:
        if self.phase == "optimizer":  # what ran since the last backward pass was another forward pass
            done = self._recorder.done
            done[self._recorded :] = [each._replace(phase="forward") for each in done[self._recorded :]]
        self._step.forwards.append((self._forward_at, self._counting.now("forward")))
        self.phase = "backward"
        self.turned(self.phase)

    def _end_backward(self) -> None:
        self._step.updating = self._forward_at = self._counting.now("backward")
        self._recorded = len(self._recorder.done)
        self.phase = "optimizer"
        self.turned(self.phase)

    def _making(self, own: Callable[..., None]) -> Callable[..., None]:
        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self.turns.made(optimizer)

        return functools.wraps(own)(make)

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counting.is_cuda:
            use_foreach(optimizer)
        self._leave(optimizer)  # an error ended its last update
        if not (self._updating or self.passes):
            self.turns.begin_pass()
        self._updating.append(optimizer)
        self.phase = "optimizer"

    def _leave(self, optimizer: Optimizer) -> None:
        """Leave an update, and those that run inside of it."""
        for place, each in enumerate(self._updating):
            if each is optimizer:
                del self._updating[place:]
                break

    def _end_update(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is each for each in self.optimizers):
            self._optimizers.append(ref(optimizer))
        self._leave(optimizer)
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        self._note_gradients(parameters)  # now, and not when the update begins: a closure runs both passes inside of it
        self.turns.update(optimizer)
        self.updated_at = self.passes
        if self._depth:
            self.phase = "backward"
        elif not self._updating:
            self._end_updates()

    def _end_updates(self) -> None:
        """End the step, unless another optimizer is to have its turn, with a forward pass of its own or without."""
        if self._has_passed and self.turns.are_complete:
            self._end()
        else:
            self._forward_at = self._counting.now("optimizer")
            self._recorded = len(self._recorder.done)

    def _note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Note gradients of an optimizer; their bytes too, where all of them wait for the optimizers' part."""
        made = [*plain_tensors(*(each.grad for each in parameters if each.grad is not None))]
        gradients = [each for each in made if not self._counting.leaves_out(each)]
        self._counting.gradients(self._step, gradients)
        if not (self._depth or self._updating):
            self._step.gradients_bytes += footprint.stored_bytes(gradients)
