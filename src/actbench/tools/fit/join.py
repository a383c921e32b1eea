"""Joins plans from the traces of simulated cases: which traces a plan needs, and what its step measures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator.cost.clock import estimate
from actbench.simulator.join import Joiner
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import reserved_bytes
from actbench.simulator.trace import Trace
from actbench.tools.fit.plan import AS_IT_IS, Action, Plan
from actbench.tools.fit.survey import Survey


@dataclass
class _Setting:
    """What plans with the same changes around the blocks are joined from.

    Attributes:
        base: What the step without an action on any block measures.
        trace: Of that step.
        around: The fewest changes around the blocks with which they do what they do in the setting.
        traces: Of each action on all blocks.
        warnings: Of the simulation of each action.
        joiner: Joins these traces.
    """

    base: Measurement
    trace: Trace
    around: Action
    traces: dict[Hashable, Trace] = field(default_factory=dict)
    warnings: dict[Action, Sequence[str]] = field(default_factory=dict)
    joiner: Joiner = field(init=False)

    def __post_init__(self) -> None:
        """Make the joiner."""
        self.joiner = Joiner(self.trace, self.traces)


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
    _grown: dict[Case, Trace | None] = field(default_factory=dict, repr=False)  # with all blocks of the model
    _settings: dict[Plan, _Setting] = field(default_factory=dict, repr=False)

    def step(self, plan: Plan, limit: int) -> Measurement | None:
        """Return what the step of a plan measures; None if it cannot be joined.

        Cases whose traces are missing are simulated: that of the changes around the blocks, and one for each action.
        """
        setting = self._setting(Plan(plan.around, (), plan.rest)) if self.has_traces else None
        actions = frozenset(plan.actions) - {AS_IT_IS}
        if setting is None or not self._knows(setting, actions):
            return None
        warnings = [text for action in actions for text in setting.warnings[action]]
        profile = self.survey.profile
        return measured(setting.base, setting.joiner, plan.actions, profile, profile.step_bytes(limit), warnings)

    def missing_setting(self, plan: Plan) -> dict[Case, Plan]:
        """Return the case of the changes around the blocks that has to be simulated to join a plan."""
        bare = Plan(plan.around, (), plan.rest)
        case = self.survey.whole_case(bare)
        is_joined = self.has_traces and not self.survey.space.blocks.are_changed_with(plan.rest)
        return {case: bare} if is_joined and case not in self.survey.outcomes else {}

    def missing_actions(self, plan: Plan) -> dict[Case, Plan]:
        """Return the cases of actions that must be simulated to join a plan; these at most if its setting has to.

        To learn what its blocks do, a setting that is known may have an unchanged copy simulated.
        """
        if not self.has_traces or self.survey.space.blocks.are_changed_with(plan.rest):
            return {}
        setting = None if self.missing_setting(plan) else self._setting(Plan(plan.around, (), plan.rest))
        around = plan.around if setting is None else setting.around
        cases = dict(self.survey.action_case(around, action) for action in {*plan.actions} - {AS_IT_IS})
        return {case: each for case, each in cases.items() if case not in self.survey.outcomes}

    @property
    def has_traces(self) -> bool:
        """Whether steps have traces; those whose blocks are no chain have none."""
        return self._whole(Plan())[1] is not None

    def _setting(self, plan: Plan) -> _Setting | None:
        """Return the setting of a plan without actions; None if its step has no trace."""
        if plan not in self._settings:
            base, trace = self._whole(plan)
            if base is None or trace is None:
                return None
            of_blocks = trace.of_blocks()
            ways = sorted((way.around for way in self.survey.space.ways if way.around <= plan.around), key=len)
            for around in (each for each in ways if each < plan.around or plan.rest):
                (unchanged,) = self._of_actions(around, [AS_IT_IS], trace).values()
                if unchanged is not None and unchanged[1].of_blocks() == of_blocks:
                    break
            else:
                around = plan.around
            self._settings[plan] = _Setting(base, self._timed(base, trace), around)
        return self._settings[plan]

    def _timed(self, base: Measurement, trace: Trace) -> Trace:
        """Return the trace of a step with its time beyond that of micro-batches like the last: the first adds nothing.

        That of a script says so itself.
        """
        profile, told = self.survey.profile, base.estimated
        if trace.micro_batches == 1 or trace.follows or profile.rates is None or told is None:
            return trace
        done = Joiner(trace, {}).unchanged.done
        again = estimate(done, profile.rates, profile.efficiencies, asynchronous=profile.is_cuda)
        return replace(trace, more_seconds=told.step_seconds - again.step_seconds)

    def _knows(self, setting: _Setting, actions: Iterable[Action]) -> bool:
        """Get the traces of actions in a setting; return whether there are all of them."""
        missing = [action for action in actions if action not in setting.traces]
        for action, found in self._of_actions(setting.around, missing, setting.trace).items():
            if found is not None:
                setting.warnings[action], setting.traces[action] = found[0].warnings, found[1]
        return setting.traces.keys() >= set(actions)

    def _of_actions(
        self, around: Action, actions: Iterable[Action], base: Trace
    ) -> dict[Action, tuple[Measurement, Trace] | None]:
        """Return the measurement of each action on all blocks, and its trace with the blocks of the whole model."""
        cases = {action: self.survey.action_case(around, action) for action in actions}
        outcomes = self._outcomes(dict(cases.values()))
        found: dict[Action, tuple[Measurement, Trace] | None] = {}
        for action, (case, _) in cases.items():
            trace = self._trace(case, outcomes.get(case))
            if trace is not None and case not in self._grown:
                is_short = len(trace.blocks) < len(base.blocks)
                places = self.survey.space.blocks.places
                self._grown[case] = trace.repeated(base.blocks, places) if is_short else trace
            grown = self._grown.get(case)
            found[action] = None if grown is None else (outcomes[case], grown)
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
