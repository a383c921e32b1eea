"""The whole run of a script: its evaluations, saves and largest batch, each once, and not only two equal steps.

A simulated run is cut short: a loader ends its epoch once steps repeat, its largest batch comes second, an evaluation
has a few batches, and the trainers of transformers and Lightning evaluate and save as soon as they can. What a script
keeps from batch to batch is read from the batches that ran, and continued to the number that its loader has. A run on
real tensors is not cut.

An evaluation begins where most of what optimizers train is told to ``eval()``, or where a loader is iterated while no
gradients are recorded; it ends at ``train()``. If a backward pass follows, it was none.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from actbench.device.patches import replaced
from actbench.model.measured import Growth, Measurement, RunEvent, RunPart
from actbench.tools.script.ahead import scan
from actbench.tools.script.libraries.importpatches import Change, changed, combined, patch_on_import, rebind
from actbench.tools.script.libraries.saving import CHECKPOINTS, METHODS, methods_changed
from actbench.tools.script.libraries.trainers import FEWEST, LATER, Trainers
from actbench.tools.script.steps.counting import LOADS, Span, Step
from actbench.tools.script.steps.events import Bytes, run_events
from actbench.tools.script.steps.steps import Steps

FEWEST_SLOW = 4
"""Steps of an epoch before it is cut, where a step takes seconds."""

_MOST = 8
"""Steps of an epoch of which no two in a row are equal."""

_AFTER = 3
"""Steps that run after these, while trainers evaluate and save."""

_ALIKE = 3
"""Epochs after which one has a single batch: nothing is new in it but what is kept from epoch to epoch."""

EVALUATED, EVALUATED_SLOW = 6, 4
"""Batches of an evaluation; fewer where a batch takes seconds, as one that generates does."""

_SLOW_SECONDS = 5.0

_SCAN_SECONDS = 10.0
"""How long a loader's largest batch is looked for."""


