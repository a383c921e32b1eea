from __future__ import annotations

import random
from collections.abc import Callable

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report import tables
from actbench.report.tables.entries import Entry, join

MakeRecord = Callable[..., MeasuredRecord]


def named(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.record.case.scheme: entry for entry in entries}


def test_a_record_is_read_against_the_exact_model_of_its_own_case(make_record: MakeRecord) -> None:
    small, large = make_record(batch_size=8), make_record(batch_size=16, peak_bytes=2000)
    fewbit = make_record("fewbit:3", batch_size=16)

    entry = named([entry for entry in join([small, large, fewbit]) if entry.record is fewbit])["fewbit:3"]

    assert entry.exact is large.outcome


def test_the_exact_model_of_another_machine_meter_or_seed_does_not_count(make_record: MakeRecord) -> None:
    others = [make_record(machine="other"), make_record(meter="cpu"), make_record(seed=1), make_record(dtype="float16")]

    assert named(join([*others, make_record("fewbit:3")]))["fewbit:3"].exact is None


def test_the_exact_model_on_a_device_that_was_described_otherwise_does_not_count(make_record: MakeRecord) -> None:
    before, after = (
        [
            make_record(scheme, device_profile="mine.toml").model_copy(update={"files": {"mine.toml": digest}})
            for scheme in ("exact", "fewbit:3")
        ]
        for digest in ("1234567890", "abcdefghij")
    )
    entries = {(entry.record.files or {})["mine.toml"]: entry for entry in join([before[0], *after])}

    assert entries["abcdefghij"].exact is after[0].outcome
    assert [entry.exact for entry in join([before[0], after[1]])] == [before[0].outcome, None]
    assert "content" in [column.key for column in tables.results_table([*before, *after]).columns]


def test_a_failed_exact_model_is_nothing_to_read_against(make_record: MakeRecord) -> None:
    entries = join([make_record(failure="too much"), make_record("fewbit:3")])

    assert [entry.exact for entry in entries] == [None, None]


def test_the_estimate_of_a_measurement_is_found_whatever_the_timing_or_the_machine(make_record: MakeRecord) -> None:
    measured = make_record("fewbit:3", meter="cpu", min_steps=3, seed=2, machine="laptop")
    estimate = make_record("fewbit:3", device_profile="cpu", memory_limit_bytes=16 * 1024**3)
    unlike = make_record("fewbit:3", batch_size=9)

    entries = {entry.record.case.key(): entry for entry in join([measured, estimate, unlike])}

    assert entries[measured.case.key()].estimate is estimate.outcome
    assert entries[estimate.case.key()].estimate is None


def test_the_estimate_for_the_meters_own_kind_of_device_is_preferred(make_record: MakeRecord) -> None:
    cuda = make_record(device_profile="cuda-16gib", peak_bytes=1)
    cpu = make_record(device_profile="cpu", peak_bytes=2)

    for order in ([cuda, cpu], [cpu, cuda]):
        estimates = {
            entry.record.case.meter: entry.estimate
            for entry in join([*order, make_record(meter="cpu"), make_record(meter="cuda")])
        }
        assert estimates["cpu"] is cpu.outcome
        assert estimates["cuda"] is cuda.outcome


def test_an_estimate_for_another_kind_of_device_is_none(make_record: MakeRecord) -> None:
    cuda, cpu = make_record(device_profile="h200"), make_record(device_profile="cpu")

    assert all(entry.estimate is None for entry in join([cuda, make_record(meter="cpu")]))
    assert all(entry.estimate is None for entry in join([cpu, make_record(meter="cuda")]))


def test_of_several_estimates_the_one_counts_that_the_gpu_is_named_like(make_record: MakeRecord) -> None:
    devices = [
        make_record(device_profile=name, peak_bytes=place) for place, name in enumerate(("h200", "t4", "l4-24gib"))
    ]
    measured = [
        make_record(meter="cuda", gpu=gpu) for gpu in ("NVIDIA H200", "Tesla T4", "NVIDIA L4", "A100", "H200 T4")
    ]

    entries = {entry.record.machine.gpu: entry.estimate for entry in join([*devices, *measured])}

    assert [entries[record.machine.gpu] and entries[record.machine.gpu].peak_bytes for record in measured] == [
        0,
        1,
        2,
        None,
        None,
    ]


