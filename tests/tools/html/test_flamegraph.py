"""Flame graphs of peaks, and files for other viewers: bytes add up, and the page's script draws what the data say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from randomsteps import random_step

import actbench
from actbench.cli.timeline import TimelineFlags, export_timelines
from actbench.measuring.meters.peak import alive
from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.model.measured import MeasuredRecord
from actbench.model.timeline import KINDS, LINES, MODULE_SPANS, SAMPLED_HOLDERS, SAMPLES, TITLES, Timeline
from actbench.report.exporting import Exported
from actbench.report.render.stacks import perfetto, speedscope, stacks
from actbench.tools.html.flamegraph import flame_page

EVIL = "</script><img src=x onerror='document.title=1'>\" \u2028"
NODE = shutil.which("node")


STEP = random_step(3000)
TIMELINE = STEP.timeline()


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def page_of(timeline: Timeline, title: str = "exact") -> str:
    return "".join(flame_page(Exported([], "Who holds the peak", [], print), [(title, timeline)]))


def test_bytes_of_stacks_add_up_to_the_peak() -> None:
    assert sum(each.held_bytes for each in stacks(TIMELINE)) == TIMELINE.peak_bytes
    assert {"host"} & {each.kind for each in stacks(TIMELINE)} == set()
    (graph,) = data_of(page_of(TIMELINE))["graphs"]
    assert sum(held for _, _, held, _ in graph["stacks"]) == TIMELINE.peak_bytes


def stacks_at(graph: dict[str, Any], place: int) -> list[tuple[str, int, int]]:
    """Return the kind, the bytes and the storages of each holder that the page has at a moment."""
    last = [(kind, [each for each in readings if each[0] <= place]) for _, kind, readings in graph["sampled"]]
    return [(kind, *readings[-1][1:]) for kind, readings in last if readings]


def test_at_each_moment_the_page_holds_what_is_alive() -> None:
    (graph,) = data_of(page_of(TIMELINE))["graphs"]

    assert len(graph["moments"]) == SAMPLES
    assert len(graph["sampled"]) <= SAMPLED_HOLDERS + LINES + len(KINDS)
    assert graph["peak"] in graph["moments"]
    for place, (moment, _, told) in enumerate(graph["moments"]):
        live = alive(STEP.events[: STEP.before + moment])
        found = stacks_at(graph, place)
        by_kind: Counter[str] = Counter()
        for name, amount in live.items():
            by_kind[TITLES[STEP.kind_of(name)]] += amount
        assert told == sum(live.values())
        assert {kind: sum(held for each, held, _ in found if each == kind) for kind in by_kind} == by_kind
        assert sum(tensors for *_, tensors in found) == len(live)
    assert [told for _, _, told in graph["moments"] if told > graph["peak"][2]] == []


def test_equal_modules_of_blocks_are_one_holder_over_the_step_and_a_single_one_has_its_name() -> None:
    names = {each.module for each in TIMELINE.sampled}
    few = replace(STEP, origins={name: Origin("blocks.3.part", "aten::mm") for name in range(3000)}).timeline()

    assert "blocks.*.part3" in names
    assert not any(re.match(r"blocks\.\d", name) for name in names)
    assert {each.module for each in few.sampled} == {"blocks.3.part"}


def test_a_record_from_before_has_the_peak_alone() -> None:
    older = TIMELINE.model_dump(mode="json", exclude={"samples", "sampled", "modules"})
    (graph,) = data_of(page_of(Timeline.model_validate(older)))["graphs"]

    assert graph["moments"] == graph["sampled"] == []
    assert sum(held for _, _, held, _ in graph["stacks"]) == TIMELINE.peak_bytes


def test_a_stack_goes_from_the_line_by_the_module_to_the_operator() -> None:
    found = next(each.frames for each in stacks(TIMELINE) if "small" not in each.frames[-1])

    assert re.fullmatch(r"train.py:\d x = model\(x\)", found[0])
    assert found[1:3] == ("blocks", "*")
    assert re.fullmatch(r"part\d+", found[3])
    assert re.fullmatch(r"aten::mm \([a-z ]+\)", found[4])


def test_a_profile_for_speedscope_has_the_bytes_of_the_peak() -> None:
    found = json.loads(speedscope([("exact", TIMELINE), ("fewbit:3", TIMELINE)]))

    assert [profile["name"] for profile in found["profiles"]] == ["Peak of exact", "Peak of fewbit:3"]
    for profile in found["profiles"]:
        assert sum(profile["weights"]) == profile["endValue"] == TIMELINE.peak_bytes
        assert len(profile["weights"]) == len(profile["samples"])
        names = [[found["shared"]["frames"][frame]["name"] for frame in sample] for sample in profile["samples"]]
        assert names == [list(each.frames) for each in stacks(TIMELINE)]


def test_counters_for_perfetto_add_up_to_what_is_alive() -> None:
    events = json.loads(perfetto([("exact", TIMELINE)]))["traceEvents"]

    counters = [each for each in events if each["ph"] == "C"]
    assert [each["ts"] for each in counters] == list(TIMELINE.moments)
    assert [sum(each["args"].values()) for each in counters] == list(TIMELINE.totals)
    spans = [each for each in events if each["ph"] == "X" and "args" not in each]
    assert [each["name"] for each in spans] == ["forward", "backward", "optimizer"]
    assert spans[-1]["ts"] + spans[-1]["dur"] == TIMELINE.events
    assert max(sum(each["args"].values()) for each in counters) == TIMELINE.peak_bytes


def test_slices_of_modules_nest_within_each_other_and_within_parts_of_the_step() -> None:
    modules = {1: "a.x", 2: "a.y", 3: "<other>", 4: "b", 5: "a.x", 6: "a.x.deep", 7: "", 8: "a"}
    events = [(0, 8), *((name, 8) for name in modules)]
    step = StepEvents(
        events, 1, 9, [("forward", 1), ("backward", 5)], {}, {n: Origin(m, "") for n, m in modules.items()}
    )

    assert [(each.module, each.start, each.end) for each in step.timeline().modules] == [
        ("a", 0, 3),
        ("a.x", 0, 1),
        ("a.y", 1, 3),
        ("b", 3, 4),
        ("a", 4, 6),
        ("a.x", 4, 6),
        ("a.x.deep", 5, 6),
        ("a", 7, 8),
    ]
    slices = [each for each in json.loads(perfetto([("exact", TIMELINE)]))["traceEvents"] if each["ph"] == "X"]
    within = sorted(((each["ts"], each["ts"] + each["dur"]) for each in slices), key=lambda each: (each[0], -each[1]))
    around: list[int] = []
    for start, end in within:
        while around and around[-1] <= start:
            around.pop()
        assert start < end <= min(around, default=end)
        around.append(end)
    assert 3 < len(slices) <= 3 + MODULE_SPANS
    assert all(each["args"]["module"].split(".")[-1] == each["name"] for each in slices[3:])


def test_names_on_the_page_are_texts() -> None:
    page = page_of(TIMELINE, EVIL)

    assert "<img" not in page
    assert data_of(page)["graphs"][0]["name"].startswith("</script><img src=x")


def test_a_simulated_loop_has_its_lines_and_its_peak() -> None:
    with actbench.simulate("rtx-4090") as card:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = stacks(card.timeline())

    assert sum(each.held_bytes for each in found) == card.peak_bytes
    weights = next(each for each in found if each.kind == "weights")
    assert weights.frames[0].startswith("test_flamegraph.py:")
    assert "model = torch.nn.Sequential" in weights.frames[0]
    assert weights.frames[1:] == ("0", "parameter (weights)")


def test_each_flag_writes_its_file(make_record: Callable[..., MeasuredRecord], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.{end}" for name, end in (("flamegraph", "html"), ("perfetto", "json"))}
    files["speedscope"] = tmp_path / "speedscope.json"
    records = [make_record(scheme, timeline=TIMELINE) for scheme in ("exact", "fewbit:3")]

    export_timelines(records, TimelineFlags(**{f"export_{name}": file for name, file in files.items()}))

    page = files["flamegraph"].read_text()
    assert [graph["name"].split()[0] for graph in data_of(page)["graphs"]] == ["exact", "fewbit:3"]
    assert page.count("<table>") == 2
    assert len(json.loads(files["speedscope"].read_text())["profiles"]) == 2
    assert {each["pid"] for each in json.loads(files["perfetto"].read_text())["traceEvents"]} == {1, 2}


# As much of a browser's document as the script needs.
DOCUMENT = """
class Element {
  constructor() {
    Object.assign(this, { children: [], style: {}, dataset: {}, heard: {}, names: new Set() });
    Object.assign(this, { value: "", checked: false });
    const toggle = (name, on) => (on ? this.names.add(name) : this.names.delete(name));
    this.classList = { toggle, add: (name) => this.names.add(name) };
  }
  append(...added) {
    this.children.push(...added);
    if (added[0]?.isOption && this.value === "") this.value = added[0].value;
  }
  replaceChildren(...added) { this.children = added; }
  addEventListener(name, call) { this.heard[name] = call; }
}
const byId = {};
globalThis.document = {
  getElementById: (id) => (byId[id] ??= new Element()),
  createElement: () => new Element(),
  addEventListener: (name, call) => { document.heard = call; },
};
globalThis.Option = class {
  constructor(text, value) { Object.assign(this, { text, value: String(value), isOption: true }); }
};
"""


@pytest.mark.skipif(NODE is None, reason="no node")
def test_the_script_draws_frames_as_wide_as_their_bytes_and_zooms_inverts_and_searches(tmp_path: Path) -> None:
    page = page_of(TIMELINE)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    asked = """
