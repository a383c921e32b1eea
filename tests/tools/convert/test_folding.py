from __future__ import annotations

import pytest

from actbench.model.records import Site, Unreached
from actbench.tools.convert.report import folded, sites_table


def site(path, **others):
    return Site(path=path, was="nn.GELU", becomes="3-bit GELU", **others)


def paths(*given, **others):
    return [(place.path, times) for place, times in folded([site(path, **others) for path in given])]


def test_consecutive_numbers_are_one_range_where_the_first_stood():
    assert paths("layer.0.act", "head", "layer.1.act", "layer.2.act") == [("layer.[0-2].act", 3), ("head", 1)]


def test_a_gap_ends_a_range_and_one_number_is_none():
    assert paths("layer.1.act", "layer.2.act", "layer.4.act") == [("layer.[1-2].act", 2), ("layer.4.act", 1)]


def test_numbers_are_ordered_as_numbers():
    assert paths(*(f"layer.{number}" for number in range(12))) == [("layer.[0-11]", 12)]


def test_ranges_within_ranges_are_folded_where_all_are_alike():
    assert paths(*(f"layer.{one}.experts.{other}" for one in range(2) for other in range(4))) == [
        ("layer.[0-1].experts.[0-3]", 8)
    ]
    assert paths("layer.0.experts.0", "layer.0.experts.1", "layer.1.experts.0") == [
        ("layer.[0-1].experts.0", 2),
        ("layer.0.experts.1", 1),
    ]


def test_digits_within_a_name_are_no_number():
    assert paths("layer1.act", "layer2.act", "") == [("layer1.act", 1), ("layer2.act", 1), ("", 1)]


@pytest.mark.parametrize("other", [{"bytes_after": 3}, {"calls": 2}, {"becomes": "2-bit GELU"}])
def test_places_that_differ_stay_apart(other):
    given = [site("layer.0", bytes_after=4, calls=1), site("layer.1", bytes_after=4, calls=1).model_copy(update=other)]
    assert [place for place, _ in folded(given)] == given


def test_places_that_are_not_reached_are_folded_too():
    given = [Unreached(path=f"layer.{number}", kind="linear layer", reason="read") for number in range(3)]
    assert [place.path for place, _ in folded(given)] == ["layer.[0-2]"]


def test_a_folded_table_has_the_sums_of_its_sites_and_the_same_total():
    sites = [site(f"layer.{number}.act", bytes_before=320, bytes_after=40, calls=2) for number in range(5)]
    whole, short = sites_table(sites), sites_table(sites, fold=True)

    assert len(whole.rows) == 6
    assert [row["path"] for row in short.rows] == ["layer.[0-4].act", "total of 5"]
    assert [short.rows[0][key] for key in ("calls", "bytes_before", "bytes_after", "smaller_by")] == [
        10,
        1600,
        200,
        8.0,
    ]
    assert short.rows[-1] == whole.rows[-1]
    assert any("[first-last]" in note for note in short.notes)
    assert not any("[first-last]" in note for note in whole.notes)


def test_what_another_place_keeps_has_no_ratio():
    table = sites_table([site("act", bytes_before=0, bytes_after=40), site("head", bytes_before=80, bytes_after=40)])
    assert [row["smaller_by"] for row in table.rows] == [None, 2.0, 1.0]
