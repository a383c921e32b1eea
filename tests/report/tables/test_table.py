from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial

import pytest
from rich.console import Console

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import MeasuredRecord
from actbench.model.provenance import Published
from actbench.model.records import Built
from actbench.report import tables
from actbench.report.render import formats, screen
from actbench.report.tables import Table
from actbench.report.tables.columns import change, quotient
from actbench.report.tables.values import Value
from actbench.tools.html import html as page

MakeRecord = Callable[..., MeasuredRecord]
PUBLISHED = (Published(quantity="peak_saving", value=0.138, setting="batch 128", source="table 4"),)


def row(table: Table, scheme: str) -> Mapping[str, Value]:
    return next(row for row in table.rows if row["scheme"] == scheme)


def keys(table: Table) -> list[str]:
    return [column.key for column in table.columns]


def test_columns_without_a_value_are_left_out(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(), make_record("fewbit:3", peak_bytes=800, activation_bytes=200)])

    assert keys(table) == [
        "model",
        "batch_size",
        "scheme",
        "meter",
        "peak_bytes",
        "peak_saving",
        "activation_bytes",
        "activation_ratio",
        "weights_bytes",
    ]
    assert row(table, "fewbit:3") == {
        "model": "tiny",
        "batch_size": 8,
        "scheme": "fewbit:3",
        "meter": "simulated",
        "peak_bytes": 800,
        "peak_saving": 1 - 800 / 1000,
        "activation_bytes": 200,
        "activation_ratio": 600 / 200,
        "weights_bytes": 400,
    }


def test_what_was_published_stands_beside_what_was_measured(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(), make_record("fewbit:3", peak_bytes=800, published=PUBLISHED)])
    order = keys(table)

    assert row(table, "fewbit:3")["published_peak_saving"] == 0.138
    assert order.index("published_peak_saving") == order.index("peak_saving") + 1
    assert "Published for fewbit:3: peak saving 13.8 % (batch 128; table 4)." in table.notes


def test_largest_batches_are_compared_with_that_of_exact(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(largest_batch=40), make_record("fewbit:3", largest_batch=50)])

    assert (row(table, "fewbit:3")["largest_batch"], row(table, "fewbit:3")["batch_ratio"]) == (50, 50 / 40)


def test_time_is_shown_with_its_spread(make_record: MakeRecord) -> None:
    exact = make_record(meter="cpu", step_seconds=(0.4, 0.5, 0.6))
    table = tables.results_table([exact, make_record("fewbit:3", meter="cpu", step_seconds=(0.9, 1.0, 1.1))])
    found = row(table, "fewbit:3")

    assert (found["step_seconds"], found["samples_per_second"], found["relative_throughput"]) == (1.0, 8.0, 0.5)
    assert found["step_seconds_spread"] == pytest.approx(0.05)
    assert found["samples_per_second_spread"] == pytest.approx(0.4)
    assert found["relative_throughput_spread"] == pytest.approx(0.5 * (0.1**2 + 0.05**2) ** 0.5)


def test_a_failed_case_is_a_row_with_a_reason_and_a_note(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(), make_record("fewbit:3", failure="needs 44 GiB;\n16 may be used")])

    assert row(table, "fewbit:3")["status"] == "out-of-memory"
    assert row(table, "fewbit:3")["peak_bytes"] is None
    assert row(table, "exact")["status"] is None
    assert "tiny, fewbit:3, batch 8 (simulated): out-of-memory: needs 44 GiB; 16 may be used" in table.notes


SCHEMES = ("exact", "fewbit:3", "checkpoint,every=2")


def piped(table: Table) -> str:
    out = io.StringIO()
    screen.show(table, Console(file=out, width=1000))
    return out.getvalue()


WAYS = (formats.markdown, lambda table: page.html_page([table], "Results"), piped)


@pytest.mark.parametrize("written", WAYS, ids=["Markdown", "HTML", "a pipe"])
def test_a_reason_that_all_rows_share_is_printed_once(make_record: MakeRecord, written: Callable[[Table], str]) -> None:
    text = written(tables.results_table([make_record(scheme, failure="it holds a LSTM") for scheme in SCHEMES]))

    assert text.count("it holds a LSTM") == 1
    assert "All rows: out-of-memory: it holds a LSTM" in text


