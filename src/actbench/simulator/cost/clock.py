"""When the operators of a step are done: the host issues, the device computes, copies and collectives run meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from actbench.model.estimated import OTHERS, Communication, EstimatedTime, OperatorTime
from actbench.model.records import Phase
from actbench.simulator.cost.collectives import Collective
from actbench.simulator.cost.exchanges import Exchanges
from actbench.simulator.cost.links import exchanging
from actbench.simulator.cost.rates import Curve, Efficiencies, Rates, Surface
from actbench.simulator.cost.recorder import Done
from actbench.simulator.cost.work import OperatorWork

WAITING = "(waiting for the host)"
COPYING = "(waiting for copies)"
EXCHANGING = "(waiting for communication)"

WITHOUT_TENSOR_CORES = ("depthwise convolution", "uneven grouped convolution")
"""Kinds whose shares are of the rate of float32, whatever their type."""

_MOST_NAMED = 24


@dataclass
class _Sum:
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    moved: int = 0


@dataclass
class _Clock:
    """Four queues, each with the time at which it has done all that it was given."""

    rates: Rates
    efficiencies: Efficiencies
    asynchronous: bool
    host: float = 0.0
    device: float = 0.0
    copies: float = 0.0
    phases: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    operators: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    beside: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    busy: float = 0.0
    passed: list[float] = field(default_factory=list)
    known: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        links, shares = self.rates.links, self.efficiencies.links
        self.exchanges = Exchanges(lambda found: exchanging(found, links, shares))

    def run(self, done: Sequence[Done]) -> None:
        """Simulate one step."""
        self.phases.clear()
        self.operators.clear()
        self.beside.clear()
        self.busy = 0.0
        self.passed.clear()
        self.exchanges.begin()
        phase: Phase | None = None
        for each in done:
            before = self.device
            if each.phase != phase:
                self._meet()
                phase = each.phase
            self._issue(each)
            self.phases[each.phase] += self.device - before
            self.passed.append(self.device)
        before = self.device
        self._meet()
        if phase is not None:
            self.phases[phase] += self.device - before

    def _meet(self) -> None:
        """Let the device and the queue of collectives wait for each other, as between two parts of a step."""
        self._wait(self.exchanges.time, EXCHANGING)
        self.exchanges.time = self.device

    def _issue(self, done: Done) -> None:
        work = done.work
        self.host += issuing(work, done.phase, self.efficiencies)
        if done.turn.needs is not None:
            self._wait(self.host, WAITING)
            self._wait(self.exchanges.over(done.turn.needs), EXCHANGING)
        if work.collective is not None:
            self._exchange(done, work.collective)
        elif done.turn.is_beside and self.asynchronous:
            seconds = self._computing(work)
            self.exchanges.run(seconds, self.host, done.phase)
            _add(self.beside[work.name], seconds, work)
        elif done.on_host and self.asynchronous and work.kind is not None:
            self._compute_on_host(work, waits=done.phase == "optimizer")
        elif work.kind == "host copy" and self.asynchronous:
            self._copy(work)
        elif work.kind is not None:
            self._compute(work)
        if done.turn.needs is not None:
            self.exchanges.copied_out(self.device)
        # an operator of a CPU runs in the thread that issues it
        if not self.asynchronous:
            self.host = self.device = max(self.host, self.device)

    def _exchange(self, done: Done, found: Collective) -> None:
        """Let collectives run beside what is computed; on a processor nothing does."""
        self._wait(self.exchanges.before(found, done.turn), EXCHANGING)
        seconds = self.exchanges.exchange(found, done.turn, done.phase, self.host, self.device)
        _add(self.beside[found.kind], seconds, done.work)
        if not self.asynchronous:
            self._wait(self.exchanges.time, EXCHANGING)

    def _computing(self, work: OperatorWork) -> float:
        """Return the seconds of an operator; equal ones of a step are mostly one object, which lives as long."""
        if id(work) not in self.known:
            self.known[id(work)] = computing(work, self.rates, self.efficiencies)
        return self.known[id(work)]

    def _compute(self, work: OperatorWork) -> None:
        seconds = self._computing(work)
        self._wait(self.host, WAITING)
        self.device += seconds
        self.busy += seconds
        self._add(work.name, seconds, work)

    def _copy(self, work: OperatorWork) -> None:
        """Copy beside what is computed, which waits for the copy before: one is on its way at any time."""
        self._wait(self.host, WAITING)
        self._wait(self.copies, COPYING)
        # what is copied is counted once where it is read and once where it is written
        share = self.efficiencies.kinds["host copy"]
        self.copies = max(self.copies, self.device) + share.ramp + work.moved / 2 / (self.rates.link * share.memory)

    def _compute_on_host(self, work: OperatorWork, *, waits: bool) -> None:
        """Let the host compute; an optimizer does once the copies and the device are done, and the device waits."""
        seconds = work.moved / self.efficiencies.host.bandwidth
        if not waits:
            self.host += seconds
            return
        self.host = max(self.host, self.device, self.copies) + seconds
        self.device = self.host
        self._add(work.name, seconds, work)

    def _wait(self, until: float, name: str) -> None:
        if until > self.device:
            self._add(name, until - self.device, None)
            self.device = until

    def _add(self, name: str, seconds: float, work: OperatorWork | None) -> None:
        _add(self.operators[name], seconds, work)


def _add(total: _Sum, seconds: float, work: OperatorWork | None) -> None:
    total.calls += 1
    total.seconds += seconds
    total.flops += work.flops if work else 0
    total.moved += work.moved + work.copied if work else 0


def issuing(work: OperatorWork, phase: Phase, efficiencies: Efficiencies) -> float:
    """Return the seconds that the host needs to issue an operator."""
    host = efficiencies.host
    if work.kind is None:
        return host.view + host.listed * work.listed
    if work.kind in ("packing", "computed packing", "host copy") and phase != "optimizer":  # an optimizer calls no hook
        return host.packing
    seconds: float = getattr(host, phase)
    return seconds + host.listed * work.listed


def computing(work: OperatorWork, rates: Rates, efficiencies: Efficiencies) -> float:
    """Return the seconds that the device needs for an operator: its operations and its bytes, which overlap."""
    if work.kind is None or work.collective is not None:
        return 0.0
    share = efficiencies.kinds[work.kind]
    measured = _measured(work, efficiencies)
    if measured is not None:
        least, rate = share.ramp + rates.launch, rates.bandwidth * share.memory
        # a curve takes the logarithm of the bytes
        return measured.at(work.flops, max(work.moved, 1), least, rate)
    seconds = work.moved / (rates.bandwidth * share.memory)
    if work.flops:
        precision = "fp32" if replaced(work, rates) else work.precision
        precision = precision if precision in rates.flops else "fp32"  # TF32 where there is none is float32
        peak = rates.of("fp32" if work.kind in WITHOUT_TENSOR_CORES else precision)
        # what a shape reaches is known of tensor cores alone
        reached = work.reached if precision == work.precision else 1.0
        products = work.flops / (peak * share.flops.get(precision, 1.0) * reached)
        power = efficiencies.overlap
        seconds = float((seconds**power + products**power) ** (1 / power))
    if work.copied and not replaced(work, rates):  # the copies are for tensor cores
        seconds += work.copied / (rates.bandwidth * efficiencies.kinds["elementwise"].memory)
    return seconds + share.ramp + work.launches * rates.launch


def _measured(work: OperatorWork, efficiencies: Efficiencies) -> Curve | Surface | None:
    """Return what an operator took on the device itself; None where it was not measured."""
    known = ((label, work.precision) for label in work.labels)
    return next((efficiencies.operators[key] for key in known if key in efficiencies.operators), None)


def replaced(work: OperatorWork, rates: Rates) -> str:
    """Return the type that an operator multiplies in if the device has no units for it; float32's rate counts then."""
    if not work.flops or work.precision not in ("half", "fp8"):
        return ""
    if work.precision == "half" and work.has_bfloat16 and not rates.has_bfloat16:
        return "bfloat16"
    names = {"half": "bfloat16" if work.has_bfloat16 else "float16", "fp8": "float8"}
    return "" if work.precision in rates.flops else names[work.precision]