class Whole:
    """Follows a script to its end.

    Args:
        steps: The steps of the script.
        line: Returns the line of the user's that runs.
        began: The number of the step that makes optimizer state: 2 with a scheme, which is applied after the first.
        is_cut: Whether epochs are cut short, and the run where it takes ``seconds`` after its first epoch.
        note: Receives sentences about what was not seen.

    Attributes:
        first_epoch: How many steps had ended when the first epoch did.
        epoch_steps: How many steps an epoch has in the real run; None if unknown.
    """

    def __init__(
        self,
        steps: Steps,
        line: Callable[[], str],
        began: int = 1,
        *,
        is_cut: bool,
        note: Callable[[str], None],
        seconds: float = 60.0,
    ) -> None:
        self._steps, self._line, self._is_cut, self._note, self._seconds = steps, line, is_cut, note, seconds
        self._began = began
        self._open: Span | None = None
        self._depth = 0
        self._begun_at = time.monotonic()
        self._settled_at: float | None = None
        self._rest: Step | None = None
        self._trainers = Trainers(lambda: self.is_settled, lambda: self.is_late, lambda: steps.optimizers, note)
        self._loaded: Step | None = None  # that in which something was loaded, and no model has run since
        self._epochs: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        self.first_epoch: int | None = None
        self.epoch_steps: int | None = None
        self._growth: Growth | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the script inside the block."""
        before = self._steps.passing

        def passing() -> None:
            before()
            self._open = None  # a model that trains with its layers in evaluation mode

        self._steps.passing = passing
        with ExitStack() as stack:
            stack.enter_context(replaced(nn.Module, "train", self._switching))
            stack.enter_context(replaced(torch, "save", self._within("save")))
            stack.enter_context(replaced(torch, "load", self._within("load")))
            stack.enter_context(replaced(nn.Module, "load_state_dict", self._continuing("load")))
            stack.enter_context(replaced(Optimizer, "load_state_dict", self._continuing("resume")))
            stack.enter_context(patch_on_import(self._changes(), {}, lambda package: None))
            yield

    def finish(self) -> None:
        """End what is still open, at the end of the script or of its run, and count what ran after the last step."""
        if self._rest is None:
            self._close()
            self._rest = self._steps.end_rest()

    def step_ended(self) -> None:
        """Note that a step has ended."""
        self._open = None
        done, count = self._steps.done, len(self._steps.done)
        if self._settled_at is None:
            is_slow = (time.monotonic() - self._begun_at) / count > _SLOW_SECONDS
            fewest = FEWEST_SLOW if is_slow else FEWEST
            if count >= _MOST or (count >= fewest and done[-1].is_like(done[-2])):
                self._settled_at = time.monotonic()

    @property
    def is_settled(self) -> bool:
        """Whether enough steps have run for what comes after them."""
        return self._settled_at is not None

    @property
    def is_over(self) -> bool:
        """Whether the run has gone on long enough after its first steps."""
        return self._is_cut and self._settled_at is not None and time.monotonic() - self._settled_at > self._seconds

    def ordered(self, loader: DataLoader[Any], batches: Iterator[Any], load: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield the batches of an epoch that run: the first, the largest, and others while steps still differ.

        Args:
            loader: The loader.
            batches: What it makes its batches of: indices of samples.
            load: Makes a batch.
        """
        count = _length(loader)
        epochs = self._epochs.get(loader, 0)
        is_first = not epochs
        if self._is_cut and is_first:
            batches = self._largest_early(loader, batches, load)
        if self._open is not None or not torch.is_grad_enabled():
            yield from self._evaluated(batches, count, EVALUATED if is_first else LATER + 1)
        else:
            yield from self._trained(batches, count, epochs)
        self._epochs[loader] = epochs + 1  # not where the script has read a part, as Lightning does before it trains

    def _evaluated(self, batches: Iterator[Any], count: int | None, most: int) -> Iterator[Any]:
        is_own = self._open is None
        span = self._begin("evaluation") if is_own else self._open
        assert span is not None
        began = time.monotonic()
        for given, batch in enumerate(itertools.islice(batches, most if self._is_cut else None)):
            if self._is_cut and given >= EVALUATED_SLOW and time.monotonic() - began > given * _SLOW_SECONDS:
                break
            span.batches.append(self._steps.now())
            yield batch
        span.of = count  # else the script wanted no more, as Lightning's check before training
        if self._open is span:
            self._close()
            if not is_own:  # what it does with the outputs of all batches
                self._open = Span("evaluation", span.line, self._steps.now(), follows=span)

    def _trained(self, batches: Iterator[Any], count: int | None, epochs: int) -> Iterator[Any]:
        before, given, cut = len(self._steps.done), 0, False
        most = 1 if epochs >= _ALIKE else LATER if epochs else FEWEST_SLOW + _AFTER
        for batch in batches:
            ran = len(self._steps.done) - before
            if self._is_cut and self.is_settled and ran >= most and not self._trainers.is_going_on:
                cut = True
                break
            given += 1
            yield batch
        ran = len(self._steps.done) - before
        if not epochs and self.first_epoch is None and ran:
            self.first_epoch = len(self._steps.done)
            whole = count if cut else given
            self.epoch_steps = None if whole is None else max(ran, round(whole * ran / given))

    def _largest_early(
        self, loader: DataLoader[Any], batches: Iterator[Any], load: Callable[[Any], Any]
    ) -> Iterator[Any]:
        """Return the batches with the largest one as the first that is asked for once there is optimizer state."""
        ahead, sizes, is_cut = scan(batches, load, _SCAN_SECONDS, _length(loader.dataset) or math.inf)
        if is_cut:
            count = _length(loader)
            of = "many" if count is None else f"{count:,}"
            self._note(
                f"the largest batch was looked for among {len(sizes):,} of {of} batches of a DataLoader, in "
                f"{_SCAN_SECONDS:.0f} s"
            )
        largest = ahead.pop(max(range(1, len(sizes)), key=sizes.__getitem__)) if len(sizes) > 1 else None
        return self._with_largest(largest, itertools.chain(ahead, batches))

    def _with_largest(self, largest: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and the largest one after as many steps as there are without optimizer state.

        Where a step takes several batches, it is not the first of one: gradients of those before it are alive then.
        """
        due: int | None = None
        for given, batch in enumerate(batches):
            if due is None and len(self._steps.done) >= self._began:
                due = given + 1 if given > self._began else given
            if largest is not None and due is not None and given >= due:
                yield largest
                largest = None
            yield batch
        if largest is not None:
            yield largest

    def _begin(self, part: RunPart) -> Span:
        self._open = Span(part, self._line(), self._steps.now())
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._steps.put_apart(self._open)
            self._open = None

    def _switching(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def train(module: nn.Module, mode: bool = True) -> Any:
            self._depth += 1
            try:
                result = own(module, mode)
            finally:
                self._depth -= 1
            if not self._depth and (self._open is None) != mode and self._is_trained(module):
                if mode:
                    self._close()
                else:
                    self._begin("evaluation")
            return result

        return train

    def _is_trained(self, module: nn.Module) -> bool:
        """Return whether a module is most of what optimizers train, and no layer or teacher of it."""
        trained = {id(each): each.numel() for each in self._steps.turns.parameters()}
        own = sum(trained.get(id(each), 0) for each in module.parameters())
        return own > 0 and 2 * own >= sum(trained.values())

    def _within(self, part: RunPart) -> Callable[[Any], Any]:
        """Return the change of a function that is a part of the run, with what ran since the last part or step."""

        def change(own: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                before = self._open
                if before is not None and before.follows is None:  # in an evaluation, or another such function
                    return own(*args, **kwargs)
                running = self._steps.running
                begun = self._steps.now() if part == "generation" else running.begun
                if before is not None:
                    before.ends_lowest, begun = True, before.begun
                    self._close()
                span = self._open = Span(part, self._line(), begun)
                try:
                    return own(*args, **kwargs)
                finally:
                    if self._open is span and self._steps.running is running:
                        self._close()
                        self._loaded = running if part in LOADS else None

            return call

        return change

    def _continuing(self, part: RunPart) -> Callable[[Any], Any]:
        """Return the change of a function that takes over what was loaded: it belongs to the load before it."""
        within = self._within(part)

        def change(own: Callable[..., Any]) -> Callable[..., Any]:
            loading = within(own)

            def load_state_dict(*args: Any, **kwargs: Any) -> Any:
                return (loading if self._steps.running is self._loaded else own)(*args, **kwargs)

            return load_state_dict

        return change

    def _changes(self) -> dict[str, Change]:
        within = self._within("save")
        found: dict[str, Change] = {
            name: methods_changed((*_with_tensors(methods), *CHECKPOINTS.get(name, ())), lambda method: within)
            for name, methods in METHODS.items()
        }
        found["safetensors.torch"] = combined(
            [
                lambda module: changed(module, "save_file", within),
                lambda module: rebind(module, "load_file", self._within("load")),
            ]
        )
        sharded = "torch.distributed.checkpoint"
        found[f"{sharded}.state_dict_saver"] = lambda module: rebind(module, "save", within)
        found[f"{sharded}.state_dict_loader"] = lambda module: rebind(module, "load", self._within("load"))
        found["transformers.generation.utils"] = lambda module: changed(
            module.GenerationMixin, "generate", self._within("generation")
        )
        if self._is_cut:
            for name, changes in self._trainers.changes().items():
                found[name] = combined([found[name], *changes])
        return found

    def with_events(self, grown: Callable[[Sequence[Step]], Measurement], found: Bytes) -> Measurement:
        """Return a measurement with what each part of the run needs.

        Args:
            grown: Returns the measurement with what each of some steps leaves.
            found: The bytes at each event.
        """
        done, epoch, began = self._steps.done, self.first_epoch, self._began
        # a script may drop at the end of an epoch what its steps have kept
        measured = grown(done[began:epoch] if epoch is not None and epoch < len(done) else self._steps.steady(began))
        growth = measured.growth
        self._growth = growth
        events = self.events(found)
        is_dropped = (
            growth is not None
            and growth.is_lasting
            and epoch is not None
            and epoch < len(done)
            and done[epoch].live_bytes < done[epoch - 1].live_bytes - growth.step_bytes
        )
        return measured.model_copy(update={"events": events, "growth": None if is_dropped else growth})

    def events(self, found: Bytes) -> tuple[RunEvent, ...]:
        """Return what each part of the run needs, by the bytes at each event, once growth is known (:meth:`with_events`)."""
        return run_events(
            self._steps.done, self._rest, found, self._growth, self.first_epoch, self.epoch_steps, self._began
        )

    def spans(self) -> list[Span]:
        """Return all parts of the run that are no steps."""
        return [span for step in (*self._steps.done, *([self._rest] if self._rest else [])) for span in step.spans]

    def evaluations(self) -> list[str]:
        """Return the lines that begin evaluations, each once."""
        return list(dict.fromkeys(span.line for span in self.spans() if span.part == "evaluation" and span.line))

    def ran(self) -> None:
        """Note that a model has run."""
        self._loaded = None
        if self._open is None:
            return
        self._open.has_graph |= torch.is_grad_enabled()
        if self._open.follows is not None:
            self._open.batches.append(self._steps.now())

    @property
    def is_late(self) -> bool:
        """Whether half of the time is over, so that a trainer should end for what comes after it."""
        return self._settled_at is not None and 2 * (time.monotonic() - self._settled_at) > self._seconds


def _with_tensors(methods: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the methods that save tensors: a Trainer's state and the card of a model are text."""
    yield from (each for each in methods if each[1] != "create_model_card" and each != ("Trainer", "save_state"))


def _length(given: Any) -> int | None:
    """Return the length of a loader or a data set."""
    try:
        return len(given)
    except TypeError:  # a data set that is only iterated
        return None
