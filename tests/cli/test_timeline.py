"""``measure --timeline`` and its files."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest

CASE = ("measure", "tiny-gpt2", "-b", "2", "--sequence-length", "16", "--meter", "simulated")


@pytest.mark.parametrize(
    ("flags", "naming"),
    [
        (("--export-timeline", "x.txt"), "x.txt: name a file that ends in .png, .svg, .html, .json"),
        (("--export-timeline", "-"), "name a file that ends in"),
        (("--export-snapshot", "-"), "a pickle is no text"),
        (("--ledger", "--timeline"), "--ledger runs no step"),
        (("--ledger", "--export-snapshot", "x.pickle"), "--ledger runs no step"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], naming: str
) -> None:
    monkeypatch.chdir(tmp_path)

    cli.refused(*CASE, *flags, naming=naming)

    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_holders_are_shown_and_written(cli: Any, tmp_path: Path) -> None:
    files = {suffix: tmp_path / f"memory.{suffix}" for suffix in ("json", "html", "pickle")}
    exports = ("--export-timeline", files["html"], "--export-snapshot", files["pickle"], "--export-json", files["json"])

    ended = cli(*CASE, "-s", "checkpoint", "--timeline", *exports)

    assert ended.status == 0, ended.err
    assert ended.out.count("Who holds the peak of") == 2
    assert "AdamW state" in ended.out
    lines = ended.out.splitlines()
    assert any(line.startswith("|forward") for line in lines)
    assert not set(ended.out) & set("▁▂▃▄▅▆▇█")
    for outcome in (json.loads(line)["outcome"] for line in files["json"].read_text().splitlines()):
        held = [each["held_bytes"] for each in outcome["timeline"]["holders"] if each["kind"] != "host"]
        assert sum(held) == outcome["timeline"]["peak_bytes"] == outcome["peak_bytes"]
    assert "Memory over a step: checkpoint on tiny-gpt2" in files["html"].read_text()
    for scheme in ("exact", "checkpoint"):
        assert list(pickletools.genops((tmp_path / f"memory-{scheme}.pickle").read_bytes()))
