from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.experiments.ranks.team import Launched, Team
from actbench.measuring.launch import Address
from actbench.measuring.place import Place
from actbench.results.records import Case


def case(scheme: str, meter: str = "cpu") -> Case:
    return Case(model="resnet18", scheme=scheme, batch_size=1, meter=meter)


def launched(size: int) -> Launched:
    team = None if size == 1 else Team(Place(size=size), Address("127.0.0.1", 1), [])
    return Launched(team, lambda case: int(case.scheme.partition(":")[2] or 1))


def test_a_case_needs_as_many_processes_as_its_scheme_says() -> None:
    four = launched(4)

    assert four.misfit(case("ddp:4")) is None
    assert four.misfit(case("exact")) is None
    assert four.misfit(case("ddp:2")) is None
    assert four.misfit(case("fsdp:8", "simulated")) is None
    failure = four.misfit(case("fsdp:8"))
    assert failure is not None
    assert failure.reason == "unavailable"
    assert "trains in 8 processes, and 4 were launched: start 'torchrun --nproc-per-node 8" in failure.message


def test_one_process_says_how_to_start_several() -> None:
    failure = launched(1).misfit(case("ddp:2"))

    assert failure is not None
    assert "trains in 2 processes, and one was started" in failure.message


def test_a_plan_that_uses_none_of_the_others_is_refused() -> None:
    launched(4).check([case("exact"), case("ddp:4")])
    launched(1).check([case("exact"), case("ddp:4")])
    with pytest.raises(UsageError, match="every case here needs one"):
        launched(4).check([case("exact"), case("ddp:4", "simulated")])
    launched(4).check([case("exact"), case("ddp:8"), case("ddp:2")])
    with pytest.raises(UsageError, match="the schemes here need 6 or 8: start 'torchrun --nproc-per-node 8"):
        launched(4).check([case("exact"), case("ddp:8"), case("ddp:6")])
