"""Device profiles: the shipped ones, and those of a user's own files."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from actbench.errors import UsageError
from actbench.simulator import profiles
from actbench.simulator.cost.links import Links
from actbench.simulator.cost.rates import published
from actbench.units import GIB


def test_the_default_is_a_card_of_16_gib() -> None:
    assert profiles.get(profiles.DEFAULT).memory_bytes == 16 * GIB


@pytest.mark.parametrize("name", profiles.profile_names())
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
    with pytest.raises(UsageError, match=r"--device-profile 'A1000'.*did you mean .*a100-40gb"):
        profiles.get("A1000")


def test_a_name_like_no_other_is_answered_by_all() -> None:
    with pytest.raises(UsageError, match=r"known: cpu, cuda-16gib, .*h200"):
        profiles.get("zzzzzz")


def test_the_cpu_has_the_memory_that_its_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actbench.machine.memory_bytes", lambda: 3 * GIB)

    assert runpy.run_path(profiles.__file__)["get"]("cpu").memory_bytes == 3 * GIB


RATES = "gib = 10\ncompute_capability = [8, 6]\nfp32 = 20\nhalf = 40\nbandwidth = 500\nlink = 12\nlaunch = 3\n"
HOST = "[host]\nforward = 5\nbackward = 4\nview = 1\npacking = 9\nlisted = 0.2\nbandwidth = 10\n"


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_a_profile(tmp_path: Path) -> None:
    profile = profiles.get(written(tmp_path, RATES))

    assert profile.is_cuda
    assert profile.memory_bytes == 10 * GIB
    assert profile.rates is not None
    assert profile.rates.of("half") == 40e12
    assert profile.rates.of("tf32") == 20e12
    assert profile.rates.bandwidth == 500e9
    assert profile.efficiencies == published()


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert profiles.get(written(tmp_path, "\ufeff" + RATES)).memory_bytes == 10 * GIB


def test_a_file_may_bring_what_was_measured_of_some_kinds(tmp_path: Path) -> None:
    kind = '[efficiencies."host copy"]\nmemory = 0.5\nramp = 2\n'

    profile = profiles.get(written(tmp_path, RATES + HOST + kind))

    assert profile.efficiencies.kinds["host copy"].memory == 0.5
    assert profile.efficiencies.kinds["matmul"] == published().kinds["matmul"]
    assert profile.efficiencies.host.forward == pytest.approx(5e-6)


def test_a_file_may_bring_what_single_operators_took(tmp_path: Path) -> None:
    operators = "[operators.relu]\nfp32 = [[1e3, 2], [1e5, 20]]\n[operators.mm]\nhalf = [[1e6, 1e4, 50]]\n"

    found = profiles.get(written(tmp_path, RATES + HOST + operators)).efficiencies.operators

    assert found["relu", "fp32"].at(0, 1e4) == pytest.approx(20e-6 / 10**0.5)
    assert found["mm", "half"].at(2e6, 1e4) == pytest.approx(100e-6)


def test_a_file_says_how_devices_are_connected(tmp_path: Path) -> None:
    alone = profiles.get(written(tmp_path, RATES)).rates
    assert alone is not None
    assert alone.links == Links(peer=12e9, network=12.5e9, devices=8)

    connected = profiles.get(written(tmp_path, RATES + "peer = 200\nnetwork = 100\ndevices = 4\n")).rates
    assert connected is not None
    assert connected.links == Links(peer=200e9, network=100e9, devices=4)


def test_a_file_without_a_compute_capability_is_a_processor(tmp_path: Path) -> None:
    assert not profiles.get(written(tmp_path, "gib = 4\n")).is_cuda


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gib = ", "is not valid TOML"),
        ("fp32 = 3\n", "gib"),
        ("gib = 4\nspeed = 3\n", "speed"),
        ("gib = 4\nfp32 = 3\n", "belong together; it has fp32"),
        ("gib = 4\nnetwork = 50\n", "belong together; it has network"),
        (RATES + "peer = 0\n", "peer"),
        (RATES + "devices = 1.5\n", "devices"),
        (RATES + HOST + "[efficiencies.magic]\nmemory = 1\nramp = 0\n", "no kind of operator magic; known: .*matmul"),
        (RATES + "[efficiencies.matmul]\nmemory = 1\nramp = 0\n", r"need the table \[host\]"),
        (RATES + HOST + "[efficiencies.matmul]\nmemory = 1\nrampp = 0\n", "did you mean 'ramp'"),
        (RATES + "[operators.mm]\nfp32 = [[1, 2, 3]]\n", r"need the table \[host\]"),
        (RATES + HOST + "[operators.mm]\nfp32 = [[1, 2, 3], [4, 5]]\n", "all pairs or all triples"),
        (RATES + HOST + "[operators.relu]\nfp32 = [[8, 1], [8, 2]]\n", "grow from pair to pair"),
        (RATES + HOST + "[operators.relu]\nfp32 = []\n", "operators.relu.fp32"),
        (RATES + HOST + "[operators.relu]\nfp64 = [[8, 1]]\n", "fp64"),
        *((f"gib = {number}\n", "gib: ") for number in ("1e300", "1e12", "1e-300", "inf", "nan", "true", "-1", "0")),
        *((RATES.replace("= 20", f"= {number}"), "fp32: ") for number in ("inf", "1e-300", "1e300", "true")),
        (RATES.replace("launch = 3", "launch = inf"), "launch: "),
        (RATES.replace("[8, 6]", "[true, 6]"), "compute_capability"),
        (RATES + "devices = true\n", "devices: "),
        (RATES + HOST.replace("view = 1", "view = 1e-300"), "host.view: "),
        (RATES + HOST + "[operators.relu]\nfp32 = [[1e300, 1]]\n", "operators.relu.fp32"),
        (f"gib = {'9' * 5000}\n", "5000 digits"),
        (f"gib = 0x{'f' * 20_000}\n", "thousands of digits"),
        (f"gib = {'[' * 5000}\n", "nested too deeply"),
        (f"gib{'.a' * 5000} = 1\n", "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"--device-profile '.*mine.toml'.*{message}"):
        profiles.get(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"--device-profile 'nowhere.toml' cannot be read: No such file"):
        profiles.get("nowhere.toml")
