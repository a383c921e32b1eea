"""The page of published peaks is what its figures and records say, and a sample of it what the code simulates now."""

from __future__ import annotations

import re
import runpy
import statistics
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from actbench.cli.app import app
from actbench.model.measured import Measurement
from actbench.model.records import TorchEra
from actbench.simulator.profiles import version_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "published-peaks.md").read_text()
MOST = 0.01
SAMPLE = (  # small and quick, of all sources
    "bert-large-uncased -b 4 --sequence-length 512 --device-profile v100-16gb --attention eager --optimizer adafactor",
    "vit_l_16 -b 16 --device-profile a100-40gb --optimizer adam --dtype bf16 -s late_zero_grad",
    "llama-3.2-3b -b 4 --sequence-length 768 --dtype bf16 --device-profile l40s -s lora:64",
    "llama-3.2-3b -b 4 --sequence-length 768 --dtype bf16 --device-profile l40s -s lora:256",
    "./benchmarks/published_models/causal_lm.py:mistral_7b_copied -b 4 --device-profile a100-80gb -s lora:16",
    "./benchmarks/published_models/foak.py:powerlm_3b_fused_recomputed -b 2",
    "llama-3.1-8b -b 2 --sequence-length 2048 --dtype bf16 --device-profile rtx-4090 --optimizer adamw-fused -s lora:8",
    "llama-3.2-1b@tie_word_embeddings=false",
    "llama-3.1-8b@vocab_size=151936,hidden_size=2048,num_hidden_layers=24",
    "llama-3.1-8b@vocab_size=151936,intermediate_size=11008,num_key_value_heads=32 -b 1 --sequence-length 512",
    "vit_h_14 -b 8 --autocast bf16 --optimizer adamw-fused --device-profile cuda-16gib -s adamfp8",
    "./benchmarks/published_models/others.py:head_4096",
    "./benchmarks/published_models/oldliger.py:head_8192",
    (
        "google/vit-base-patch16-224@num_labels=100 -b 64 --autocast float16 --optimizer adamw"
        " --device-profile rtx-2080-ti -s lora:4,target=q_proj/v_proj+regelu2"
    ),
    "./benchmarks/published_models/deit.py:ti",
    (
        "t5-base -b 100 --sequence-length 128 --target-length 3 --attention eager --optimizer adamw-loop"
        " --device-profile a100-80gb -s lora:32 "
    ),
    "resnet101 -b 64",
    "mobilenet_v2 -b 32",
    "./benchmarks/published_models/segformer-b0-ade",
    "./benchmarks/published_models/upernet-swin-t",
    "./benchmarks/published_models/segmentation.py:unet_128",
    "./benchmarks/published_models/segmentation.py:psp_r18 ",
    "./benchmarks/published_models/segmentation.py:torchvision_fcn_r50",
    "./benchmarks/published_models/mmseg.py:fcn_r18_d8_512x1024_19",
    "./benchmarks/published_models/mmseg_others.py:uper_deits_512x512_150",
    "./benchmarks/published_models/mmaction.py:tsn_r50_8x224_200",
    "roberta-base -b 128",
    "./benchmarks/published_models/masked_lm.py:bert_sdpa_256 -b 4",
    "./benchmarks/published_models/masked_lm.py:albert_eager_256 -b 2",
    "./benchmarks/published_models/causal_loop.py:opt_350m_128 -b 1",
    "./benchmarks/published_models/layers.py:rope_width_512",
    "./benchmarks/published_models/layers.py:sparsemax_8192",
    "./benchmarks/published_models/layers.py:torch_rms_norm_1024",
    "./benchmarks/published_models/layers.py:tiled_swiglu_1024",
    "resnet50 -b 64",
)

LONGEST = "llama-3.1-8b -b 2"  # takes minutes


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "published_peaks.py"))


@pytest.fixture(scope="module")
def found(table: dict[str, Any]) -> list[tuple[Any, Measurement]]:
    records = table["records"]()
    cases = [(row, table["case_of"](row["command"])) for row in table["runnable"]()]
    return [(row, records[case].outcome) for row, case in cases if case in records]


def test_the_page_is_rendered_from_figures_and_records(table: dict[str, Any]) -> None:
    assert table["page"](table["records"]()) == PAGE


def test_rows_wait_for_a_record_only_in_tables_of_many(table: dict[str, Any]) -> None:
    records = table["records"]()
    waiting = [row for row in table["runnable"]() if table["case_of"](row["command"]) not in records]

    assert all("unseen" in row for row in waiting)
    assert all(f"- {row['where']}, {row['device']}: {row['setting']}." in PAGE for row in waiting)


def test_the_third_looked_at_last_is_drawn_of_all_that_was_not_seen(table: dict[str, Any]) -> None:
    settings, few = table["SETTINGS"], {"gpus": 1, "model": "a/b", "length": 8, "dtype": "bfloat16", "method": "full"}
    setting = {
        **few,
        "where": "f.csv",
        "framework": "none",
        "command": "m -b {batch}",
        "peaks": {"1": 5, "2": 6, "4": 7},
    }
    made = {"source": "s", "card": "c", "kind": "allocated", "seed": 1, "setting": [{**setting, "seen": [1]}, setting]}
    drawn = settings["unseen"](made)
    without = {**made, "setting": [{**setting, "seen": [1]}, {**setting, "left_out": "why"}]}
    del without["setting"][1]["command"]

    assert len(drawn) == 1
    assert (0, "1") not in drawn
    assert settings["unseen"](without) == drawn
    assert [row["command"] for row in settings["rows"](without)] == ["m -b 1", "m -b 2", "m -b 4"]
    assert list(settings["left_out"](without)) == ["s, 3 rows: why"]
    assert {row["command"] for row in settings["rows"](made) if row["unseen"]} == {
        f"m -b {batch}" for _, batch in drawn
    }


