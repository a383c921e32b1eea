"""Which of the plans that were simulated are worth showing, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from madeup import GIB, measured

from actbench.machine import now, provenance
from actbench.model.blocks import BlockReading, BlockReadings
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.report import render, store
from actbench.tools.fit.answer import answer as fit_answer
from actbench.tools.fit.pieces import pieces_of
from actbench.tools.fit.records import Asked, FitRecord, Training
from actbench.tools.fit.shortlist import Fitted, fitted
from actbench.tools.fit.tables import fit_tables, tables_of
from actbench.tools.fit.words import is_uniform, sentence, short

LIMIT = 100 * GIB
OTHER_UPDATES = Training(updates="other")
UNBIASED = Training(gradient="unbiased")
ADAPTERS = Training(trained="adapters")
LAYERS = tuple(f"model.layers.{number}" for number in range(32))

Plan = tuple[str, float, int] | tuple[str, float, int, Training]


def readings(paths: Sequence[str]) -> BlockReadings:
    amounts = ("before_bytes", "after_bytes", "forward_peak_bytes", "backward_peak_bytes", "done_bytes", "output_bytes")
    blocks = tuple(BlockReading(path=path, kind="equal", **dict.fromkeys(amounts, 0)) for path in paths)
    return BlockReadings(blocks=blocks, start_bytes=0, stem_peak_bytes=0, top_peak_bytes=0, end_peak_bytes=0)


def found(*plans: Plan, exact: int = 20, max_slowdown: float = 2.0) -> Fitted:
    """Return a fit of plans, each with its seconds, the GiB of its activations, and how its training differs."""
    records = []
    for spec, seconds, activations, *training in (("exact", 1.0, exact), *plans):
        optimizer, scheme = spec.split() if " " in spec else ("adamw", spec)
        case = Case(model="m", batch_size=1, scheme=scheme, optimizer=optimizer, meter="simulated")
        outcome = measured([0, 0, 0, activations * GIB], seconds, 0.0, LIMIT)
        if spec == "exact":
            outcome = outcome.model_copy(update={"blocks": readings(LAYERS)})
        record = FitRecord(
            recipe="m",
            case=case,
            outcome=outcome,
            asked=Asked(optimizer="adamw", max_slowdown=max_slowdown),
            training=training[0] if training else Training(),
            recorded_at=now(),
            **provenance("actbench fit m"),
        )
        records.append(record)
    (only,) = fitted(records)
    return only


def shown(*plans: Plan) -> list[str]:
    return [each.record.case.scheme for each in found(*plans).shortlist()]


def test_of_plans_that_train_alike_the_fastest_is_shown() -> None:
    assert shown(("checkpoint", 1.3, 10)) == ["exact"]
    assert shown(("checkpoint", 0.9, 10), ("msln", 0.8, 30)) == ["msln"]


def test_what_trains_further_away_must_be_faster_than_estimates_are_wrong() -> None:
    assert shown(("adam8bit", 0.99, 5, OTHER_UPDATES)) == ["exact"]
    assert shown(("adam8bit", 0.97, 5, OTHER_UPDATES)) == ["adam8bit", "exact"]


def test_plans_that_train_further_away_step_by_step_are_compared_with_those_that_are_shown() -> None:
    further = Training(updates="other", gradient="approximate")
    near, far = ("adam8bit", 0.985, 5, OTHER_UPDATES), ("adam8bit+actnn", 0.97, 5, further)

    assert shown(near, far) == ["adam8bit+actnn", "exact"]


@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_what_the_answer_names_is_in_a_table(trained: Literal["all", "adapters"]) -> None:
    near = Training(trained=trained, updates="other")
    further = Training(trained=trained, updates="other", precision="other")
    what = found(("adam8bit", 1.3, 90, near), ("adam8bit+checkpoint", 1.29, 90, further), exact=200)

    shown = [*what.shortlist(), *what.shortlist(adapters=True)]

    assert [each.record.case.scheme for each in shown] == ["adam8bit"]  # the other one is hardly faster
    (answer,) = fit_answer(what)
    assert answer.startswith("adam8bit: ")


def test_where_what_fits_is_too_slow_the_fastest_of_it_is_the_nearest() -> None:
    slow = found(("offload", 3, 60), ("checkpoint", 2.5, 90), ("gact:L2", 1.5, 101), exact=200)

    assert [each.record.case.scheme for each in slow.nearest()] == ["checkpoint", "offload"]
    assert slow.shortlist() == []


OVER, SLOW, FIT = ("gact:L2", 1.2, 150), ("offload", 2.5, 50), ("checkpoint", 1.3, 90)
ADAPTED, ADAPTED_OVER = ("lora:16+checkpoint", 1.1, 60, ADAPTERS), ("lora:16", 0.9, 120, ADAPTERS)


@pytest.mark.parametrize(
    ("plans", "titles"),
    [
        ((OVER, SLOW, FIT), ["What fits"]),
        (
            (OVER, SLOW, ADAPTED, ADAPTED_OVER),
            ["What fits, with adapters", "Nothing takes at most 2 times the exact step's time; what fits"],
        ),
        (
            (OVER, ADAPTED_OVER),
            ["No simulated plan fits; what needs least", "No simulated plan fits; what needs least, with adapters"],
        ),
    ],
    ids=["some fit", "adapters fit", "nothing fits"],
)
def test_no_title_promises_what_its_rows_do_not_hold(plans: Sequence[Plan], titles: Sequence[str]) -> None:
    what = found(*plans, exact=200)

    tables = [table for table in tables_of(what, "What fits") if "Frontier" not in table.title]

    assert [table.title.partition(": ")[0] for table in tables] == titles
    by_scheme = {each.record.case.scheme: each for each in what.tried}
    for table in tables:
        rows = [by_scheme[str(row["scheme"])] for row in table.rows]
        promises = table.title.startswith("What fits")
        assert [what.fits(each) and each.slowdown <= what.max_slowdown for each in rows] == [promises] * len(rows)


@pytest.mark.parametrize(
    ("plans", "exact", "lead"),
    [
        ((), 20, ["It fits unchanged: 20.00 GiB of 100.00 GiB."]),
        (
            (("checkpoint,only=model.layers.[0-10]", 1.3, 90), ("gact:L2", 1.2, 95, UNBIASED)),
            200,
            [
                (
                    "checkpoint on blocks 0-10: 90.00 GiB of 100.00 GiB, 1.30 of the exact step's time (estimated), "
                    "gradients exact."
                ),
                "gact:L2: 95.00 GiB of 100.00 GiB, 1.20 of the exact step's time (estimated), gradients unbiased.",
            ],
        ),
        (
            (("adamw-fused adam8bit", 1.5, 90, OTHER_UPDATES), ADAPTED),
            200,
            [
                (
                    "adam8bit, adamw-fused: 90.00 GiB of 100.00 GiB, 1.50 of the exact step's time (estimated), "
                    "gradients exact, updates changed."
                ),
                (
                    "lora:16, checkpoint: 60.00 GiB of 100.00 GiB, 1.10 of the exact step's time (estimated), "
                    "gradients exact, adapters trained in place of the model."
                ),
            ],
        ),
        (
            (ADAPTED, ("lora:16+gact:L2", 1.09, 60, ADAPTERS.model_copy(update={"gradient": "unbiased"}))),
            200,
            ["lora:16, checkpoint: 60.00 GiB of 100.00 GiB, 1.10 of "],
        ),
        ((SLOW,), 200, ["Nothing fits within 2 times the exact step's time; offload fits and takes 2.5 times: 50.00 "]),
        (
            (OVER, ("lora:16", 3.0, 60, ADAPTERS)),
            200,
            ["Nothing fits within 2 times the exact step's time; lora:16 fits and takes 3 times: 60.00 GiB "],
        ),
        ((OVER,), 200, ["No plan that was simulated fits in 100.00 GiB; gact:L2 needs least of them, 150.00 GiB."]),
    ],
    ids=[
        "exact",
        "exact gradients and any",
        "updates and adapters",
        "adapters",
        "too slow",
        "adapters too slow",
        "nothing",
    ],
)
def test_the_answer_in_a_few_sentences(plans: Sequence[Plan], exact: int, lead: Sequence[str]) -> None:
    told = tables_of(found(*plans, exact=exact), "What fits")[0].lead

    assert len(told) == len(lead) <= 3
    assert all(text.startswith(begin) for text, begin in zip(told, lead, strict=True))


def test_frontiers_fall_and_say_what_fits() -> None:
    plans = (("msln", 1.0, 150), ("checkpoint", 1.3, 90), ("offload", 1.4, 95), ("gact:L2", 1.1, 80, UNBIASED))
    exact, other = (table for table in tables_of(found(*plans, exact=200), "t") if "Frontier" in table.title)

    assert [(row["scheme"], row["fits"]) for row in exact.rows] == [("msln", False), ("checkpoint", True)]
    assert [row["scheme"] for row in other.rows] == ["msln", "gact:L2"]
    assert exact.curve is not None
    assert exact.curve.limit_bytes == LIMIT


def test_uniform_plans_are_compared_with() -> None:
    plans = (("checkpoint,only=model.layers.[0-10]", 1.2, 90), ("offload,only=model.layers.[0-31]", 1.5, 90))
    what = found(*plans, exact=200)

    (note,) = (note for note in tables_of(what, "t")[0].notes if "treats all blocks alike" in note)
    assert note == (
        "With exact gradients, the fastest plan that treats all blocks alike needs 90.00 GiB and takes 1.50 of the "
        "exact step's time: offload all blocks."
    )


def record_of(scheme: str, limit: int, need: int, meter: MeterName = "simulated") -> FitRecord:
    """Return the record of a plan within a limit and with a need, both in GiB, of a fit in 100 GiB."""
    case = Case(model="tiny-llama", batch_size=1, scheme=scheme, optimizer="adamw", meter=meter)
    return FitRecord(
        recipe="m",
        case=case.model_copy(update={"memory_limit_bytes": limit * GIB}),
        outcome=measured([0, 0, 0, need * GIB], 1.0, 0.0, limit * GIB),
        asked=Asked(optimizer="adamw", limit_bytes=LIMIT),
        recorded_at=now(),
        **provenance("actbench fit tiny-llama"),
    )


def test_a_plan_that_fits_into_a_simulated_budget_has_the_need_that_it_has_there() -> None:
    records = [record_of("exact", 100, 200), record_of("checkpoint", 95, 92), record_of("checkpoint", 88, 90)]

    (found,) = fitted(records)

    assert [each.need_bytes // GIB for each in found.tried if each.record.case.scheme == "checkpoint"] == [92]


def test_what_is_printed_has_the_limit_that_was_asked_for() -> None:
    (found,) = fitted([record_of("exact", 100, 200), record_of("checkpoint", 88, 90)])

    command = pieces_of(found.shortlist(), 3)[-1][1]

    assert "-s checkpoint" in command
    assert f"--memory-limit {LIMIT}B" in command


def test_what_was_measured_stands_beside_its_simulation_within_another_limit() -> None:
    on_device = record_of("checkpoint", 100, 91, "cpu")
    (found,) = fitted([record_of("exact", 100, 200), record_of("checkpoint", 88, 90), on_device])

    (pairs,) = (table for table in tables_of(found, "t") if table.title.startswith("Measured"))

    assert [(row["scheme"], row["meter"]) for row in pairs.rows] == [("checkpoint", "simulated"), ("checkpoint", "cpu")]


STAGES = tuple(f"layer{stage}.{place}" for stage, count in ((1, 3), (2, 4)) for place in range(count))
TWO = tuple(f"model.{half}.layers.{place}" for half in ("encoder", "decoder") for place in range(4))


@pytest.mark.parametrize(
    ("blocks", "spec", "name", "words"),
    [
        (LAYERS, "exact", "exact", "exact"),
        (
            LAYERS,
            "checkpoint,only=model.layers.[0-10]+msln,only=model.layers.[11-31]+chunked_loss:8",
            "checkpoint blocks 0-10, msln blocks 11-31, chunked_loss:8",
            "checkpoint on blocks 0-10, msln on blocks 11-31, chunked_loss:8",
        ),
        (
            LAYERS,
            "checkpoint,only=model.layers.[0-3]/model.layers.9+offload,only=model.layers.[0-1]",
            "checkpoint+offload blocks 0-1, checkpoint blocks 2-3/9",
            "checkpoint with offload on blocks 0-1, checkpoint on blocks 2-3 and 9",
        ),
        (
            LAYERS,
            "msln,only=model.norm/model.layers.[0-31]",
            "msln all blocks and model.norm",
            "msln on all blocks and on model.norm",
        ),
        (
            STAGES,
            "gact:L2,only=conv1/layer1.[0-1]/layer2.3",
            "gact:L2 blocks layer1.0-1/layer2.3 and conv1",
            "gact:L2 on blocks layer1.0-1 and layer2.3 and on conv1",
        ),
        (
            TWO,
            "checkpoint,only=model.decoder.layers.[0-1]",
            "checkpoint blocks decoder.layers.0-1",
            "checkpoint on blocks decoder.layers.0-1",
        ),
        ((), "checkpoint,only=h.0", "checkpoint h.0", "checkpoint on h.0"),
    ],
)
def test_plans_in_words(blocks: Sequence[str], spec: str, name: str, words: str) -> None:
    assert short(spec, blocks) == name
    assert sentence(spec, blocks) == words


def test_what_every_plan_has_is_left_out_of_names() -> None:
    assert short("lora:16+checkpoint", LAYERS, "lora:16") == "checkpoint"
    assert short("lora:16", LAYERS, "lora:16") == "lora:16"


def test_what_is_uniform() -> None:
    assert is_uniform("checkpoint+offload,only=model.layers.[0-31]+msln,only=model.norm", LAYERS)
    assert not is_uniform("offload,only=model.layers.[0-30]", LAYERS)
    assert not is_uniform("offload,only=h.0", ())


def test_specifications_of_plans_stand_below_the_table() -> None:
    spec = "checkpoint,only=model.layers.[0-10]"

    notes = tables_of(found((spec, 1.2, 90), exact=200), "t")[0].notes

    assert notes[0] == f"checkpoint blocks 0-10 is -s '{spec}' --optimizer adamw"


OLD = Path(__file__).parents[2] / "data" / "fit-2026-11.fit.jsonl"


def test_records_of_stacks_that_were_searched_for_can_be_read() -> None:
    tables = fit_tables(store.read_results(OLD, FitRecord).records)

    assert tables[0].lead[0].startswith("checkpoint,every=2")
    assert [row["scheme"] for row in tables[0].rows]
    assert "Frontier" in tables[-1].title
    assert all(map(render.markdown, tables))
