"""What came of limits as JUnit's XML and as annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.report.compare import Comparison, compare, parse_limit
from actbench.report.gates import github_lines, junit

MakeRecord = Callable[..., MeasuredRecord]


@pytest.fixture
def found(make_record: MakeRecord) -> Comparison:
    """Return a comparison with a case that keeps its limit, one that breaks it, and one that the first file lacks."""
    before = [make_record(peak_bytes=1000), make_record("checkpoint", peak_bytes=500)]
    after = [make_record(peak_bytes=1000), make_record("checkpoint", peak_bytes=600), make_record("fewbit:3")]
    return compare(before, after, [parse_limit("peak:5%"), parse_limit("peak:>1KiB")])


def test_junit_has_a_suite_for_each_limit_and_a_test_for_each_case(found: Comparison) -> None:
    root = ElementTree.fromstring(junit(found))
    worse, most = root

    assert root.attrib == {"name": "actbench compare", "tests": "6", "failures": "1", "errors": "0", "skipped": "1"}
    assert [each.get("name") for each in root] == ["peak:5%", "peak:>1KiB"]
    kept, broken, new = worse
    assert [each.get("name") for each in worse] == [
        "tiny, exact, batch 8 (simulated)",
        "tiny, checkpoint, batch 8 (simulated)",
        "tiny, fewbit:3, batch 8 (simulated)",
    ]
    assert len(kept) == 0
    assert [(each.tag, each.get("message")) for each in broken] == [("failure", "500 B before, 600 B now")]
    assert [each.tag for each in new] == ["skipped"]
    assert [len(each) for each in most] == [0, 0, 0]


def test_a_limit_that_nothing_was_held_to_fails(make_record: MakeRecord) -> None:
    root = ElementTree.fromstring(junit(compare([], [make_record()], [parse_limit("peak:5%")])))

    assert (root.get("failures"), root.get("skipped")) == ("1", "1")


def test_an_annotation_is_one_line_however_cases_are_named(make_record: MakeRecord) -> None:
    evil = "a\n::error::b%0A\ufffe"
    before, after = make_record(model=evil, peak_bytes=100), make_record(model=evil, peak_bytes=200)
    comparison = compare([before], [after], [parse_limit("peak:5%")])
    (line,) = github_lines(comparison)

    assert line.startswith("::error title=limit broken%3A peak%3A5%25::a ::error::b%250A")
    assert line.endswith("100 B before, 200 B now")
    assert "\n" not in line
    assert "\ufffe" not in junit(comparison)
    assert ElementTree.fromstring(junit(comparison)).get("failures") == "1"


def test_cases_that_differ_in_a_setting_have_names_of_their_own(make_record: MakeRecord) -> None:
    before = [make_record(attention=attention, peak_bytes=100) for attention in ("eager", "sdpa")]
    after = [make_record(attention=attention, peak_bytes=200) for attention in ("eager", "sdpa")]
    found = compare(before, after, [parse_limit("peak:5%")])
    (suite,) = ElementTree.fromstring(junit(found))
    names = [f"tiny, exact, batch 8 (simulated, attention {attention})" for attention in ("eager", "sdpa")]

    assert [each.get("name") for each in suite] == names
    assert [line.split("::")[2].partition(": ")[0] for line in github_lines(found)] == names


def test_a_name_does_not_change_with_the_content_of_files(make_record: MakeRecord) -> None:
    def of(name: str, digest: str) -> MeasuredRecord:
        record = make_record(device_profile=name, memory_limit_bytes=1024)
        return record.model_copy(update={"files": {name: digest}})

    records = [of("a.toml", "1" * 16), of("b.toml", "2" * 16)]
    checks = compare(records, records, [parse_limit("peak:5%")]).checks

    assert [check.case for check in checks] == [
        f"tiny, exact, batch 8 (simulated, device profile {name}.toml)" for name in "ab"
    ]
