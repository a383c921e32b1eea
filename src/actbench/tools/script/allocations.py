"""What a script allocates of the CPU's memory while it runs for real."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from actbench.errors import MeasurementError
from actbench.measuring.meters import footprint
from actbench.measuring.meters.peak import Event
from actbench.measuring.meters.stepevents import Origin
from actbench.measuring.meters.trace import AllocationTrace
from actbench.model.records import Phase
from actbench.model.timeline import OTHER
from actbench.simulator import profiles
from actbench.tools.script.steps.counting import Counting, Step

_UNSEEN = -1
"""Name of the storages that torch's allocator did not make: memory of numpy, of files, of other processes."""


class Allocations(Counting):
    """Counts by a trace of torch's CPU allocator, a part of it for each step, without gaps.

    Attributes:
        is_on: Whether allocations are traced.
        origins: Who made each storage, as far as it is known.
        live_bytes: Bytes alive at the end of the last step; ``peak_bytes`` the most in it.

    Args:
        held: Returns the tensors that are counted even if the allocator did not make them.
    """

    is_cuda = False

    def __init__(self, held: Callable[[], Sequence[Tensor]]) -> None:
        self._held = held
        self._trace: AllocationTrace | None = None
        self._moments = -1
        self._unseen_bytes = 0
        self._blocks = _Blocks({})
        self._gradients: list[tuple[int, set[int]]] = []
        self.is_on = True
        self._is_tracing = self._holds_collector = False
        self.live_bytes = self.peak_bytes = 0

    @property
    def events(self) -> list[Event]:
        """All events so far; the first are storages that the allocator did not make."""
        assert self._trace is not None
        return [(_UNSEEN, self._unseen_bytes), *self._trace.events]

    @property
    def origins(self) -> dict[int, Origin]:
        """Who made each storage, as far as it is known."""
        assert self._trace is not None
        return {**self._trace.origins, _UNSEEN: Origin(OTHER, "not of torch's allocator")}

    def start(self) -> None:
        """Begin to trace, or go on."""
        self._is_tracing = True
        self._trace = AllocationTrace(after=self._trace)
        self._trace.__enter__()
        self._let_collect()
        self.now()

    def stop(self) -> None:
        """Trace no more; what was not read is dropped."""
        if self._is_tracing and self._trace is not None:
            self._trace.__exit__(MeasurementError, None, None)
        self.is_on = self._is_tracing = False
        self._let_collect()

    def _let_collect(self) -> None:
        """Switch the collector on again if :meth:`end` switched it off, and not if the script did."""
        if self._holds_collector:
            gc.enable()
        self._holds_collector = False

    def now(self, part: Phase = "forward") -> int:
        """Return the number of this moment, which the trace has marked."""
        if self.is_on and self._trace is not None:
            self._moments += 1
            self._trace.mark(str(self._moments))
        return self._moments

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Note the addresses of gradients; :meth:`end` finds their names."""
        if self.is_on:
            self._gradients.append((self.now(), footprint.addresses(gradients)))

    def end(self, step: Step) -> None:
        """End a part of the trace, and read it; until :meth:`begin`, nothing is traced, and so nothing is freed."""
        if not self.is_on or self._trace is None:
            gc.collect()
            return
        trace = self._trace
        ended = self.now()
        gc.collect()
        collected = self.now()
        self._holds_collector = gc.isenabled()  # until tracing goes on or stops, which every way out of the run does
        gc.disable()
        trace.__exit__(None, None, None)
        self._is_tracing = False
        self._blocks = _Blocks(trace.named(str(collected)))
        for moment, addresses in self._gradients:
            step.gradients |= trace.names(str(moment), addresses)
        self._gradients.clear()
        unseen = [each for each in self._held() if self._blocks.name(each.untyped_storage().data_ptr()) is None]
        # not those of now: when a run has ended, its models may be gone
        self._unseen_bytes = max(self._unseen_bytes, footprint.stored_bytes(unseen))
        begun = step.begun

        def until(moment: int) -> int:
            return 1 + trace.events_until(str(max(moment, begun)))  # a step without a backward pass has no later ones

        step.peak_at = 1 + trace.peak_at(str(begun), str(ended))
        step.peak_bytes = self._unseen_bytes + trace.peak_bytes(str(begun), str(ended))
        step.live_bytes = self._unseen_bytes + trace.live_bytes(str(collected))
        step.begun, step.updating, step.ended = until(begun), until(step.updating), until(ended)
        step.collected = [(step.ended, until(collected))]
        step.forwards = [(until(first), until(last)) for first, last in step.forwards]
        for span in step.spans:  # which end before the step begins
            moments = (1 + trace.events_until(str(each)) for each in (span.begun, span.ended, *span.batches))
            span.begun, span.ended, *span.batches = moments
        self.live_bytes, self.peak_bytes = step.live_bytes, step.peak_bytes

    def begin(self) -> int:
        """Go on tracing."""
        if self.is_on and not self._is_tracing:
            self.start()
        return self._moments

    def names(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the names of storages that are alive at the end of the last step."""
        found = (self._blocks.name(address) for address in footprint.addresses(tensors))
        return {_UNSEEN if name is None else name for name in found}

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return False: all memory is that of the CPU."""
        return False


class _Blocks:
    """Finds the block that an address is in: a library may lay many storages into one, as safetensors does of a file.

    Args:
        named: The names and bytes of blocks, by address.
    """

    def __init__(self, named: Mapping[int, Event]) -> None:
        self._named, self._begin = named, sorted(named)

    def name(self, address: int) -> int | None:
        """Return the name of the block that has an address; None if none has."""
        before = bisect.bisect_right(self._begin, address)
        if not before:
            return None
        begin = self._begin[before - 1]
        name, amount = self._named[begin]
        return name if address < begin + max(amount, 1) else None


class RealMemory:
    """What ``torch.cuda`` says while a script runs on the CPU: the bytes at the end of the last step, and its peak.

    Torch counts no CPU memory in between.
    """

    devices = 1

    def __init__(self, allocations: Allocations, total_bytes: int) -> None:
        profile = profiles.get("cpu")
        self.name, self.capability = profile.name, profile.compute_capability or (0, 0)
        self.total_bytes = total_bytes
        self._allocations = allocations

    def allocated_bytes(self) -> int:
        """Return the bytes at the end of the last step."""
        return self._allocations.live_bytes

    def peak_allocated_bytes(self) -> int:
        """Return the peak of the last step."""
        return self._allocations.peak_bytes

    def reserved_bytes(self) -> int:
        """Return the bytes at the end of the last step: the CPU's allocator keeps nothing."""
        return self._allocations.live_bytes

    def peak_reserved_bytes(self) -> int:
        """Return the peak of the last step."""
        return self._allocations.peak_bytes

    def free_bytes(self) -> int:
        """Return the bytes of the memory that the script does not have."""
        return max(self.total_bytes - self._allocations.live_bytes, 0)

    def limit_to(self, fraction: float) -> str:
        """Limit nothing: the CPU's allocator knows no limit."""
        return "torch.cuda.set_per_process_memory_fraction limits no memory of a CPU"

    def configure(self, settings: str) -> None:
        """Do nothing: they are settings of the allocator of CUDA."""

    def reset_peak(self) -> None:
        """Do nothing: each step has its own peak."""

    def empty_cache(self) -> None:
        """Do nothing: nothing is kept."""