def test_what_no_other_beats_in_peak_and_speed_is_marked(make_record: MakeRecord) -> None:
    def measured(scheme: str, peak_bytes: int, seconds: float) -> MeasuredRecord:
        return make_record(scheme, meter="cpu", peak_bytes=peak_bytes, step_seconds=(seconds,))

    records = [
        measured("exact", 1000, 1.0),
        measured("small-and-slow", 500, 2.0),
        measured("beaten", 600, 2.0),
        measured("equal-to-exact", 1000, 1.0),
        make_record("failed", meter="cpu", failure="too much"),
        make_record("of-another-batch", meter="cpu", batch_size=9, step_seconds=(9.0,)),
    ]

    assert {scheme: entry.pareto for scheme, entry in named(join(records)).items()} == {
        "exact": True,
        "small-and-slow": True,
        "beaten": False,
        "equal-to-exact": True,
        "failed": None,
        "of-another-batch": None,
    }


def test_the_order_of_rows_does_not_depend_on_when_they_were_measured(make_record: MakeRecord) -> None:
    ordered = [
        make_record(scheme, model=model, batch_size=batch_size)
        for model in ("a", "b")
        for batch_size in (8, 16, 128)
        for scheme in ("exact", "checkpoint", "fewbit:2", "fewbit:10", "randomized:0.2", "fewbit:2+randomized:0.2")
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))

    assert [entry.record for entry in join(shuffled)] == ordered


def test_schemes_stand_in_the_order_in_which_they_are_given(make_record: MakeRecord) -> None:
    records = [make_record(batch_size=size, scheme=scheme) for size in (16, 8) for scheme in ("checkpoint", "exact")]
    records.append(make_record(batch_size=8, scheme="fewbit:3"))

    entries = join(records, ["fewbit:3", "exact"])

    assert [(entry.record.case.batch_size, entry.record.case.scheme) for entry in entries] == [
        *((8, scheme) for scheme in ("fewbit:3", "exact", "checkpoint")),
        *((16, scheme) for scheme in ("exact", "checkpoint")),
    ]


def test_seconds_and_throughput_follow_from_the_steps(make_record: MakeRecord) -> None:
    exact = make_record(meter="cpu", step_seconds=(0.4, 0.5, 0.6))
    slow = make_record("checkpoint", meter="cpu", step_seconds=(1.0, 1.0, 1.0))
    entries = named(join([exact, slow]))

    assert entries["checkpoint"].throughput is not None
    assert entries["checkpoint"].throughput.value == 8 / 1.0
    assert entries["checkpoint"].relative_throughput is not None
    assert entries["checkpoint"].relative_throughput.value == 0.5 / 1.0
    assert entries["exact"].relative_throughput is not None
    assert (entries["exact"].relative_throughput.value, entries["exact"].relative_throughput.spread) == (1.0, None)
    assert isinstance(entries["exact"].measured, Measurement)


def test_speed_is_given_only_against_steps_that_took_turns(make_record: MakeRecord) -> None:
    records = [
        make_record(meter="cpu", step_seconds=(1.0,), timing_round="first"),
        make_record("together", meter="cpu", step_seconds=(2.0,), timing_round="first"),
        make_record("later", meter="cpu", step_seconds=(2.0,), timing_round="second"),
        make_record("beside-exact", meter="cpu", step_seconds=(2.0,), timing_round="third", exact_step_seconds=(3.0,)),
        make_record("older", meter="cpu", step_seconds=(2.0,)),
    ]

    entries = named(join(records))

    speeds = {scheme: entry.relative_throughput for scheme, entry in entries.items()}
    assert {scheme: speed and speed.value for scheme, speed in speeds.items()} == {
        "exact": 1.0,
        "together": 1.0 / 2.0,
        "later": None,
        "beside-exact": 3.0 / 2.0,
        "older": None,
    }
    assert entries["later"].pareto is None