def test_a_setting_may_have_a_title_a_card_and_another_unit(table: dict[str, Any]) -> None:
    setting = {"where": "f", "title": "norm of {batch}", "card": "d", "gpus": 1, "command": "m -b {batch}"}
    made = {
        "source": "s",
        "kind": "allocated",
        "seed": 1,
        "unit": 2**20,
        "setting": [{**setting, "peaks": {"8": 512.0}}],
    }

    (row,) = table["SETTINGS"]["rows"](made)

    assert (row["setting"], row["device"], row["published_gib"]) == ("norm of 8", "1 x d", 0.5)


def test_scripts_count_in_the_table_by_source() -> None:
    told = [line for line in PAGE.splitlines() if "scripts as they are" in line]

    assert {line.partition("](public-scripts.md#")[2].partition(")")[0] for line in told} >= {"peft", "modded-nanogpt"}
    rows = re.findall(r"^\| (?!of these|\*\*)[^|]*\| (\d+) \| [\d.]+% \|", PAGE, re.MULTILINE)
    assert f"| **All** | {sum(map(int, rows))} |" in PAGE


def test_every_large_error_has_its_reason(table: dict[str, Any], found: list[tuple[Any, Measurement]]) -> None:
    for row, measured in found:
        error = table["error"](row, measured)
        if abs(error) > table["LARGE"]:
            assert row.get("reason"), row["command"]
            assert row["class"] != "agrees", (row["command"], error)


def test_every_row_says_what_its_source_does_not_state(table: dict[str, Any]) -> None:
    for row in table["TABLES"]["figure"]:
        assert set(row["unstated"]) <= set(table["UNSTATED"]), row["setting"]
        assert (row["kind"] == "not stated") == ("kind" in row["unstated"]), row["setting"]
        told = " ".join(row.get(name, "") for name in ("setting", "detail", "reason"))
        if re.search("assumed|not stated|does not say|taken as", told):
            assert row["unstated"], row["setting"]


def test_what_a_source_leaves_open_is_told_whatever_the_error(table: dict[str, Any]) -> None:
    for kind in ("length", "kind", "adapters", "image size"):
        unknown = [row for row in table["runnable"]() if kind in row["unstated"]]
        assert any(row["class"] == "agrees" for row in unknown), kind
    for row in table["runnable"]():
        told = f"not stated: {', '.join(table['UNSTATED'][name] for name in row['unstated'])}"
        assert not row["unstated"] or any(row["setting"] in line and told in line for line in PAGE.splitlines())


def test_the_page_has_the_median_of_rows_whose_setting_is_known(
    table: dict[str, Any], found: list[tuple[Any, Measurement]]
) -> None:
    errors = [table["error"](row, measured) for row, measured in found if not row["unstated"]]
    median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)

    assert f"| **Rows whose setting is known** | {len(errors)} | {median:.1%} | {worst:+.1%} |" in PAGE


def test_a_figure_without_a_command_says_what_is_missing(table: dict[str, Any]) -> None:
    for row in table["TABLES"]["figure"]:
        assert "command" in row or (row["class"] == "setting" and row["reason"])


def test_most_published_peaks_are_met(table: dict[str, Any], found: list[tuple[Any, Measurement]]) -> None:
    known = [table["error"](row, measured) for row, measured in found if not row["unstated"]]

    assert len(found) >= 700
    assert statistics.median(map(abs, known)) <= 0.01


def test_commands_are_those_of_the_command_line(table: dict[str, Any]) -> None:
    group: Any = typer.main.get_command(app)
    measure = group.get_command(None, "measure")

    for command in {row["command"] for row in table["runnable"]()}:
        given = measure.make_context("measure", command.split()).params
        case = table["case_of"](command)
        assert (given["model"], int(given["batch_size"])) == (case.model, case.batch_size)
        assert (given["torch_era"], given["device_profile"]) == (case.torch_era, case.device_profile)


def test_each_row_is_simulated_as_the_torch_that_was_measured(table: dict[str, Any]) -> None:
    eras = [(version_of(era), era) for era in get_args(TorchEra)]
    named = 0
    for row in table["runnable"]():
        case = table["case_of"](row["command"])
        assert case.torch_era, row["command"]
        told = re.search(r"torch (\d+\.\d+)", f"{row['device']} {row.get('detail', '')}")
        if told is not None:
            named += 1
            assert case.torch_era == next(era for last, era in eras if version_of(told[1]) <= last), row["command"]
    assert named >= 29


def test_the_sample_is_of_most_sources(table: dict[str, Any]) -> None:
    rows = table["runnable"]()
    sampled = {row["source"] for row in rows if row["command"].startswith(SAMPLE)}

    assert all(any(row["command"].startswith(begin) for row in rows) for begin in SAMPLE)
    assert len(sampled) >= 18


@pytest.mark.sampled(slow=8)
@pytest.mark.parametrize(
    "begin",
    [pytest.param(begin, marks=pytest.mark.exhaustive) if begin.startswith(LONGEST) else begin for begin in SAMPLE],
)
def test_a_row_is_what_is_simulated_now(
    begin: str, table: dict[str, Any], found: list[tuple[Any, Measurement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    row, measured = next((row, measured) for row, measured in found if row["command"].startswith(begin))

    assert table["simulated_now"](row) == pytest.approx(table["figure"](row, measured), rel=MOST)
