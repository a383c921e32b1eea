from __future__ import annotations

from actbench.model.records import Site, Unreached
from actbench.tools.convert import report as converted


def test_sites_have_totals_of_those_that_ran() -> None:
    sites = [
        Site(path="a", was="nn.GELU", becomes="3-bit GELU", bytes_before=3200, bytes_after=300, calls=1),
        Site(path="b", was="nn.GELU", becomes="3-bit GELU", bytes_before=1600, bytes_after=150, calls=2),
        Site(path="c", was="nn.GELU", becomes="3-bit GELU", bytes_before=7, bytes_after=7, calls=0),
    ]
    table = converted.sites_table(sites)

    assert [row["smaller_by"] for row in table.rows] == [3200 / 300, 1600 / 150, 1.0, 4800 / 450]
    assert table.rows[-1]["path"] == "total of 2"
    assert (table.rows[-1]["bytes_before"], table.rows[-1]["bytes_after"]) == (3200 + 1600, 300 + 150)
    assert table.notes == ("Not counted, since the step never ran them: 1 of 3 sites.",)


def test_sites_that_lose_more_than_the_model_have_a_note() -> None:
    sites = [Site(path="a", was="nn.ReLU", becomes="1-bit ReLU", bytes_before=4096, bytes_after=1024, calls=1)]

    assert converted.sites_table(sites, saved_bytes=3072).notes == ()
    (note,) = converted.sites_table(sites, saved_bytes=64).notes
    assert (
        note
        == "These places keep 3.00 KiB less, the whole model 64 B less: other layers keep some of the same tensors."
    )

    (worse,) = converted.sites_table(sites, saved_bytes=-64).notes
    assert worse.startswith("These places keep 3.00 KiB less, the whole model 64 B more: ")


def test_sites_whose_bytes_are_not_known_have_no_total() -> None:
    table = converted.sites_table([Site(path="", was="the model", becomes="offloaded")])

    assert [column.key for column in table.columns] == ["path", "was", "becomes"]
    assert table.rows[0]["path"] == "(the model)"


def test_unreached_places_have_their_reason() -> None:
    table = converted.unreached_table([Unreached(path="classifier", kind="tanh", reason="a function")])

    assert table.rows == [{"path": "classifier", "kind": "tanh", "reason": "a function"}]


def test_a_site_inside_another_is_not_counted_twice() -> None:
    block = Site(path="layer", was="Block", becomes="recomputed", bytes_before=100, bytes_after=10, calls=1)
    linear = Site(path="layer.dense", was="nn.Linear", becomes="a sketch", bytes_before=40, bytes_after=0, calls=1)
    other = Site(path="layers", was="nn.Linear", becomes="a sketch", bytes_before=7, bytes_after=1, calls=1)

    total = converted.sites_table([block, linear, other]).rows[-1]

    assert (total["bytes_before"], total["bytes_after"]) == (107, 11)


def test_one_reason_of_many_modules_is_one_row_that_counts_them() -> None:
    names = [f"layer{stage}.{block}.conv{place}" for stage in "abcde" for block in range(4) for place in (1, 2)]
    many = [Unreached(path=name, kind="Conv2d", reason="not called") for name in names]
    others = [Unreached(path=name, kind="Linear", reason="not called") for name in ("fc", "head")]
    rows = converted.unreached_table([*many, *others]).rows

    assert [(row["path"], row["kind"]) for row in rows] == [
        ("40 modules, such as layera.[0-3].conv1", "Conv2d"),
        ("fc", "Linear"),
        ("head", "Linear"),
    ]
