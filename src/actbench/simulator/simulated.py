"""The simulated meter: one step on fake tensors, with the operators and block size of a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Final

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from actbench import livememory, slowsteps
from actbench.errors import UntraceableError
from actbench.measuring.meters import footprint, watch as watching
from actbench.measuring.meters.meter import MemoryReading, Meter, MeterKind, at_once, forward_alone, held_by_cycles
from actbench.measuring.meters.peak import Event, Moments, alive
from actbench.measuring.meters.stepevents import most_on_host
from actbench.measuring.meters.watch import Watch
from actbench.model.measured import PeakParts
from actbench.model.meters import MeterName
from actbench.ops.simulation import repeated_by
from actbench.packing import savedtensors
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.scheme.wrapped import StepsInBackward, renews_next
from actbench.simulator import card, profiles, simulatedstep
from actbench.simulator.blockmarks import Block, BlockMarks
from actbench.simulator.cost.clock import communication, estimate
from actbench.simulator.cost.recorder import Done, Recorder
from actbench.simulator.cublas import Workspaces
from actbench.simulator.fake import fake_mode, mode_of, shapes_only, to_fake
from actbench.simulator.optimizerstate import make_state, settle_state, use_foreach
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import reserved_bytes
from actbench.simulator.scaled import Ran
from actbench.simulator.simulatedstep import MicroPasses
from actbench.simulator.trace import Trace
from actbench.simulator.tracker import StorageTracker
from actbench.simulator.unmodelled import Unmodelled

_UNTIMED = (
    "No step time is estimated: the speed of {} is unknown; name a card with --device-profile ('actbench devices' "
    "marks those with times est.), or measure this machine with 'actbench calibrate'."
)


class SimulatedMeter(Meter):
    """Counts the bytes of a step without computing it, in the same time for any batch.

    Without a memory limit a step may use what a CUDA context leaves of the device.

    Attributes:
        done: What the operators did of the step that was read last; only collectives if the rates of the device are
            unknown.
        ran: The step that was read last.
        blocks: Blocks of the model whose memory and time are read, each; None to read no blocks.
        trace: The step that was read last, cut at these blocks; None without blocks that run one after the other.
        passes: How many operators had run at the end of each pass of a generation; empty of a training step.
    """

    name: MeterName = "simulated"
    materialize = False

    def __init__(self, profile: DeviceProfile, memory_limit_bytes: int | None = None) -> None:
        self.profile = profile
        self.memory_bytes = profile.step_bytes(memory_limit_bytes)
        self.device = card.CARD if profile.is_cuda else card.CPU
        self._mode = fake_mode()
        self._is_active = False
        self.done: Sequence[Done] = ()
        self.ran: Ran | None = None
        self.blocks: Sequence[Block] | None = None
        self.trace: Trace | None = None
        self.passes: list[int] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make new tensors fake and run the device's operators; reentrant."""
        if self._is_active:
            yield
            return
        self._is_active = True
        try:
            with warnings.catch_warnings(), self.operators(), self._mode:
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # FSDP1 does
                yield
        finally:
            self._is_active = False

    def operators(self) -> AbstractContextManager[None]:
        """Let fake tensors be on the simulated device."""
        return card.simulated(self.profile)

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Make the module's parameters and buffers fake ones on the simulated device, in place.

        A module that is already fake keeps its fake tensor mode, since its loss and batches belong to it too.

        Raises:
            UntraceableError: The model has recurrent layers, and the device is a CPU.
        """
        recurrent = next((type(m).__name__ for m in setup.module.modules() if isinstance(m, nn.RNNBase)), None)
        if recurrent is not None and not self.profile.is_cuda:
            raise UntraceableError(
                f"--meter simulated: the model holds a {recurrent}, and fake tensors do not show what a CPU saves for "
                "each of its time steps; measure it with --meter cpu, or simulate a card"
            )
        self._mode = mode_of(setup.module) or self._mode
        with self.operators():
            to_fake(setup.module, self._mode, self.device)
        return replace(setup, keeps_gradients=self.profile.keeps_gradients)

    def place(self, batch: Batch) -> Batch:
        """Return the batch as fake tensors on the simulated device."""
        with self.active():
            return {name: tree_map(self._fake, value) for name, value in batch.items()}

    def memory(self, step: TrainStep, watch: Watch | None = None) -> MemoryReading:
        """Run the step on fake tensors and read the tracker, even if the step does not fit.

        Raises:
            UntraceableError: The model needs values, or an operator without a fake form.
        """
        recorder = Recorder(lambda: step.phase, all_operators=self.profile.rates is not None)
        unmodelled = Unmodelled(self.profile)
        tracker = StorageTracker(
            rounding=self.profile.rounding_bytes,
            host_is_free=self.profile.is_cuda,
            temporaries=unmodelled.temporaries,
            workspaces=Workspaces(self.profile),
            observe=recorder.note,
            made=watch.made if watch else lambda name, func: None,
        )
        repeated, parameters = repeated_by(recorder.repeating), step.setup.module.parameters()
        followed = slowsteps.followed(parameters, lambda: step.phase)
        if (live := livememory.listening()) is not None:
            live.follow(where=lambda: (None, step.phase), limit=lambda: self.memory_bytes)
        marks = BlockMarks(step.setup.module, self.blocks or (), tracker, recorder)
        watched = watch.watching() if watch else nullcontext()
        with followed, self.active(), shapes_only(), repeated, tracker, watched, marks.watching():
            if self.profile.uses_foreach:
                use_foreach(step.optimizer)
            self.passes = []
            reading, run = _read(step, tracker, recorder, watch, marks, self.passes)
        grows, streams = step.setup.expandable_segments, tracker.communicated.streams
        if self.profile.is_cuda:
            reserved = reserved_bytes(run, limit_bytes=self.memory_bytes, expandable=grows, streams=streams)
            reading = replace(reading, reserved_bytes=reserved, host_bytes=most_on_host(tracker.host))
        self.ran = Ran(reading, run, streams, grows)
        self.done = recorder.done
        rates, shares, untimed, time = self.profile.rates, self.profile.efficiencies, None, None
        if why := step.setup.limits.estimated:
            untimed = f"No step time is estimated: {why}."
        elif rates is None:
            untimed = _UNTIMED.format(self.profile.name)
        elif step.trains:  # a generation has the times of its passes
            time = estimate(self.done, rates, shares, asynchronous=self.profile.is_cuda, passed=marks.passed)
        timed = replace(reading, estimated=time, communication=communication(self.done), untimed=untimed)
        traced = marks.trace() if self.blocks else None
        self.trace = traced and replace(traced, expandable=grows)
        timed = replace(timed, blocks=marks.readings(), approximate=unmodelled.reasons())
        return replace(timed, simulated="cuda" if self.profile.is_cuda else "cpu").against(self.memory_bytes)

    def pass_seconds(self) -> tuple[float, ...]:
        """Return the estimated time of each pass of the generation that was read last; empty without rates."""
        rates, begun, found = self.profile.rates, 0, []
        for ended in self.passes if rates is not None else ():
            assert rates is not None
            done = self.done[begun:ended]
            time = estimate(done, rates, self.profile.efficiencies, asynchronous=self.profile.is_cuda)
            found.append(time.step_seconds)
            begun = ended
        return tuple(found)

    def seconds(self, step: TrainStep, steps: int, before: Callable[[], object] = at_once) -> None:
        """Return None: a step that is not computed takes no time that means anything."""
        return

    def _fake(self, value: object) -> object:
        return self._mode.from_tensor(value).to(self.device) if isinstance(value, Tensor) else value


def _read(
    step: TrainStep,
    tracker: StorageTracker,
    recorder: Recorder,
    watch: Watch | None,
    marks: BlockMarks,
    generated: list[int],
) -> tuple[MemoryReading, list[list[Event]]]:
    """Return the reading of one step in the steady state, and the events of two steps in a row.

    Forward and backward do not depend on optimizer state, so they run once without it, and its bytes are added. The
    optimizer steps twice on the same gradients, and the second step counts; it is one that makes state anew, if any is.
    ``generated`` receives how many operators had run after each pass of a generation.
    """
    tracker.add(footprint.everything(step))
    has_matrices = any(parameter.dim() == 2 for parameter in step.setup.module.parameters())
    if has_matrices or footprint.own_weights(step.setup.module):  # those that FSDP shares out may be vectors
        tracker.keep_workspaces()  # the steps before have multiplied matrices
    alone = _settle(step, tracker)
    weights = [tensor for tensor in footprint.weights(step.setup.module) if not tracker.leaves_out(tensor)]
    weights_named = tracker.names(weights)
    passes = MicroPasses(step, tracker, recorder, all_run=watch is not None)
    packed: set[int] = set()
    cached: set[int] = set()

    def turn() -> None:
        passes.turn()
        marks.turn()
        if watch:
            packed.update(tracker.names_of(savedtensors.packed_storages()))

    if watch:
        simulatedstep.own_before(watch, tracker)
    step.around_forward = turn

    def passed(tensors: Sequence[Tensor]) -> None:
        cached.update(tracker.names(tensors))
        generated.append(len(recorder.done))

    step.around_cache = passed
    own = footprint.own_weights(step.setup.module)
    renews_next(step.optimizer)  # it may step in the backward pass
    loss, before, begun = _forward(step, tracker, recorder)
    gathered = tracker.names(footprint.gathered(step.setup.module, own))
    tracker.communicated.gathered |= gathered
    held = alive(tracker.events) if gathered else {}
    after = tracker.live_bytes - sum(held.get(name, 0) for name in gathered)
    step.backward(loss)
    step.around_forward = lambda: None
    recorder.is_on = False
    marks.ended()
    gradients = [tensor for tensor in footprint.gradients(step) if not tracker.leaves_out(tensor)]
    gradients_bytes, gradients_named = footprint.stored_bytes(gradients), tracker.names(gradients)
    if watch:
        simulatedstep.own(watch, tracker, watching.gradients(step))
    del loss, gradients
    peak_bytes, peak_at, updating = tracker.peak_bytes, tracker.peak_at, len(tracker.events)
    host_updating = len(tracker.host)
    marks.updating()
    made, cyclic = make_state(step, tracker)
    at_first = marks.state_bytes = made
    marks.cyclic_bytes, marks.micro_batches = cyclic, len(step.micro_batches)
    state_named = tracker.names(footprint.optimizer_state(step.optimizer))
    if watch:
        simulatedstep.own(watch, tracker, watching.state(step))
    repeating, host_repeating = len(tracker.events), len(tracker.host)
    marks.updating()
    recorder.is_on = True
    renews_next(step.optimizer)
    step.update()
    events = tracker.events
    state = [tensor for tensor in footprint.optimizer_state(step.optimizer) if not tracker.leaves_out(tensor)]
    more = PeakParts(optimizer_bytes=max(made, 0))
    if tracker.peak_bytes + cyclic > peak_bytes + made:
        peak_bytes, peak_at, made = tracker.peak_bytes + cyclic, tracker.peak_at, 0
        more = PeakParts(temporary_bytes=cyclic)
    step.notes = held_by_cycles(cyclic, peak_bytes + made)
    moments = Moments(begun, passes.forwards(begun), updating)
    phase_peaks = moments.peaks(events, repeating, at_first)
    kinds = moments.kinds(
        events,
        weights=weights_named,
        state=state_named | tracker.names(state),
        gradients=gradients_named | passes.replaced,
        packed=packed,
        cached=cached,
        communicated=tracker.communicated,
    )
    # workspaces were there before the step, and are no batch
    kinds = {name: kind for name, kind in kinds.items() if name not in tracker.workspaces}
    if watch:
        parts = simulatedstep.Parts(moments, repeating, at_first, peak_at, kinds, (host_updating, host_repeating))
        watch.events = simulatedstep.whole_step(tracker, parts, watch)
    reading = MemoryReading(
        weights_bytes=footprint.stored_bytes(weights),
        gradients_bytes=gradients_bytes,
        optimizer_bytes=footprint.stored_bytes(state),
        activation_bytes=after - before if alone is None else alone[1] - alone[0],
        peak_bytes=peak_bytes + made,
        peak_phase=moments.phase(peak_at),
        phase_peaks=phase_peaks,
        peak_parts=moments.parts(events, peak_at, kinds, more),
    )
    step_taken, update = events[begun:updating], events[repeating:]
    return reading, [events[:begun], step_taken, events[updating:repeating], update, step_taken, update]


def _settle(step: TrainStep, tracker: StorageTracker) -> tuple[int, int] | None:
    """Run what leaves something to the passes that count; return what :func:`forward_alone` does, in bytes."""
    if isinstance(step.optimizer, StepsInBackward):
        step()  # the backward pass makes its state
        settle_state(tracker)
    elif step.setup.retained_outputs:
        step.backward(step.forward())
        step.abandon()
    return forward_alone(step, lambda: tracker.live_bytes)


def _forward(step: TrainStep, tracker: StorageTracker, recorder: Recorder) -> tuple[Tensor, int, int]:
    """Run a forward pass as from the second step on; return the loss, and the bytes alive and events before the pass.

    Tensors that modules hold from one step to the next are no activations: they exist before the pass, which replaces
    them. If the first pass makes such tensors, or gradients stay from step to step, a whole step runs before the one
    that counts.
    """
    held_bytes = _held_bytes(step, tracker)
    tracker.reset_peak()
    before, begun = tracker.live_bytes, len(tracker.events)
    recorder.begin()
    loss = step.forward()
    if _held_bytes(step, tracker) == held_bytes and not step.setup.keeps_gradients:
        return loss, before, begun
    turn, step.around_forward = step.around_forward, lambda: None  # all micro-batches run, whose losses are then freed
    step.backward(loss)
    step.around_forward = turn
    del loss
    step.abandon()
    tracker.reset_peak()
    before, begun = tracker.live_bytes, len(tracker.events)
    recorder.begin()
    return step.forward(), before, begun


def _held_bytes(step: TrainStep, tracker: StorageTracker) -> int:
    made = footprint.made_tensors(step.setup.module)
    tracker.add(made)
    return footprint.stored_bytes(made)


SIMULATED: Final = MeterKind(lambda case: SimulatedMeter(profiles.of_case(case), case.memory_limit_bytes))
"""The simulated meter, as the entry point names it."""
