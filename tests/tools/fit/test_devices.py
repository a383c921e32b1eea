"""A fit whose plans are measured on a device."""

from __future__ import annotations

import pytest
from fitcommand import AMONG, STEP, records_below

CPU = "gib = 4\nfp32 = 0.1\nbandwidth = 20\nlink = 10\nlaunch = 1\n"


def test_a_device_that_is_not_there_is_told_before_anything_is_simulated(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    told = cli.refused(
        *STEP, *AMONG, "--measure", "-o", tmp_path / "none", naming="--measure: rtx-4090 is a CUDA device"
    )

    assert "leave --measure out, or give the same command on a machine that has one" in told
    assert not log.exists()


@pytest.mark.exhaustive
def test_what_is_measured_stands_beside_what_was_simulated(cli, log, fake, tmp_path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(CPU)
    words = [str(profile) if word == "rtx-4090" else word for word in STEP]

    ended = cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)

    assert ended.status == 0, ended.err
    meters = [line.split()[0] for line in log.read_text().splitlines()]
    assert meters.count("cpu") == 2
    assert "Measured and estimated" in ended.out
    (table,) = tmp_path.rglob("*.fit.md")
    section = table.read_text().partition("Measured and estimated")[2].partition("Frontier")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    heads, lines = rows[0], [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert {"Peak off by", "Step off by"} <= set(heads)
    simulated, measured = lines[0], lines[1]
    assert simulated["Meter"] == "simulated"
    assert "est." in simulated["Step"]
    assert measured["Meter"] == "cpu"
    assert "est." not in measured["Step"]
    assert measured["Peak off by"] == f"{100 * (fake.OVER_ESTIMATE - 1):+.1f} %"
    (record,) = [each for each in records_below(tmp_path) if each.case.meter == "cpu"][:1]
    assert record.outcome.estimated is None
    assert record.outcome.step_seconds
    assert record.outcome.step_seconds[0] == fake.SECONDS / fake.OVER_ESTIMATE

    again = cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)

    assert again.status == 0
    assert len(log.read_text().splitlines()) == len(meters)  # all of it stood in the file


@pytest.mark.slow
def test_a_row_of_a_device_is_none_of_the_shortlist(cli, log, tmp_path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(CPU)
    words = [str(profile) if word == "rtx-4090" else word for word in STEP]
    cli(*words, *AMONG, "--memory-limit", "6GiB", "--measure", "-o", tmp_path)
    csv = next(tmp_path.rglob("*.fit.csv")).read_text().splitlines()

    stacks = [tuple(row.split(",")[:2]) for row in csv[1:]]

    assert len(stacks) == len(set(stacks))
