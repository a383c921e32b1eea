"""Which of the processes this is that ``torchrun``, ``accelerate launch`` or ``mpirun`` started together.

Launchers say it in the environment, and accelerate also what it was asked for, which is followed or refused, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actbench.errors import UsageError

# Rank, number of processes, and rank on this machine, as each launcher calls them.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)


_SHARING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


@dataclass(frozen=True)
class Rank:
    """The place of this process among those that were started together.

    Attributes:
        rank: From 0, over all machines; of ``size`` processes.
        local_rank: From 0, on this machine; the GPU of this process.
        cpu: Whether GPUs are not used.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    cpu: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0


def launched_rank(environment: Mapping[str, str]) -> Rank:
    """Return the place of this process, by its environment variables; a process that was started alone is the first.

    Raises:
        UsageError: The variables are no numbers, or do not go together.
    """
    cpu = is_set(environment, "ACCELERATE_USE_CPU")
    for rank, size, local_rank in _NAMES:
        if environment.get(size) and environment.get(rank):
            local = local_rank if environment.get(local_rank) else rank
            found = Rank(count(environment, rank), count(environment, size), count(environment, local), cpu=cpu)
            if found.rank >= found.size:
                raise UsageError(
                    f"{rank}={found.rank} and {size}={found.size}: ranks are counted from 0 below the size"
                )
            return found
    return Rank(cpu=cpu)


def is_first(environment: Mapping[str, str]) -> bool:
    """Return whether this process speaks for all, as far as the environment says."""
    return launched_rank(environment).is_first


def is_set(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable of accelerate's says yes."""
    return environment.get(name, "false").lower() in ("1", "true", "yes", "y", "t", "on")


def count(environment: Mapping[str, str], name: str) -> int:
    """Return the number in a variable of a launcher's; a UsageError if it is none."""
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"the environment variable {name} is {text[:40]!r}, where launchers put a number; unset it")
    return int(text)


def refuse_a_lone_process(environment: Mapping[str, str]) -> None:
    """Raise a UsageError where accelerate was asked for many processes on the CPU and started this one only."""
    found = launched_rank(environment)
    if found.size == 1 and found.cpu and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UsageError(
            "accelerate launch --cpu starts one process only, however many --num_processes asks for, unless it is "
            "given an --mpirun_hostfile: use 'accelerate launch --multi_gpu', which takes the CPU where there is "
            "no GPU, or 'torchrun --nproc-per-node 2 -m actbench …'"
        )


def sharing_asked(environment: Mapping[str, str]) -> str | None:
    """Return by which library, other than torch's own, accelerate was asked to shard a model; None for none."""
    return next((name for variable, name in _SHARING.items() if is_set(environment, variable)), None)


def precision_asked(environment: Mapping[str, str]) -> str | None:
    """Return the type that accelerate was asked to compute in; None where it was not."""
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    return None if precision == "no" else precision


def compiler_asked(environment: Mapping[str, str]) -> str | None:
    """Return the backend that accelerate was asked to compile the model with; None where it was not."""
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    return None if backend.lower() == "no" else backend
