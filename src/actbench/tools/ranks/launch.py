"""Where processes that a launcher started together meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actbench.measuring.rank import count
from actbench.model.data import Data


@dataclass(frozen=True)
class Address:
    """Where the launched processes meet: at a store of torch's.

    Attributes:
        is_served: Whether the launcher serves the store; else the first process does.
        attempt: Which start of the processes this is: a launcher may start them again with the same store.
        one_machine: Whether all of them are known to be on one machine.
    """

    host: str
    port: int
    is_served: bool = False
    attempt: str = "0"
    one_machine: bool = False


class Meeting(Data):
    """Where the processes of one case meet, one of each launched process, and the place of this one.

    Attributes:
        host: The host of torch's store where the launched processes met, at ``port``.
        name: The name under which only these processes meet there.
    """

    host: str
    port: int
    name: str
    rank: int
    size: int
    local_rank: int


def address(environment: Mapping[str, str]) -> Address:
    """Return where the launched processes meet, here if mpirun does not say; a UsageError for a port of other text."""
    port = count(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else 29500
    return Address(
        environment.get("MASTER_ADDR") or "127.0.0.1",
        port,
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        one_machine=environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE"),
    )