def estimate(
    done: Sequence[Done],
    rates: Rates,
    efficiencies: Efficiencies,
    *,
    asynchronous: bool = True,
    passed: list[float] | None = None,
) -> EstimatedTime:
    """Return the time of a step in the steady state: of the second of two.

    Args:
        done: The operators of the step.
        rates: What the device can do.
        efficiencies: What operators reach of that.
        asynchronous: Whether the host runs ahead of the device, as with CUDA.
        passed: Receives the seconds from the beginning of the step until the device has come past each operator.
    """
    clock = _Clock(rates, efficiencies, asynchronous)
    clock.run(done)
    begun, host_begun = clock.device, clock.host
    clock.run(done)
    if passed is not None:
        passed += [moment - begun for moment in clock.passed]
    different = {id(each.work): each.work for each in done}.values()
    # these are counted as elementwise, and the table of times names them
    unknown = sorted({work.name for work in different if not work.is_known})
    guessed = [work for work in different if _measured(work, efficiencies) is None]
    exchanges = any(each.work.collective for each in done)
    beside = sorted(clock.beside.items(), key=lambda item: -item[1].seconds)
    return EstimatedTime(
        step_seconds=clock.device - begun,
        forward_seconds=clock.phases["forward"],
        backward_seconds=clock.phases["backward"],
        optimizer_seconds=clock.phases["optimizer"],
        host_seconds=clock.host - host_begun,
        device_seconds=clock.busy,
        flops=sum(each.work.flops for each in done),
        moved_bytes=sum(each.work.moved + each.work.copied for each in done),
        by_operator=_by_operator(clock.operators) + tuple(_time(*item, is_beside=True) for item in beside),
        communication_seconds=clock.exchanges.busy if exchanges else None,
        exposed_seconds=clock.operators[EXCHANGING].seconds if exchanges else None,
        unknown=tuple(unknown),
        replaced=tuple(sorted({replaced(each, rates) for each in guessed} - {""})),
    )


