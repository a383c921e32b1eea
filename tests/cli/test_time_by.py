"""``measure --time-by operator`` shows where an estimated time goes, and refuses where there is none."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("tasks_here")

CASE = ("measure", "tiny-gpt2", "-b", "2", "--sequence-length", "16", "--meter", "simulated", "--time-by", "operator")


def test_a_list_of_saved_tensors_has_no_times(cli):
    ended = cli(*CASE, "--ledger")

    assert ended.status == 2
    assert "--time-by: not with --ledger" in ended.err


@pytest.mark.slow
def test_operators_stand_below_the_rows(cli):
    ended = cli(*CASE, "--device-profile", "t4")

    assert ended.status == 0, ended.err
    assert "Where the time of a step of tiny-gpt2 goes" in ended.out
    assert "addmm" in ended.out


@pytest.mark.exhaustive
def test_a_device_without_rates_has_no_time_to_show(cli):
    ended = cli(*CASE, "--device-profile", "cuda-16gib")

    assert ended.status == 2
    assert "none was estimated" in ended.err
