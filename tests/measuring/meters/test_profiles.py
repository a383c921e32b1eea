from __future__ import annotations

import runpy

import pytest

from actbench.errors import UsageError
from actbench.measuring.meters import profiles
from actbench.units import GIB


def test_the_default_is_a_card_of_16_gib() -> None:
    assert profiles.get(profiles.DEFAULT).memory_bytes == 16 * GIB


@pytest.mark.parametrize("name", profiles.names())
def test_every_name_gets_its_profile(name: str) -> None:
    profile = profiles.get(name)

    assert profile.name == name
    assert profile.memory_bytes > GIB
    assert profile.rounding_bytes == (512 if profile.is_cuda else 1)
    assert profile.is_cuda == (name != "cpu")


def test_flash_attention_needs_ampere() -> None:
    assert [profiles.get(name).has_tensor_float for name in ("cpu", "v100-16gb", "t4", "rtx-3090")] == [
        False,
        False,
        False,
        True,
    ]


def test_a_wrong_name_is_answered_by_close_ones() -> None:
    with pytest.raises(UsageError, match=r"--device-profile 'A100'.*did you mean .*a100-40gb"):
        profiles.get("A100")


def test_a_name_like_no_other_is_answered_by_all() -> None:
    with pytest.raises(UsageError, match=r"known: cpu, cuda-16gib, .*h200"):
        profiles.get("zzzzzz")


def test_the_cpu_has_the_memory_that_its_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actbench.results.machine.memory_bytes", lambda: 3 * GIB)

    assert runpy.run_path(profiles.__file__)["get"]("cpu").memory_bytes == 3 * GIB
