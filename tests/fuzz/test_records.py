from __future__ import annotations

import io
import json

from rich.console import Console

from actbench.errors import ActbenchError
from actbench.model.measured import MeasuredRecord
from actbench.report import compare, render, store, tables
from actbench.report.render import screen
from actbench.tools.html import html as page

FULL = {
    "peak_bytes": 1000,
    "reserved_bytes": 2000,
    "step_seconds": [0.1, 0.2],
    "timing_round": "r",
    "exact_step_seconds": [0.1],
    "largest_batch": 8,
    "largest_batch_search": {
        "batch_size": 8,
        "predicted": 9,
        "memory_limit_bytes": 10**9,
        "fits_peak_bytes": 10,
        "next_outcome": "over-limit",
        "trials": 3,
    },
    "gradient_error": 0.1,
    "gradient_cosine": 0.9,
    "sketch_variance_predicted": 1.0,
    "sgd_variance": 2.0,
    "loss": 0.5,
    "built": {"model_class": "Net", "task": "masked-lm", "sequence_length": 4, "image_size": [1, 2]},
    "sites": [{"path": "a", "was": "b", "becomes": "c", "calls": 1}],
    "unreached": [{"path": "c", "kind": "k", "reason": "r"}],
    "warnings": ["w"],
}
PUBLISHED = {"quantity": "batch_ratio", "value": 2.0, "setting": "s", "source": "x"}


def test_records_through_every_renderer(fuzz, tmp_path, make_record, changed):
    path = tmp_path / "box.jsonl"
    exact = make_record(**FULL).model_dump_json()
    other = json.loads(make_record("fewbit:3", label="a label", published=(PUBLISHED,), **FULL).model_dump_json())
    other["outcome"] |= {"dtype": "bfloat16+float32", "optimizer": "AdamW"}
    failed = make_record("invact", failure="no").model_dump_json()

    def check(document):
        path.write_text("\n".join([exact, json.dumps(document), failed]) + "\n", encoding="utf-8")
        try:
            records, _ = store.read_all([path], MeasuredRecord)
        except ActbenchError:
            return
        table = tables.results_table(records, "A title")
        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        for each in (table, tables.estimates_table(records)):
            screen.show(each, console)
            for text in (render.markdown(each), render.csv_text(each), page.html_page([each], "A title")):
                text.encode()
        assert len(json.loads(render.json_text(records))) == len(records)
        assert compare.compare(records, records, []).table.rows

    fuzz(changed(other), check)
