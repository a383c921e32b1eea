"""Joins plans from the traces of simulated cases: which traces a plan needs, and what its step measures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.cost.clock import estimate
from actbench.simulator.join import Joiner
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import reserved_bytes
from actbench.simulator.trace import Trace
from actbench.tools.fit.plan import AS_IT_IS, Action, Plan
from actbench.tools.fit.survey import Survey


@dataclass
class Joins:
    """Plans of one model, joined.

    Attributes:
        survey: Simulates the cases whose traces are joined.
        is_simulating: Whether cases whose traces are missing are simulated; otherwise their plans are not joined.
    """

    survey: Survey
    is_simulating: bool = True
    _traces: dict[Case, Trace] = field(default_factory=dict, repr=False)
    _joiners: dict[tuple[Plan, frozenset[Action]], tuple[Joiner, Sequence[str]]] = field(
        default_factory=dict, repr=False
    )

    def step(self, plan: Plan, limit: int) -> Measurement | None:
        """Return what the step of a plan measures; None if it cannot be joined.

        Cases whose traces are missing are simulated: that of the changes around the blocks, and one for each action.
        """
        setting, actions = Plan(plan.around, (), plan.rest), frozenset(plan.actions) - {AS_IT_IS}
        base, trace = self._whole(setting) if self.has_traces else (None, None)
        if base is None or trace is None or not self._can_join(setting, trace, actions):
            return None
        joiner, warnings = self._joiners[setting, actions]
        profile = profiles.get(self.survey.exact.device_profile or profiles.DEFAULT)
        return measured(base, joiner, plan.actions, profile, profile.step_bytes(limit), warnings)

    @property
    def has_traces(self) -> bool:
        """Whether steps have traces; those whose blocks are no chain have none."""
        return self._whole(Plan())[1] is not None

    def _can_join(self, setting: Plan, base: Trace, actions: frozenset[Action]) -> bool:
        """Prepare to join plans of some actions; return whether they can be."""
        if (setting, actions) in self._joiners:
            return True
        # the fewest changes around the blocks with which the blocks do what they do in the setting
        ways = sorted((way.around for way in self.survey.space.ways if way.around <= setting.around), key=len)
        around = setting.around
        for fewer in (each for each in ways if each < around or setting.rest):
            (unchanged,) = self._of_actions(fewer, [AS_IT_IS], base).values()
            if unchanged is not None and unchanged[1].of_blocks() == base.of_blocks():
                around = fewer
                break
        found = self._of_actions(around, actions, base)
        known = {action: each for action, each in found.items() if each is not None}
        if len(known) < len(found):
            return False
        warnings = [text for measured, _ in known.values() for text in measured.warnings]
        traces: dict[Hashable, Trace] = {action: trace for action, (_, trace) in known.items()}
        self._joiners[setting, actions] = Joiner(base, traces), warnings
        return True

    def _of_actions(
        self, around: Action, actions: Iterable[Action], base: Trace
    ) -> dict[Action, tuple[Measurement, Trace] | None]:
        """Return the measurement of each action on all blocks, and its trace with the blocks of the whole model."""
        cases = {action: self.survey.action_case(around, action) for action in actions}
        outcomes = self._outcomes(dict(cases.values()))
        found: dict[Action, tuple[Measurement, Trace] | None] = {}
        for action, (case, _) in cases.items():
            outcome, trace = outcomes.get(case), self._trace(case, outcomes.get(case))
            if trace is not None and len(trace.blocks) < len(base.blocks):
                trace = trace.repeated(base.blocks, self.survey.space.blocks.places)
            found[action] = None if outcome is None or trace is None else (outcome, trace)
        return found

    def _whole(self, plan: Plan) -> tuple[Measurement | None, Trace | None]:
        """Return the measurement of a plan for the whole model, and its trace."""
        case = self.survey.whole_case(plan)
        found = self._outcomes({case: plan}).get(case)
        return found, self._trace(case, found)

    def _outcomes(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        return self.survey.measured(cases) if self.is_simulating else self.survey.known(cases)

    def _trace(self, case: Case, found: Measurement | None) -> Trace | None:
        if case not in self._traces and found is not None and found.trace is not None:
            self._traces[case] = Trace.unpacked(found.trace)
        return self._traces.get(case)


def measured(
    base: Measurement,
    joiner: Joiner,
    actions: Sequence[Hashable],
    profile: DeviceProfile,
    limit: int,
    warnings: Sequence[str],
) -> Measurement:
    """Return what the step measures in which each block has its action, from what the step without any measures."""
    step = joiner.join(actions) if any(actions) else joiner.unchanged
    reserved, expandable = None, step.expandable
    if profile.is_cuda:
        reserved = reserved_bytes(step.run, limit_bytes=limit, expandable=expandable, streams=step.streams)
    time = base.estimated
    if profile.rates is not None and time is not None:
        time = estimate(step.done, profile.rates, profile.efficiencies, asynchronous=profile.is_cuda)
        seconds = {name: getattr(time, name) + step.more_seconds for name in ("step_seconds", "backward_seconds")}
        time = time.model_copy(update=seconds)
    peaks = {phase: getattr(step.phases, f"{phase}_bytes") for phase in ("forward", "backward", "optimizer")}
    over = max(step.peak_bytes, reserved or 0) - limit
    return base.model_copy(
        update={
            "peak_bytes": step.peak_bytes,
            "phase_peaks": step.phases,
            "peak_phase": max(peaks, key=lambda phase: peaks[phase]),
            "peak_parts": None,
            "activation_bytes": base.activation_bytes + step.activation_bytes - joiner.unchanged.activation_bytes,
            "reserved_bytes": reserved,
            "host_bytes": step.host_bytes if base.host_bytes is not None else None,
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
