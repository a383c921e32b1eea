"""What ``actbench fit`` found, from its records: the shortlist, the same with adapters, and the frontier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actbench.results.advice import needed_bytes
from actbench.results.fits import FitRecord, Training, step_seconds_of
from actbench.results.measured import Measurement
from actbench.results.records import Case, Failure
from actbench.results.tables.columns import Column, Item, with_spread
from actbench.results.tables.table import Table, fill
from actbench.results.tables.values import Spread, Value, change, step_time
from actbench.units import format_bytes, format_seconds

FIT_TITLE = "What fits"
MOST_ROWS = 10


@dataclass(frozen=True)
class Tried:
    """A stack that was simulated, beside the exact step.

    Attributes:
        exact_seconds: Estimated time of the exact step.
        on_frontier: Whether nothing that was tried needs less and is as fast.
    """

    record: FitRecord
    measured: Measurement
    seconds: float
    exact_seconds: float
    on_frontier: bool = False

    @property
    def training(self) -> Training:
        """In what its training differs from the exact step's."""
        return self.record.training

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's."""
        return self.seconds / self.exact_seconds

    @property
    def need_bytes(self) -> int:
        """Bytes of the device that it needs, with what the allocator loses between blocks."""
        return needed_bytes(self.measured)


@dataclass(frozen=True)
class Fitted:
    """All that was tried for one exact step, the fastest first; ``exact`` is among it.

    Attributes:
        on_device: What was measured on a device, failures included.
    """

    exact: Tried
    tried: tuple[Tried, ...]
    on_device: tuple[FitRecord, ...] = ()

    @property
    def case(self) -> Case:
        """The case of the exact step."""
        return self.exact.record.case

    @property
    def max_slowdown(self) -> float:
        """What was asked for last."""
        return self.exact.record.asked.max_slowdown

    def fitting(self, *, adapters: bool = False) -> list[Tried]:
        """Return what fits and is not slower than asked, the fastest first."""
        trained = "adapters" if adapters else "all"
        return [
            each
            for each in self.tried
            if each.measured.fits and each.training.trained == trained and each.slowdown <= self.max_slowdown
        ]

    def shortlist(self, *, adapters: bool = False) -> list[Tried]:
        """Return the rows of a shortlist: of each way of training the fastest, then the next ones and the frontier.

        Where nothing fits: what needs least.
        """
        fitting = self.fitting(adapters=adapters)
        if not fitting:
            trained = "adapters" if adapters else "all"
            alike = [each for each in self.tried if each.training.trained == trained]
            return sorted(alike, key=lambda each: each.need_bytes)[:3]
        first = [
            each
            for place, each in enumerate(fitting)
            if not any(earlier.training.is_as_near(each.training) for earlier in fitting[:place])
        ]
        others = [each for each in fitting if each not in first]
        others.sort(key=lambda each: not each.on_frontier)
        chosen = [*first, *others][:MOST_ROWS]
        return [each for each in fitting if each in chosen]


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return what records tell of each exact step that stacks were tried for."""
    groups: dict[Case, list[FitRecord]] = {}
    exact: dict[Case, FitRecord] = {}
    for record in records:
        what = _simulated(record.case).model_copy(update={"scheme": "exact", "optimizer": record.asked.optimizer})
        groups.setdefault(what, []).append(record)
        if record.case == what:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = _seconds(exact)
    if seconds is None:
        return None
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    found = [
        Tried(record, record.outcome, time, seconds)
        for record in records
        if isinstance(record.outcome, Measurement) and (time := _seconds(record)) is not None
    ]
    tried = _with_frontier(sorted(found, key=lambda each: (each.seconds, each.need_bytes)))
    return Fitted(next(each for each in tried if each.record is exact), tuple(tried), on_device)


def _simulated(case: Case) -> Case:
    return case.model_copy(update={"meter": "simulated"})


def _seconds(record: FitRecord) -> float | None:
    return step_seconds_of(record.outcome) if isinstance(record.outcome, Measurement) else None


def _with_frontier(tried: Sequence[Tried]) -> list[Tried]:
    marked, least = [], float("inf")
    for each in tried:
        is_on = each.need_bytes < least
        least = min(least, each.need_bytes)
        marked.append(Tried(each.record, each.measured, each.seconds, each.exact_seconds, is_on))
    return marked


def _at_peak(part: str, title: str) -> Column[Tried]:
    def compute(tried: Tried) -> Value:
        return getattr(tried.measured.peak_parts, part, None)

    return Column(part, title, "bytes", compute, "lower", detail=2)


def _differs(tried: Tried) -> str:
    training = tried.training
    found = [what for what in ("updates", "precision") if getattr(training, what) == "other"]
    return ", ".join([*found, *(["adapters"] if training.trained == "adapters" else [])])


_COLUMNS: tuple[Column[Tried], ...] = (
    Column("scheme", "Scheme", "text", lambda tried: tried.record.case.scheme),
    Column("optimizer", "Optimizer", "text", lambda tried: tried.record.case.optimizer),
    Column("peak_bytes", "Peak", "bytes", lambda tried: tried.measured.peak_bytes, "lower"),
    Column("over_limit_bytes", "Over limit", "bytes", lambda tried: tried.measured.over_limit_bytes, "lower"),
    Column("estimated_step_seconds", "Step (est.)", "seconds", lambda tried: tried.seconds, "lower"),
    Column("slowdown", "Slowdown (est.)", "ratio", lambda tried: tried.slowdown, "lower"),
    Column("gradient", "Gradient", "text", lambda tried: tried.training.gradient, detail=1),
    Column("differs", "Also changes", "text", _differs, detail=1),
    _at_peak("weights_bytes", "Weights at peak"),
    _at_peak("gradients_bytes", "Gradients at peak"),
    _at_peak("optimizer_bytes", "Optimizer state at peak"),
    _at_peak("activation_bytes", "Activations at peak"),
    _at_peak("temporary_bytes", "Temporaries at peak"),
    Column("on_frontier", "Frontier", "flag", lambda tried: tried.on_frontier or None, detail=1),
)


@dataclass(frozen=True)
class _Row:
    """A stack as it was simulated, or as it was measured on a device.

    Attributes:
        simulated: What the measurement is compared with; None in the row of the simulation.
    """

    record: FitRecord
    simulated: Measurement | None = None

    @property
    def measured(self) -> Measurement | None:
        """What its meter read; None where it failed."""
        return self.record.outcome if isinstance(self.record.outcome, Measurement) else None

    @property
    def step(self) -> Spread | None:
        """The median step of a device."""
        return step_time(self.measured.step_seconds) if self.measured else None


def _pairs(found: Fitted) -> list[_Row]:
    """Return what was simulated of each stack that was measured, and what was measured, one under the other."""
    simulated = {each.record.case: each for each in found.tried}
    return [
        row
        for record in found.on_device
        if (beside := simulated.get(_simulated(record.case))) is not None
        for row in (_Row(beside.record), _Row(record, beside.measured))
    ]


def _peak_off(row: _Row) -> Value:
    return change(row.measured.peak_bytes, row.simulated.peak_bytes) if row.measured and row.simulated else None


def _step_off(row: _Row) -> Value:
    return change(row.step.value, step_seconds_of(row.simulated)) if row.step and row.simulated else None


def _estimate_of(row: _Row) -> Value:
    return step_seconds_of(row.measured) if row.measured else None


_PAIR_COLUMNS: tuple[Column[_Row], ...] = (
    Column("scheme", "Scheme", "text", lambda row: row.record.case.scheme),
    Column("optimizer", "Optimizer", "text", lambda row: row.record.case.optimizer),
    Column("meter", "Meter", "text", lambda row: row.record.case.meter),
    Column("peak_bytes", "Peak", "bytes", lambda row: row.record.outcome.peak_bytes),
    Column("peak_estimate_error", "Peak off by", "change", _peak_off),
    *with_spread("step_seconds", "Step", "seconds", lambda row: row.step),
    Column("estimated_step_seconds", "Step", "seconds", _estimate_of, estimate_of="step_seconds"),
    Column("step_estimate_error", "Step off by", "change", _step_off),
    Column("failure", "Failure", "text", lambda row: getattr(row.record.outcome, "reason", None)),
)


def _notes_of_pairs(found: Fitted) -> list[str]:
    """Return where was measured, and why what failed did."""
    devices = dict.fromkeys(each.machine.gpu or each.machine.processor for each in found.on_device)
    failed = [each for each in found.on_device if isinstance(each.outcome, Failure)]
    where = f"Measured on {', '.join(devices)}, simulated for {found.case.device_profile}"
    return [
        f"{where}. Off by: how much more the simulation says.",
        *(f"{each.case.scheme}: {each.outcome.reason}: {each.outcome.message}" for each in failed),
    ]


def fit_tables(records: Sequence[FitRecord], title: str = FIT_TITLE) -> tuple[Table, ...]:
    """Return the tables of a file of fits: for each exact step the shortlist, that with adapters, the frontier."""
    tables = [table for found in fitted(records) for table in tables_of(found, title)]
    return tuple(tables) or (fill(title, _COLUMNS, []),)


def tables_of(found: Fitted, title: str) -> tuple[Table, ...]:
    """Return the tables of what was tried for one exact step."""
    about = f"{found.case.model}, batch {found.case.batch_size}, on {found.case.device_profile}"
    columns = _columns(found, _COLUMNS)
    rows = found.shortlist()
    main = rows if found.exact in rows else [found.exact, *rows]
    tables = [fill(f"{title}: {about}", columns, main, _notes(found))]
    adapters = found.shortlist(adapters=True)
    if adapters:
        why = "Other parameters are trained than by the exact step: low-rank matrices beside frozen weights."
        tables.append(fill(f"With adapters: {about}", columns, adapters, [why]))
    pairs = _pairs(found)
    if pairs:
        title_of_pairs = f"Measured beside estimated: {about}"
        tables.append(fill(title_of_pairs, _columns(found, _PAIR_COLUMNS), pairs, _notes_of_pairs(found)))
    front = [each for each in found.tried if each.on_frontier]
    tables.append(fill(f"Frontier of time and memory: {about}", columns, front))
    return tuple(tables)


def _columns(found: Fitted, columns: tuple[Column[Item], ...]) -> tuple[Column[Item], ...]:
    varies = any(each.record.case.optimizer != found.case.optimizer for each in found.tried)
    return tuple(column for column in columns if varies or column.key != "optimizer")


def _notes(found: Fitted) -> list[str]:
    limit = found.exact.measured.memory_limit_bytes or 0
    case = found.case
    settings = [f"limit {format_bytes(limit)}", f"at most {found.max_slowdown:g} times the exact step's time"]
    settings += [f"sequence length {case.sequence_length}"] if case.sequence_length else []
    settings += [f"type {case.dtype}"] if case.dtype else []
    settings += [f"autocast {case.autocast}"] if case.autocast else []
    settings += [f"optimizer {case.optimizer}"] if case.optimizer else []
    return [
        f"{', '.join(settings)[0].upper()}{', '.join(settings)[1:]}; {len(found.tried)} stacks were simulated.",
        f"The exact step takes {format_seconds(found.exact.seconds)}, whether it fits or not. Times are estimated.",
    ]