def test_a_reason_that_some_rows_share_is_told_once_with_their_names(make_record: MakeRecord) -> None:
    failed = [make_record(scheme, failure=f"{scheme}: there is\nno norm") for scheme in SCHEMES[1:]]
    other = make_record("exact", model="small", failure="there is no norm")

    notes = tables.results_table([make_record(), *failed, other]).notes

    whose = "small, exact, batch 8 (simulated); tiny, checkpoint,every=2, fewbit:3, batch 8 (simulated)"
    assert [note for note in notes if "no norm" in note] == [f"{whose}: out-of-memory: there is no norm"]


def test_a_warning_that_differs_in_the_name_of_the_scheme_is_told_once(make_record: MakeRecord) -> None:
    few_bits = [make_record(name, warnings=(f"{name}: torch compiles its step",)) for name in ("adam4bit", "adam8bit")]

    notes = tables.results_table([make_record(), *few_bits]).notes

    assert "Warning in 2 of 3 rows: adam4bit, adam8bit: torch compiles its step" in notes


def test_settings_that_differ_are_columns_and_the_others_a_note(make_record: MakeRecord) -> None:
    records = [make_record(attention=attention, sequence_length=128) for attention in ("eager", "sdpa")]
    table = tables.results_table(records)

    assert "attention" in keys(table)
    assert "sequence_length" not in keys(table)
    assert table.notes[0].startswith("Same in all rows: meter simulated, task auto, sequence length 128, type ")


def test_settings_that_go_with_the_model_are_a_note_of_that_model(make_record: MakeRecord) -> None:
    records = [make_record(model="text", sequence_length=128), make_record(model="images", image_size=224)]
    table = tables.results_table(records)

    assert not {"sequence_length", "image_size"} & set(keys(table))
    assert table.notes[1:3] == ("images: image size 224.", "text: sequence length 128.")


def test_what_was_really_built_stands_in_place_of_what_was_asked_for(make_record: MakeRecord) -> None:
    speech = Built(model_class="Whisper", task="speech-seq2seq", sequence_length=40, audio_shape=(80, 3000))
    images = {"model_class": "Yolos", "task": "object-detection"}
    records = [
        make_record(model="speech", built=speech),
        make_record("fewbit:3", model="speech", failure="needs 44 GiB"),
        make_record(model="square", built=Built(**images, image_size=(224, 224))),
        make_record(model="wide", built=Built(**images, image_size=(512, 864))),
        make_record(model="old", sequence_length=16),
    ]
    table = tables.results_table(records)

    assert not {"task", "model_class", "sequence_length", "image_size", "audio_shape"} & set(keys(table))
    assert table.notes[1:5] == (
        "old: task auto, sequence length 16.",
        "speech: task speech-seq2seq, class Whisper, sequence length 40, audio 80 x 3000.",
        "square: task object-detection, class Yolos, image size 224.",
        "wide: task object-detection, class Yolos, image size 512 x 864.",
    )


def test_settings_of_one_meter_are_a_note_of_that_meter(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(device_profile="cuda-16gib"), make_record(meter="cpu")])

    assert "device_profile" not in keys(table)
    assert table.notes[1] == "tiny (simulated): device profile cuda-16gib."


def test_rows_of_two_machines_say_so(make_record: MakeRecord) -> None:
    here, there = make_record(machine="here"), make_record(machine="there")

    assert "machine" not in keys(tables.results_table([here]))
    assert [row["machine"] for row in tables.results_table([there, here]).rows] == ["here", "there"]


def test_rows_of_uncommitted_code_are_marked(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(), make_record("fewbit:3", dirty=True)])

    assert [row["dirty"] for row in table.rows] == [None, True]
    assert "Rows marked uncommitted were measured with changes that no commit holds." in table.notes


