"""What is said of a script that was measured: whether it fits, and which schemes are worth trying."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import Growth, GrowthKind, MeasuredRecord, Measurement, PeakParts, RunEvent
from actbench.model.records import Built
from actbench.model.scripts import Script
from actbench.model.timeline import OTHER, Holder, Span, Timeline
from actbench.report.advice import about_bounds
from actbench.report.render import markdown
from actbench.report.render.widths import fitted
from actbench.report.tables.step import holders_table
from actbench.tools.script.answers.suggestions import Suggestion, free_remedies, suggestions
from actbench.tools.script.answers.tables import script_tables
from actbench.tools.script.answers.verdict import about_values, in_short, verdict

GIB, MIB = 1024**3, 1024**2
MakeRecord = Callable[..., MeasuredRecord]


def recorded(make_record: MakeRecord, *, limit: int | None = 24 * GIB, **fields: Any) -> MeasuredRecord:
    """Return the record of a step in so much memory; ``memory_limit_bytes`` is that of the case."""
    usual = {"peak_bytes": 10 * GIB, "simulated": "cuda", "device_profile": "rtx-4090"}
    record = make_record(model="train.py", script=Script(target="train.py"), **usual | fields)
    return record.model_copy(update={"outcome": record.outcome.model_copy(update={"memory_limit_bytes": limit})})


def told(make_record: MakeRecord, **fields: Any) -> list[str]:
    """Return the verdict of a step that is :func:`recorded`."""
    return verdict(recorded(make_record, **fields))


def test_a_script_that_fits_has_so_much_to_spare(make_record: MakeRecord) -> None:
    (fits,) = told(make_record)

    assert fits == (
        "train.py fits on rtx-4090: a step needs 10.00 GiB of the 24.00 GiB beside the CUDA context (512.00 MiB); "
        "14.00 GiB are to spare."
    )
    limited, context = told(make_record, memory_limit_bytes=24 * GIB)
    assert limited == "train.py fits within the limit: a step needs 10.00 GiB of 24.00 GiB; 14.00 GiB are to spare."
    assert context == ("The CUDA context of a process takes some 512.00 MiB more: the limit is taken as it was given.")
    path = Path.cwd() / "train.py"
    far = make_record(model=f"{path} --lr 3", script=Script(target=str(path), arguments=("--lr", "3")))
    assert verdict(far)[0].startswith("train.py --lr 3: ")


def test_a_script_that_does_not_fit_lacks_so_much(make_record: MakeRecord) -> None:
    lines = told(make_record, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB)
    assert lines[0].startswith("train.py does not fit on rtx-4090: a step needs 30.00 GiB of the 24.00 GiB")
    assert lines[0].endswith("6.00 GiB are missing.")

    bound = told(make_record, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB, at_most=("why",))
    assert bound[0].startswith("train.py may not fit")
    assert "at most 30.00 GiB" in bound[0]

    both = told(make_record, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB, at_most=("why",), expected_bytes=20 * GIB)
    assert "is expected to fit on rtx-4090: a step needs at most 30.00 GiB (expected 20.00 GiB)" in both[0]
    assert both[0].endswith("of what is expected 4.00 GiB are to spare.")
    over = told(make_record, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB, at_most=("why",), expected_bytes=25 * GIB)
    assert over[0].startswith("train.py is expected not to fit")

    own = told(make_record, limit=GIB, memory_limit_bytes=GIB, over_limit_bytes=9 * GIB)
    assert own[0].endswith("does not fit within the limit: a step needs 10.00 GiB of 1.00 GiB; 9.00 GiB are missing.")


def test_gaps_of_the_allocator_are_told_apart(make_record: MakeRecord) -> None:
    lines = told(make_record, reserved_bytes=13 * GIB)

    assert "a step needs 13.00 GiB of the 24.00 GiB" in lines[0]
    assert "11.00 GiB are to spare" in lines[0]
    assert lines[1] == (
        "The step needs 13.00 GiB: its peak of 10.00 GiB, and 3.00 GiB that torch's allocator loses in gaps."
    )
    assert told(make_record, reserved_bytes=26 * GIB, over_limit_bytes=2 * GIB)[1].startswith(
        "The step needs 26.00 GiB"
    )


def test_of_steps_that_differ_the_largest_is_named(make_record: MakeRecord) -> None:
    built = Built(model_class="Net", batch_size=96, step_peaks=(10 * GIB, 7 * GIB))
    record = make_record(model="train.py", script=Script(target="train.py"), peak_bytes=10 * GIB)

    def said(built: Built, **fields: Any) -> str:
        outcome = record.outcome.model_copy(update={"built": built, "memory_limit_bytes": 8 * GIB, **fields})
        return verdict(record.model_copy(update={"outcome": outcome}))[0]

    assert ": the largest step of 96 rows needs 10.00 GiB of" in said(built, over_limit_bytes=2 * GIB)
    alike = built.model_copy(update={"step_peaks": (10 * GIB, 10 * GIB - 1)})
    assert ": a step of 96 rows needs 10.00 GiB of" in said(alike)


def test_a_step_that_needs_some_of_the_context_will_probably_not_fit(make_record: MakeRecord) -> None:
    """Contexts differ: what lacks less than one is no certain failure, but one answer says one thing."""
    over = {"peak_bytes": round(24.1 * GIB), "over_limit_bytes": GIB // 10}
    lines = told(make_record, **over)

    assert lines[0].startswith("train.py will probably not fit on rtx-4090: ")
    assert lines[0].endswith("; 102.40 MiB are missing.")
    assert not any("fits" in line or "expect" in line for line in lines)
    assert "probably" not in told(make_record, peak_bytes=25 * GIB, over_limit_bytes=GIB)[0]
    assert "probably" not in told(make_record, memory_limit_bytes=24 * GIB, **over)[0]


def test_a_script_that_grows_is_told_before_all_that_fits(make_record: MakeRecord) -> None:
    growth, built = Growth(step_bytes=16 * MIB, more_steps=1450, line="a.py:3 y = f(x)"), Built(model_class="Net")
    grows, fits, *_ = told(make_record, growth=growth, built=built.model_copy(update={"stopped_after": 9}))

    assert grows == (
        "train.py grows by 16.00 MiB a step, and runs out of memory after some 1,460 steps: it keeps what "
        "a.py:3 y = f(x) makes."
    )
    assert fits.startswith("train.py fits")
    assert told(make_record, growth=Growth(step_bytes=MIB))[0] == "train.py grows by 1.00 MiB a step."
    over = told(make_record, growth=growth, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB)
    assert over[0].startswith("train.py does not fit")
    assert over[1] == "train.py grows by 16.00 MiB a step: it keeps what a.py:3 y = f(x) makes."
    assert over[:2] == in_short(recorded(make_record, growth=growth, peak_bytes=30 * GIB, over_limit_bytes=6 * GIB))


def test_what_keeps_memory_is_said_by_its_kind(make_record: MakeRecord) -> None:
    def said(kind: GrowthKind) -> list[str]:
        growth = Growth(kind=kind, step_bytes=MIB, line="a.py:3 y = f(x)", keeper="a.py:4 kept.append(y)")
        return in_short(recorded(make_record, growth=growth))

    assert said("container")[0].endswith("a.py:4 kept.append(y) keeps what a.py:3 y = f(x) makes.")
    assert said("graph")[0].endswith("a.py:4 kept.append(y) keeps the graph of what a.py:3 y = f(x) makes.")
    assert said("library")[0].endswith("a.py:4 kept.append(y) keeps, in a library, what a.py:3 y = f(x) makes.")
    fits, cycle = said("cycle")
    assert "fits" in fits
    assert "1.00 MiB a step in cycles of references, made by a.py:3 y = f(x), until" in cycle


def test_a_cpu_has_no_context_and_a_failure_no_verdict(make_record: MakeRecord) -> None:
    assert len(told(make_record, simulated="cpu")) == 1
    assert verdict(make_record(failure="no")) == []
    assert "how much memory rtx-4090 has is not known" in told(make_record, limit=None)[0]
    assert told(make_record, step_seconds=(1.0, 2.0, 4.0))[1] == "A step takes 2 s, measured."


def measured(**fields: Any) -> Measurement:
    usual = {"weights_bytes": GIB, "gradients_bytes": GIB, "activation_bytes": 0, "peak_bytes": 10 * GIB}
    return Measurement(**usual | fields)


def held(*holders: tuple[str, str, int, str | None]) -> Timeline:
    made = tuple(
        Holder(module=f"m{place}", kind=kind, operator=operator, tensors=1, held_bytes=amount, line=line)
        for place, (kind, operator, amount, line) in enumerate(holders)
    )
    return Timeline(
        peak_bytes=10 * GIB,
        peak_event=0,
        events=1,
        moments=(0,),
        held_bytes={"saved": (1,)},
        spans=(Span(phase="forward", start=0),),
        holders=made,
    )


def schemes_of(found: list[Suggestion]) -> list[str]:
    return [each.scheme for each in found]


def test_saved_tensors_are_recomputed_or_moved() -> None:
    found = suggestions(measured(peak_parts=PeakParts(activation_bytes=6 * GIB)))

    assert schemes_of(found) == ["checkpoint", "offload"]
    assert found[0].reason.startswith("60 % of the peak are saved tensors")


def test_logits_and_activations_are_found_by_what_made_them() -> None:
    parts = PeakParts(activation_bytes=6 * GIB)
    logits = held(("temporary", "aten::_log_softmax", 3 * GIB, None), ("saved", "aten::mm", GIB, "a.py:1 nll_loss(x)"))
    gelus = held(("saved", "aten::gelu", 2 * GIB, None), ("host", "aten::_log_softmax", 9 * GIB, None))

    def suggested(head: str | None) -> list[str]:
        built = Built(model_class="Net", head=head)
        return schemes_of(suggestions(measured(peak_parts=parts, timeline=logits, built=built)))

    assert suggested("") == ["checkpoint", "chunked_loss:8", "offload"]
    assert suggested("net.head") == ["checkpoint", "chunked_loss:8,head=net.head", "offload"]
    assert suggested(None) == ["checkpoint", "offload"], "the scheme would find no layer"
    # a line with a loss may hold the whole model: what its operators made counts, and no other tensor of the line
    named = measured(peak_parts=parts, timeline=logits, built=Built(model_class="Net", head=""))
    assert "30 % of the peak" in suggestions(named)[1].reason
    assert schemes_of(suggestions(measured(peak_parts=parts, timeline=gelus))) == ["checkpoint", "fewbit:3", "offload"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"optimizer": "AdamW"}, ["lora:16", "adam8bit"]),
        ({"optimizer": "SGD"}, ["lora:16"]),
        ({"optimizer": "Adam", "memory_limit_bytes": GIB}, ["qlora:16", "adam8bit"]),
        ({"optimizer": "AdamW", "gradients_bytes": 1}, ["adam8bit"]),
    ],
)
def test_what_the_model_itself_needs_is_made_smaller(fields: dict[str, Any], expected: list[str]) -> None:
    parts = PeakParts(weights_bytes=3 * GIB, gradients_bytes=3 * GIB, optimizer_bytes=4 * GIB)

    assert schemes_of(suggestions(measured(peak_parts=parts, **fields))) == expected


def test_nothing_is_suggested_where_nothing_helps_or_is_known() -> None:
    assert suggestions(measured(peak_parts=PeakParts(temporary_bytes=10 * GIB))) == []
    assert suggestions(measured()) == []


@pytest.mark.parametrize(("limit", "is_advised"), [(21 * GIB, False), (19 * GIB, True), (None, True)])
def test_nothing_is_suggested_where_most_of_the_memory_is_free(limit: int | None, is_advised: bool) -> None:
    found = suggestions(measured(peak_parts=PeakParts(activation_bytes=6 * GIB), memory_limit_bytes=limit))

    assert bool(found) == is_advised


def test_what_refuses_the_model_is_not_suggested() -> None:
    parts = PeakParts(gradients_bytes=3 * GIB, activation_bytes=6 * GIB)
    built = Built(model_class="Net", refused=("checkpoint", "lora:16"))

    assert schemes_of(suggestions(measured(peak_parts=parts))) == ["checkpoint", "lora:16", "offload"]
    assert schemes_of(suggestions(measured(peak_parts=parts, built=built))) == ["offload"]


def test_holders_of_one_line_are_one_and_the_smallest_are_summed_up(make_record: MakeRecord) -> None:
    small = [("saved", "aten::mm", GIB // 8, f"a.py:{line}") for line in range(12)]
    timeline = held(("saved", "aten::mm", GIB, "b.py:1"), ("weights", "parameter", 3 * GIB, "b.py:1"), *small)
    by_line, by_module = script_tables(make_record(timeline=timeline, peak_bytes=10 * GIB).outcome)

    assert [row["name"] for row in by_line.rows][::10] == ["b.py:1", "(3 smaller lines)"]
    assert by_line.rows[0] == {"name": "b.py:1", "kinds": "weights, 1 more", "held_bytes": 4 * GIB, "share": 0.4}
    assert by_line.rows[-1]["held_bytes"] == 3 * GIB // 8
    assert by_module.rows[0]["held_bytes"] == 3 * GIB
    assert list(script_tables(make_record(failure="no").outcome)) == []


@pytest.mark.parametrize(
    ("held_by", "expected"),
    [
        (
            {"net.blocks.0.mlp": 1, "net.blocks.1.mlp": 1, "net.blocks.2": 1, "net.blocks.3.mlp": 2},
            {"net.blocks.*.mlp": 2, "net.blocks.3.mlp": 2, "net.blocks.2": 1},
        ),
        (
            {f"blocks.{i}": 1 if i in (0, 1, 2, 5) else 2 for i in range(6)},
            {"blocks.0-2,5": 4, "blocks.3-4": 4},
        ),
    ],
)
def test_blocks_that_hold_the_same_bytes_are_one_row(
    make_record: MakeRecord, held_by: dict[str, int], expected: dict[str, int]
) -> None:
    timeline = held(*[("saved", "aten::mm", amount * GIB, None) for amount in held_by.values()])
    holders = tuple(
        each.model_copy(update={"module": name}) for each, name in zip(timeline.holders, held_by, strict=True)
    )
    (table,) = script_tables(make_record(timeline=timeline.model_copy(update={"holders": holders})).outcome)

    assert {row["name"]: row["held_bytes"] // GIB for row in table.rows} == expected


def test_a_table_of_holders_has_its_kinds_at_100_columns(make_record: MakeRecord) -> None:
    line = f"a_long_name_of_a_file.py:123 {'x = f(x)' * 20}"
    kinds: list[Any] = ["kept", "communication", "saved"]
    others = [("saved", "aten::mm", GIB // 8, f"{place}{line}") for place in range(12)]
    timeline = held(*((kind, "aten::mm", GIB, line) for kind in kinds), *others)
    by_line, _ = script_tables(make_record(timeline=timeline, peak_bytes=10 * GIB).outcome)

    assert fitted(by_line, 100).left_out == ()
    assert by_line.rows[-1]["held_bytes"] == 3 * GIB // 8, "of the smallest three, whose names are long too"


def test_one_row_has_the_rest_and_says_what_it_is(make_record: MakeRecord) -> None:
    def rest(*holders: tuple[Any, str, int, str | None], **changes: Any) -> list[tuple[str, int]]:
        """Return the last row by line and by module; the last holder is changed."""
        timeline = held(*holders)
        last = timeline.holders[-1].model_copy(update=changes)
        timeline = timeline.model_copy(update={"holders": (*timeline.holders[:-1], last)})
        tables = script_tables(make_record(timeline=timeline, peak_bytes=10 * GIB).outcome)
        return [(str(table.rows[-1]["name"]), int(str(table.rows[-1]["held_bytes"]))) for table in tables]

    lines = [("saved", "aten::mm", GIB, f"a.py:{line}") for line in range(11)]
    workspace = ("temporary", "unknown", 2 * GIB, None)

    assert rest(*lines, module="m0") == [("(1 smaller line)", GIB), ("m9", GIB)]
    assert rest(*lines, workspace, module=OTHER) == [
        ("(1 smaller line and what no line made)", 3 * GIB),
        ("(1 smaller module and small tensors)", 3 * GIB),
    ]
    assert rest(lines[0], workspace) == [("(what no line made)", 2 * GIB), ("m0", GIB)]
    assert rest(lines[0], lines[1], module=OTHER) == [("a.py:1", GIB), ("(small tensors)", GIB)]


def test_values_are_said_to_be_made_up_where_a_card_is_simulated(make_record: MakeRecord) -> None:
    built = Built(model_class="Net", stopped_after=3)

    assert about_values(make_record(built=built)) == [
        "Losses and other values that the script prints are made up: a simulated card computes none.",
        "The script was stopped after 3 steps: --whole also runs its largest batch, its evaluations and its saves.",
    ]
    assert len(about_values(make_record(built=Built(model_class="Net")))) == 1
    assert about_values(make_record(meter="cpu", built=built)) == about_values(make_record(built=built))[1:]
    assert about_values(make_record(failure="no")) == []


def test_the_table_of_holders_has_lines_where_a_script_has_them(make_record: MakeRecord) -> None:
    record, plain = make_record(), held(("saved", "aten::mm", GIB, None))

    assert "Line" not in markdown(holders_table(record, plain))
    assert "| m0 | a.py:1 |" in markdown(holders_table(record, held(("saved", "aten::mm", GIB, "a.py:1"))))


def test_reasons_for_a_bound_are_told_once_and_not_all_of_many(make_record: MakeRecord) -> None:
    reasons = tuple(f"why {place}" for place in range(7))
    (note,) = about_bounds([make_record(at_most=reasons), make_record("checkpoint", at_most=reasons[:1])])

    assert note.endswith("because why 0; why 1; why 2; why 3; why 4; and 2 more.")
    assert list(about_bounds([make_record(), make_record(failure="no")])) == []


def test_a_whole_run_is_told_by_its_worst_part(make_record: MakeRecord) -> None:
    step = RunEvent(part="step", peak_bytes=10 * GIB, reserved_bytes=11 * GIB)
    line = "a.py:9 model.eval()"
    evaluation = RunEvent(
        part="evaluation", line=line, peak_bytes=26 * GIB, over_limit_bytes=2 * GIB, batches=40, batch_bytes=512 * MIB
    )
    fits = told(make_record, events=(step,))
    over = told(make_record, events=(step, evaluation))
    graphs = evaluation.model_copy(update={"has_graph": True})
    large = evaluation.model_copy(update={"batch_bytes": 0})
    outcomes = [make_record(events=(step, each)).outcome for each in (evaluation, graphs, large)]
    free, free_of_graphs, free_of_large = (free_remedies(each) for each in outcomes if isinstance(each, Measurement))

    assert fits[0] == (
        "train.py fits on rtx-4090 in all parts of its run: its largest step needs 11.00 GiB of the 24.00 GiB beside "
        "the CUDA context (512.00 MiB); 13.00 GiB are to spare."
    )
    assert over[0] == (
        f"train.py runs out of memory at its evaluation of 40 batches ({line}), which needs 26.00 GiB: 2.00 GiB more "
        "than the 24.00 GiB beside the CUDA context (512.00 MiB)."
    )
    assert f"{line} leaves 512.00 MiB on the card: move outputs" in free[0]
    assert free[0].endswith("(saves 20.00 GiB)")
    assert f"{line} records gradients" in free_of_graphs[0]
    assert f"evaluation at {line} needs what another has left: make its batches smaller" in free_of_large[0]
    likely = step.model_copy(update={"expected_bytes": 7 * GIB})
    both = told(make_record, events=(likely,), at_most=("why",), expected_bytes=7 * GIB)
    assert "its largest step needs at most 11.00 GiB (expected 7.00 GiB) of the 24.00 GiB" in both[0]
    failing = step.model_copy(update={"peak_bytes": 30 * GIB, "over_limit_bytes": 6 * GIB})
    spared = told(make_record, events=(failing,), at_most=("why",), expected_bytes=20 * GIB)
    later = evaluation.model_copy(update={"expected_bytes": 25 * GIB})
    other = told(
        make_record,
        events=(failing.model_copy(update={"expected_bytes": 9 * GIB}), later),
        at_most=("why",),
        expected_bytes=25 * GIB,
    )
    assert f"is expected to run out of memory at its evaluation of 40 batches ({line}), which needs at most" in other[0]
    assert "which needs at most 26.00 GiB (expected 25.00 GiB): " in other[0]
    assert "its largest step needs at most 30.00 GiB (expected 9.00 GiB)" in other[0]
    assert "is expected to fit on rtx-4090 in all parts of its run: its largest step needs at most 30.00" in spared[0]


def test_schemes_are_suggested_for_a_run_only_where_a_step_needs_most(make_record: MakeRecord) -> None:
    step = RunEvent(part="next step", peak_bytes=10 * GIB)
    save = RunEvent(part="save", peak_bytes=11 * GIB)
    parts = {"peak_parts": PeakParts(activation_bytes=6 * GIB), "peak_bytes": 10 * GIB, "memory_limit_bytes": 9 * GIB}

    assert suggestions(measured(events=(step,), **parts))
    assert not suggestions(measured(events=(step, save), **parts))


def test_a_run_with_a_part_that_does_not_fit_is_expected_to_fail(make_record: MakeRecord) -> None:
    event = RunEvent(part="save", line="a.py:3 torch.save(x, y)", peak_bytes=GIB)
    outcomes = [
        make_record(events=(event.model_copy(update={"over_limit_bytes": over}),)).outcome for over in (None, MIB)
    ]

    assert [each.runs_out for each in outcomes if isinstance(each, Measurement)] == [False, True]
