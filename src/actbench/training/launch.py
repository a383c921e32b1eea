"""How this process was started: alone, or as one of several by ``accelerate launch``, ``torchrun`` or ``mpirun``.

Launchers say it in the environment. Accelerate's own options there are followed or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actbench.errors import UsageError
from actbench.results.runs import Strategy

# Rank, number of processes, and rank on this machine, as each launcher calls them.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_OTHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
_BY_BLOCK = "TRANSFORMER_BASED_WRAP"


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that train together.

    Attributes:
        rank: From 0, over all machines; of ``size`` processes.
        local_rank: From 0, on this machine; the GPU of this process.
        blocks: Names of the classes of modules whose parameters FSDP2 gathers together; none for the known blocks.
        reshard: Whether FSDP2 frees gathered parameters between forward and backward.
        cpu: Whether GPUs are not used.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    strategy: Strategy = "single"
    blocks: tuple[str, ...] = ()
    reshard: bool = True
    cpu: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0


def read(environment: Mapping[str, str]) -> Launch:
    """Return how this process was started, by its environment variables.

    Raises:
        UsageError: The launcher was asked for something that training runs do not do.
    """
    _refuse(environment)
    found = _place(environment)
    if found.size == 1:
        if found.cpu and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
            raise UsageError(
                "accelerate launch --cpu starts one process only, however many --num_processes asks for, unless it is "
                "given an --mpirun_hostfile: use 'accelerate launch --multi_gpu', which takes the CPU where there is "
                "no GPU, or 'torchrun --nproc-per-node 2 -m actbench train RECIPE'"
            )
        return found
    if not _is_set(environment, "ACCELERATE_USE_FSDP"):
        return replace(found, strategy="ddp")
    names = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
    return replace(
        found,
        strategy="fsdp2",
        blocks=tuple(name.strip() for name in names if name.strip()),
        reshard=environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false",
    )


def is_first(environment: Mapping[str, str]) -> bool:
    """Return whether this process speaks for all, as far as the environment says."""
    return _place(environment).rank == 0


def _place(environment: Mapping[str, str]) -> Launch:
    cpu = _is_set(environment, "ACCELERATE_USE_CPU")
    for rank, size, local_rank in _NAMES:
        if environment.get(size) and environment.get(rank):
            local = local_rank if environment.get(local_rank) else rank
            found = Launch(_count(environment, rank), _count(environment, size), _count(environment, local), cpu=cpu)
            if found.rank >= found.size:
                raise UsageError(
                    f"{rank}={found.rank} and {size}={found.size}: ranks are counted from 0 below the size"
                )
            return found
    return Launch(cpu=cpu)


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"the environment variable {name} is {text[:40]!r}, where launchers put a number; unset it")
    return int(text)


def _refuse(environment: Mapping[str, str]) -> None:
    for variable, name in _OTHERS.items():
        if _is_set(environment, variable):
            raise UsageError(f"{name} was asked of accelerate launch; training runs know DDP and FSDP2 only")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise UsageError(
            f"accelerate launch --mixed_precision {precision}: the recipe decides that, so that its results say what "
            f'was trained: leave the option out and write autocast = "{precision}" into the recipe'
        )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UsageError(f"accelerate launch --dynamo_backend {backend}: training runs are not compiled; leave it out")
    if _is_set(environment, "ACCELERATE_USE_FSDP"):
        _refuse_of_fsdp(environment)


def _refuse_of_fsdp(environment: Mapping[str, str]) -> None:
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UsageError(f"accelerate launch --use_fsdp with --fsdp_version {version}: give --fsdp_version 2")
    if _is_set(environment, "FSDP_OFFLOAD_PARAMS"):
        raise UsageError("accelerate launch --fsdp_offload_params true: training runs keep parameters on the device")
    if _is_set(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        raise UsageError(
            "accelerate launch --fsdp_activation_checkpointing true: recomputing blocks is a scheme, so that results "
            "say it: leave the option out and name the scheme checkpoint in the recipe, alone or behind a +"
        )
    policy = environment.get("FSDP_AUTO_WRAP_POLICY", _BY_BLOCK)
    if policy.upper() != _BY_BLOCK:
        raise UsageError(
            f"accelerate launch --fsdp_auto_wrap_policy {policy}: parameters are gathered block by block; give "
            f"{_BY_BLOCK}, or leave it out"
        )


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("1", "true", "yes", "y", "t", "on")
