"""What there is to choose from."""

from __future__ import annotations

import pytest

from actbench.cli.app import app
from actbench.errors import UsageError
from actbench.measuring.meters import profiles


def listed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def test_devices_lists_every_profile_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in listed("devices", capsys=capsys).splitlines()[1:]]

    assert [words[0] for words in lines] == profiles.names()
    assert next(words for words in lines if words[0] == "rtx-4090")[1:] == ["23.64", "GiB", "8.9", "CUDA", "est."]


def test_devices_finds_a_part_of_a_name_and_refuses_what_none_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a100-40gb" in listed("devices", "A100", capsys=capsys)
    with pytest.raises(UsageError, match="'actbench devices' lists all"):
        listed("devices", "tpu", capsys=capsys)
