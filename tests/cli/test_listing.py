"""What there is to choose from."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from actbench.cli import listing
from actbench.cli.app import app
from actbench.errors import UsageError
from actbench.plugins import Plugin
from actbench.simulator import profiles


def listed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def test_devices_lists_every_profile_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in listed("devices", capsys=capsys).splitlines()[1:]]

    assert sorted(words[0] for words in lines) == sorted(profiles.profile_names())
    found = {words[0]: words[1:] for words in lines}
    assert found["rtx-4090"] == ["23.64", "GiB", "8.9", "CUDA", "est.", "desktop"]
    assert found["t4"][-3:] == ["data", "centre", "colab"]
    kinds = [words[6] for words in lines if words[0] in ("rtx-4060", "rtx-5090", "rtx-a6000", "t4", "h200")]
    assert kinds == ["desktop", "desktop", "workstation", "data", "data"]


def test_devices_finds_a_part_of_a_name_and_refuses_what_none_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a100-40gb" in listed("devices", "A100", capsys=capsys)
    with pytest.raises(UsageError, match="'actbench devices' lists all"):
        listed("devices", "tpu", capsys=capsys)


@pytest.mark.parametrize("is_ours", [True, False])
def test_schemes_say_their_package_if_one_is_not_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_ours: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "METADATA").write_text(f"Name: {'actbench' if is_ours else 'theirs'}\nVersion: 1.0\n")
    (tmp_path / "entry_points.txt").write_text("[actbench.scheme]\noffload = theirs:Offload\n")
    [entry] = PathDistribution(tmp_path).entry_points
    monkeypatch.setattr(listing, "installed", lambda group: {"offload": Plugin("offload", entry)})

    heading, *lines = listed("schemes", capsys=capsys).splitlines()

    ends = {line.split()[0].partition(":")[0]: line.split()[-2:] for line in lines}
    if is_ours:
        assert "from" not in heading.split()
        assert ends["exact"][-1] != "actbench"
    else:
        assert heading.split()[-1] == "from"
        assert ends["offload"] == ["theirs", "1.0"]
        assert ends["exact"][-1] == "actbench"
