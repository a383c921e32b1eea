from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.measuring.rank import Rank
from actbench.model.records import Case
from actbench.run.local import misfit
from actbench.tools.ranks.launch import Address
from actbench.tools.ranks.team import Team


def case(scheme: str, meter: str = "cpu") -> Case:
    return Case(model="resnet18", scheme=scheme, batch_size=1, meter=meter)


def needed(case: Case) -> int:
    return int(case.scheme.partition(":")[2] or 1)


def refused(scheme: str, size: int, meter: str = "cpu") -> str | None:
    failure = misfit(case(scheme, meter), needed(case(scheme)), size)
    assert failure is None or failure.reason == "unavailable"
    return failure and failure.message


def test_a_case_needs_as_many_processes_as_its_scheme_says() -> None:
    assert refused("ddp:4", 4) is None
    assert refused("exact", 4) is None
    assert refused("ddp:2", 4) is None
    assert refused("fsdp:8", 4, "simulated") is None
    told = "fsdp:8 trains in 8 processes, and 4 were launched: start 'torchrun --nproc-per-node 8"
    assert (refused("fsdp:8", 4) or "").startswith(told)


def test_one_process_says_how_to_start_several() -> None:
    assert "trains in 2 processes, and one was started" in (refused("ddp:2", 1) or "")


def test_a_plan_that_uses_none_of_the_others_is_refused() -> None:
    four = Team(Rank(size=4), Address("127.0.0.1", 1), [])
    four.check([case("exact"), case("ddp:4")], needed)
    with pytest.raises(UsageError, match="every case here needs one"):
        four.check([case("exact"), case("ddp:4", "simulated")], needed)
    four.check([case("exact"), case("ddp:8"), case("ddp:2")], needed)
    with pytest.raises(UsageError, match="the schemes here need 6 or 8: start 'torchrun --nproc-per-node 8"):
        four.check([case("exact"), case("ddp:8"), case("ddp:6")], needed)
