"""Where processes that a launcher started together meet, and what ``accelerate launch`` was asked for.

Accelerate's own options are followed or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actbench.errors import UsageError
from actbench.measuring.place import count, is_set, place
from actbench.results.records import Data

_SHARING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


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
        host: Of torch's store where the launched processes met, at ``port``.
        name: Under which they meet there, and no others.
    """

    host: str
    port: int
    name: str
    rank: int
    size: int
    local_rank: int


def refuse_a_lone_process(environment: Mapping[str, str]) -> None:
    """Raise a UsageError where accelerate was asked for many processes on the CPU and started this one only."""
    found = place(environment)
    if found.size == 1 and found.cpu and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UsageError(
            "accelerate launch --cpu starts one process only, however many --num_processes asks for, unless it is "
            "given an --mpirun_hostfile: use 'accelerate launch --multi_gpu', which takes the CPU where there is "
            "no GPU, or 'torchrun --nproc-per-node 2 -m actbench …'"
        )


def address(environment: Mapping[str, str]) -> Address:
    """Return where the launched processes meet, here if mpirun does not say; a UsageError if the port is no number."""
    port = count(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else 29500
    return Address(
        environment.get("MASTER_ADDR") or "127.0.0.1",
        port,
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        one_machine=environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE"),
    )


def sharing_asked(environment: Mapping[str, str]) -> str | None:
    """Return what accelerate was asked to share a model out by, where that is no library of torch's own."""
    return next((name for variable, name in _SHARING.items() if is_set(environment, variable)), None)


def precision_asked(environment: Mapping[str, str]) -> str | None:
    """Return the type that accelerate was asked to compute in; None where it was not."""
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    return None if precision == "no" else precision


def compiler_asked(environment: Mapping[str, str]) -> str | None:
    """Return what accelerate was asked to compile the model by; None where it was not."""
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    return None if backend.lower() == "no" else backend