def test_a_warning_of_many_rows_is_told_once(make_record: MakeRecord) -> None:
    warned = [make_record(batch_size=size, warnings=("weights are random",)) for size in (1, 2)]

    assert "Warning: weights are random" in tables.results_table(warned).notes
    assert "Warning in 2 of 3 rows: weights are random" in tables.results_table([*warned, make_record()]).notes


def test_the_error_of_an_estimate_stands_beside_the_measurement(make_record: MakeRecord) -> None:
    measured = make_record(meter="cpu", peak_bytes=1000, activation_bytes=500)
    estimate = make_record(device_profile="cpu", peak_bytes=1010, activation_bytes=490)
    results = tables.results_table([measured, estimate])
    estimates = tables.estimates_table([measured, estimate])

    assert [row["estimate_error"] for row in results.rows] == [pytest.approx(0.01), None]
    assert len(estimates.rows) == 1
    assert estimates.rows[0]["peak_estimate_error"] == pytest.approx(0.01)
    assert estimates.rows[0]["activation_estimate_error"] == pytest.approx(-0.02)
    assert (estimates.rows[0]["peak_bytes"], estimates.rows[0]["estimated_peak_bytes"]) == (1000, 1010)


def test_a_file_that_describes_a_processor_estimates_what_is_measured_on_one(make_record: MakeRecord) -> None:
    measured = make_record(meter="cpu", peak_bytes=1000, step_seconds=(2.0,))
    plain = make_record(device_profile="cpu", peak_bytes=1010, simulated="cpu")
    time = EstimatedTime(
        step_seconds=2.2,
        forward_seconds=1.0,
        backward_seconds=1.0,
        optimizer_seconds=0.2,
        host_seconds=0.1,
        device_seconds=2.1,
        flops=1,
        moved_bytes=1,
    )
    calibrated = make_record(device_profile="here.toml", peak_bytes=1020, simulated="cpu", estimated=time)
    card = make_record(device_profile="card.toml", peak_bytes=1500, simulated="cuda", estimated=time)

    alone = tables.estimates_table([measured, calibrated, card])
    both = tables.estimates_table([measured, plain, calibrated, card])

    assert [row["estimated_peak_bytes"] for row in alone.rows] == [1020]
    assert [row["estimated_peak_bytes"] for row in both.rows] == [1020]  # the one that has a time, too


def test_no_records_make_an_empty_table() -> None:
    table = tables.results_table([])
    assert (table.title, table.columns, table.rows, table.notes) == ("Results", (), [], ())
    assert tables.estimates_table([]).rows == []


def test_a_frame_has_the_keys_and_the_raw_values(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(), make_record("fewbit:3", peak_bytes=800)])
    frame = table.frame

    assert list(frame.columns) == keys(table)
    assert frame["peak_bytes"].tolist() == [1000, 800]


def test_quotients_that_say_nothing_are_none() -> None:
    assert (quotient(6, 3), quotient(0, 3), quotient(3, 0), quotient(None, 3), quotient(3, None)) == (2, 0, *[None] * 3)
    assert (change(4, 5), change(4, 3), change(0, 3)) == (0.25, -0.25, None)


def test_rows_that_were_simulated_are_not_said_to_be_measured(make_record: MakeRecord) -> None:
    card = partial(make_record, meter="simulated")

    def notes(*records: MeasuredRecord) -> list[str]:
        found = [note for note in tables.results_table(records).notes if " on box (a processor, 2 cores)" in note]
        return [note.partition(" with actbench")[0] for note in found]

    both = notes(card(device_profile="t4"), card("gact:L2", device_profile="rtx-4090"), make_record(meter="cpu"))
    many = notes(*(card(device_profile=name) for name in ("t4", "rtx-4090", "rtx-4060", "rtx-3090")))

    assert set(both) == {
        "Simulated for rtx-4090, t4 on box (a processor, 2 cores)",
        "Measured on box (a processor, 2 cores)",
    }
    assert many == ["Simulated for 4 devices on box (a processor, 2 cores)"]
    assert notes(card(gpu="NVIDIA H200")) == ["Simulated on box (a processor, 2 cores)"]