def communication(done: Sequence[Done]) -> tuple[Communication, ...] | None:
    """Return what one process sends in a step, by kind of collective; None where nothing is exchanged."""
    found = [each.work.collective for each in done if each.work.collective is not None]
    kinds = {each.kind: [other.sent_bytes for other in found if other.kind == each.kind] for each in found}
    sent = (Communication(kind=kind, calls=len(each), sent_bytes=sum(each)) for kind, each in kinds.items())
    return tuple(sent) or None


def _by_operator(sums: dict[str, _Sum]) -> tuple[OperatorTime, ...]:
    """Return the most expensive operators, and the rest as one."""
    ranked = sorted(sums.items(), key=lambda item: -item[1].seconds)
    named, rest = ranked[:_MOST_NAMED], [total for _, total in ranked[_MOST_NAMED:]]
    if rest:
        others = _Sum(
            sum(each.calls for each in rest),
            sum(each.seconds for each in rest),
            sum(each.flops for each in rest),
            sum(each.moved for each in rest),
        )
        named.append((OTHERS, others))
    return tuple(_time(name, each) for name, each in named)


def _time(name: str, total: _Sum, *, is_beside: bool = False) -> OperatorTime:
    return OperatorTime(
        name=name,
        calls=total.calls,
        seconds=total.seconds,
        flops=total.flops,
        moved_bytes=total.moved,
        is_beside=is_beside,
    )