const widths = (top) => byId.frames.children.filter((each) => each.style.top === top && !each.names.has("above"));
const row = (top) => widths(top).map((each) => [each.textContent, each.dataset.bytes, parseFloat(each.style.width)]);
const found = { root: row("0px"), first: row("21px") };
byId.search.value = "PART3 mm"; byId.search.heard.input(); found.both = byId.told.textContent;
byId.search.value = "part3"; byId.search.heard.input(); found.told = byId.told.textContent;
found.faint = byId.frames.children.filter((each) => !each.names.has("faint")).map((each) => each.textContent);
byId.search.value = ""; byId.search.heard.input();
widths("21px")[0].heard.click(); found.zoomed = row("21px"); found.out = byId.out.hidden;
document.heard({ key: "Escape" }); found.again = row("21px");
const first = JSON.parse(byId.data.textContent).graphs[0];
found.bars = byId.bars.children.map((each) => parseFloat(each.style.height));
found.moments = first.moments.map((_, place) => {
  byId.moment.value = String(place); byId.moment.heard.input();
  return [row("0px")[0], row("21px").reduce((sum, [, bytes]) => sum + Number(bytes), 0), byId.when.textContent];
});
byId.top.heard.click(); found.peak = row("21px");
byId.invert.checked = true; byId.invert.heard.change(); found.inverted = row("21px");
process.stdout.write(JSON.stringify(found));
"""
    (tmp_path / "page.js").write_text(
        f"{DOCUMENT}\ndocument.getElementById('data').textContent = {json.dumps(json.dumps(data_of(page)))};\n"
        f"{script}\n{asked}"
    )

    done = subprocess.run([str(NODE), str(tmp_path / "page.js")], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    peak, all_stacks = TIMELINE.peak_bytes, stacks(TIMELINE)
    assert [row[1:] for row in found["root"]] == [[peak, 100]]
    lines: dict[str, int] = {}
    for each in all_stacks:
        lines[each.frames[0]] = lines.get(each.frames[0], 0) + each.held_bytes
    assert {name: held for name, held, _ in found["first"]} == lines
    assert all(abs(width - 100 * held / peak) < 1e-9 for _, held, width in found["first"])
    assert found["faint"]
    assert all("part3" in name for name in found["faint"])
    matching = sum(each.held_bytes for each in all_stacks if any("part3" in name for name in each.frames))
    assert found["told"].endswith(f"{100 * matching / peak:.1f} % of the peak")
    assert found["both"].startswith("0 B")
    assert [row[2] for row in found["zoomed"]] == [100]
    assert found["out"] is False
    assert found["again"] == found["first"]
    assert len(found["bars"]) == len(found["moments"]) == SAMPLES
    for moment, height, ((_, held, width), below, told) in zip(
        TIMELINE.samples, found["bars"], found["moments"], strict=True
    ):
        live = sum(alive(STEP.events[: STEP.before + moment]).values())
        assert held == live
        assert 0.99 * live < below <= live, "frames narrower than a pixel are not drawn"
        assert abs(width - 100 * live / peak) < 1e-9
        assert abs(height - width) < 1e-9
        assert told.endswith(f"after {moment} of {TIMELINE.events} allocations and frees, {told.split(', ')[-1]}")
    assert sum(told.startswith("the peak, ") for *_, told in found["moments"]) == 1
    assert found["peak"] == found["first"]
    assert sum(held for _, held, _ in found["inverted"]) == peak
    assert {name for name, *_ in found["inverted"]} == {each.frames[-1] for each in all_stacks}
