from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.measuring.rank import Rank, launched_rank, refuse_a_lone_process
from actbench.tools.ranks.launch import Address, address

SECOND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {**SECOND, "MASTER_ADDR": "first", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_where_a_process_stands() -> None:
    assert launched_rank({}) == Rank()
    assert launched_rank(SECOND) == Rank(rank=1, size=4, local_rank=1)
    assert not launched_rank(SECOND).is_first


def test_where_processes_meet() -> None:
    assert address(TORCHRUN) == Address("first", 1234, is_served=True, one_machine=True)
    again = address({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_WORLD_SIZE": "2"})
    assert again == Address("first", 1234, is_served=True, attempt="2")
    assert address({"PMI_RANK": "0", "PMI_SIZE": "2"}) == Address("127.0.0.1", 29500)
    with pytest.raises(UsageError, match="the environment variable MASTER_PORT is 'x'"):
        address({**TORCHRUN, "MASTER_PORT": "x"})


def test_a_lone_process_of_many_that_were_asked_for_is_refused() -> None:
    alone = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

    refuse_a_lone_process(TORCHRUN)
    with pytest.raises(UsageError, match="starts one process only"):
        refuse_a_lone_process(alone)
