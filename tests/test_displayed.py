"""What ``print`` shows of the results of the Python API: one short line each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import actbench
from actbench.measuring.compared import Compared
from actbench.model.measured import MeasuredRecord, RunEvent
from actbench.report.tables import results_table


def test_results_are_printed_in_one_line(make_record: Callable[..., MeasuredRecord]) -> None:
    exact = make_record("exact", model="net.py", peak_bytes=3 * 2**30, over_limit_bytes=2**29)
    other = make_record("checkpoint", model="net.py", peak_bytes=2**30)

    assert str(exact.outcome) == "<Measurement: peak 3.00 GiB, over the limit by 512.00 MiB>"
    compared = "<Compared net.py, exact: peak 3.00 GiB, over the limit by 512.00 MiB; checkpoint: peak 1.00 GiB>"
    assert str(Compared((exact, other))) == compared
    assert repr(results_table([exact, other], "Peaks")).startswith("<Table 'Peaks': 2 rows, ")


def test_a_whole_run_is_told_by_its_worst_part(make_record: Callable[..., MeasuredRecord]) -> None:
    step = RunEvent(part="step", peak_bytes=2**30, reserved_bytes=2**31)
    worse = RunEvent(part="evaluation", peak_bytes=3 * 2**30, reserved_bytes=2**32, over_limit_bytes=2**30)
    outcome = make_record(peak_bytes=2**30, events=(step, worse)).outcome

    assert outcome.ending == "peak 3.00 GiB (evaluation), 4.00 GiB reserved, over the limit by 1.00 GiB"


def test_a_conversion_and_a_plan_are_printed_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())

    assert str(actbench.conversion_of(actbench.convert(model, "fewbit:3"))) == (
        "<Conversion fewbit:3: 2 sites, 0 unreached>"
    )
