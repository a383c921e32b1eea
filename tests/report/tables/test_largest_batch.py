"""The largest batch stands beside the memory that it fits in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actbench.model.measured import LargestBatch, MeasuredRecord
from actbench.report import tables
from actbench.report.render import csv_text, markdown
from actbench.units import GIB, MIB

MakeRecord = Callable[..., MeasuredRecord]


@pytest.mark.parametrize(
    ("others", "within"),
    [(384 * MIB, "384.00 MiB"), (16 * GIB, "16.00 GiB for resnet50 (simulated) and in 384.00 MiB for vit (cpu)")],
)
def test_a_note_and_a_column_say_in_which_memory_the_largest_batch_fits(
    make_record: MakeRecord, others: int, within: str
) -> None:
    searched = [
        make_record(
            scheme,
            model=model,
            meter=meter,
            memory_limit_bytes=limit,
            largest_batch=7,
            largest_batch_search=LargestBatch(
                batch_size=7,
                predicted=7,
                fits_peak_bytes=1,
                next_outcome="over-limit",
                memory_limit_bytes=limit,
                trials=2,
            ),
        )
        for model, meter, limit in (("vit", "cpu", 384 * MIB), ("resnet50", "simulated", others))
        for scheme in ("exact", "checkpoint")
    ]
    table = tables.results_table(searched)

    note = f"Largest batch: what fits in {within}, found and proved. All other columns are of a step at Batch."
    assert note in table.notes
    assert note in markdown(table)
    limits = {"vit": 384 * MIB, "resnet50": others}
    assert [row["largest_batch_limit_bytes"] for row in table.rows] == [limits[row["model"]] for row in table.rows]
    assert f",{384 * MIB}," in csv_text(table)
