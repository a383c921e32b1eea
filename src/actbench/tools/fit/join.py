"""Joins plans from the traces of simulated cases: which traces a plan needs, and what its step measures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.cost.clock import estimate
from actbench.simulator.join import Joined, Joiner
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import reserved_bytes
from actbench.simulator.trace import Trace
from actbench.tools.fit.plan import AS_IT_IS, Action, Around, Plan

Setting = tuple[Around, Action]
"""What is changed around the blocks, and what is done with the modules outside of them."""


class Traced(Protocol):
    """What simulates the cases whose traces are joined."""

    def measured(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        """Simulate what was not simulated yet; return the measurements."""

    def known(self, cases: Iterable[Case]) -> dict[Case, Measurement]:
        """Return the measurements of those cases that were simulated."""

    def action_case(self, around: Around, action: Action) -> tuple[Case, Plan]:
        """Return the case of an action on all blocks, of a copy of the model with few of them if there is one."""

    def whole_case(self, plan: Plan) -> Case:
        """Return the case of a plan for the whole model."""

    def surveyed(self) -> Iterable[Around]:
        """Return the ways of computing whose steps without further changes were simulated."""


@dataclass
class Joins:
    """Plans of one model, joined.

    Attributes:
        of: What simulates the cases whose traces are joined.
        device_profile: The simulated device.
        is_simulating: Whether cases whose traces are missing are simulated; otherwise their plans are not joined.
    """

    of: Traced
    device_profile: str
    is_simulating: bool = True
    _traces: dict[Case, Trace] = field(default_factory=dict, repr=False)
    _joiners: dict[tuple[Setting, frozenset[Action]], tuple[Joiner, Sequence[str]]] = field(
        default_factory=dict, repr=False
    )

    def step(self, plan: Plan, limit: int) -> Measurement | None:
        """Return what the step of a plan measures; None if it cannot be joined.

        Cases whose traces are missing are simulated: that of the changes around the blocks, and one for each action.
        """
        setting, actions = (plan.around, plan.rest), frozenset(plan.actions) - {AS_IT_IS}
        if not actions or not self.has_traces:
            return None
        case = self.of.whole_case(Plan(plan.around, (), plan.rest))
        found = self._outcomes({case: Plan(plan.around, (), plan.rest)}).get(case)
        if found is None:
            return None
        known = self._joiners.get((setting, actions)) or self._joiner(setting, actions)
        if known is None:
            return None
        joiner, warnings = self._joiners[setting, actions] = known
        profile = profiles.get(self.device_profile)
        return measured(found, joiner.join(plan.actions), profile, profile.step_bytes(limit), warnings)

    def _joiner(self, setting: Setting, actions: frozenset[Action]) -> tuple[Joiner, Sequence[str]] | None:
        """Return what joins plans of some actions, and the warnings of these."""
        base = self._whole(Plan(setting[0], (), setting[1]))
        if base is None:
            return None
        around = self._alike(base, setting)
        cases = {action: self.of.action_case(around, action) for action in actions}
        outcomes = self._outcomes(dict(cases.values()))
        traces = {action: self._trace(of_action, outcomes.get(of_action)) for action, (of_action, _) in cases.items()}
        known = {action: trace for action, trace in traces.items() if trace is not None}
        if len(known) < len(actions):
            return None
        count = len(base.blocks)
        whole: dict[Hashable, Trace] = {
            action: trace if len(trace.blocks) == count else trace.repeated(base.blocks)
            for action, trace in known.items()
        }
        return Joiner(base, whole), [text for found in outcomes.values() for text in found.warnings]

    def _alike(self, base: Trace, setting: Setting) -> Around:
        """Return the fewest changes around the blocks with which the blocks do what they do in a setting."""
        around, rest = setting
        within = [each for each in self.of.surveyed() if each <= around and (each < around or rest)]
        for fewer in sorted(within, key=len):
            trace = self._whole(Plan(fewer))
            if trace is not None and _does_alike(trace, base):
                return fewer
        return around

    def _whole(self, plan: Plan) -> Trace | None:
        """Return the trace of the whole model."""
        case = self.of.whole_case(plan)
        return self._trace(case, self._outcomes({case: plan}).get(case))

    def _outcomes(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        return self.of.measured(cases) if self.is_simulating else self.of.known(cases)

    @property
    def has_traces(self) -> bool:
        """Whether steps have traces; those of a script have none."""
        return self._whole(Plan()) is not None

    def _trace(self, case: Case, found: Measurement | None) -> Trace | None:
        if case not in self._traces and found is not None and found.trace is not None:
            self._traces[case] = Trace.unpacked(found.trace)
        return self._traces.get(case)


def _does_alike(one: Trace, other: Trace) -> bool:
    """Whether the blocks of two traces run the same, and allocate and free the same bytes of their own."""
    return list(_own(one)) == list(_own(other))


def _own(trace: Trace) -> Iterator[object]:
    """Yield what blocks do with what they allocate themselves, and their operators."""
    keys = trace.keys()
    for label, segment in trace.segments.items():
        if label.block >= 0:
            own = [(keys[name], amount) for name, amount in segment.events if keys[name][0].block == label.block]
            yield label, own, [trace.operators[place] for place in segment.operators]


def measured(
    base: Measurement, step: Joined, profile: DeviceProfile, limit: int, warnings: Sequence[str]
) -> Measurement:
    """Return what a joined step measures, from what the step without actions on blocks does."""
    reserved, expandable = None, step.expandable
    if profile.is_cuda:
        reserved = reserved_bytes(step.run, limit_bytes=limit, expandable=expandable, streams=step.streams)
    time = base.estimated
    if profile.rates is not None and time is not None:
        time = estimate(step.done, profile.rates, profile.efficiencies, asynchronous=profile.is_cuda)
    peaks = {phase: getattr(step.phases, f"{phase}_bytes") for phase in ("forward", "backward", "optimizer")}
    over = max(step.peak_bytes, reserved or 0) - limit
    return base.model_copy(
        update={
            "peak_bytes": step.peak_bytes,
            "phase_peaks": step.phases,
            "peak_phase": max(peaks, key=lambda phase: peaks[phase]),
            "peak_parts": None,
            "activation_bytes": step.activation_bytes,
            "reserved_bytes": reserved,
            "host_bytes": step.host_bytes if profile.is_cuda else None,
            "memory_limit_bytes": limit,
            "over_limit_bytes": over if over > 0 else None,
            "estimated": time,
            "remedies": (),
            "sites": (),
            "warnings": tuple(dict.fromkeys((*base.warnings, *warnings))),
            "blocks": None,
            "trace": None,
        }
    )
