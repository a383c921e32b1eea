import pytest

SMALL = ("tiny-roberta", "-s", "fewbit:3", "--sequence-length", "8", "-b", "1", "--meter", "simulated")


@pytest.mark.slow
def test_a_sweep_that_measures_nothing_says_so(cli, tmp_path):
    first = cli("sweep", *SMALL, "--output", tmp_path)
    again = cli("sweep", *SMALL, "--output", tmp_path)

    assert first.status == again.status == 0, first.err
    assert "nothing was measured" not in first.err
    assert "0 measured, 0 failed" in again.err
    assert "nothing was measured: all rows were there; --force measures again" in again.err


def test_a_memory_limit_has_a_unit(cli):
    ended = cli("sweep", *SMALL, "--memory-limit", "16")

    assert ended.status == 2
    assert "'16' is not an amount of memory: write a number and a unit, such as 16GiB" in ended.err
