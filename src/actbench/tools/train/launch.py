"""How the processes of a training run share its model, as their launcher asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actbench.errors import UsageError
from actbench.measuring.rank import (
    Rank,
    compiler_asked,
    is_set,
    launched_rank,
    precision_asked,
    refuse_a_lone_process,
    sharing_asked,
)
from actbench.tools.train.records import Strategy

_BY_BLOCK = "TRANSFORMER_BASED_WRAP"


@dataclass(frozen=True)
class Launch(Rank):
    """The place of this process among those that train together.

    Attributes:
        blocks: Names of the classes of modules whose parameters FSDP2 gathers together; none for the known blocks.
        reshard: Whether FSDP2 frees gathered parameters between forward and backward.
    """

    strategy: Strategy = "single"
    blocks: tuple[str, ...] = ()
    reshard: bool = True


def read(environment: Mapping[str, str]) -> Launch:
    """Return how this process was started, by its environment variables.

    Raises:
        UsageError: The launcher was asked for something that training runs do not do.
    """
    _refuse(environment)
    refuse_a_lone_process(environment)
    found = Launch(**vars(launched_rank(environment)))
    if found.size == 1:
        return found
    if not is_set(environment, "ACCELERATE_USE_FSDP"):
        return replace(found, strategy="ddp")
    names = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
    return replace(
        found,
        strategy="fsdp2",
        blocks=tuple(name.strip() for name in names if name.strip()),
        reshard=environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false",
    )


def _refuse(environment: Mapping[str, str]) -> None:
    if (name := sharing_asked(environment)) is not None:
        raise UsageError(f"accelerate launch was given {name}; training runs use DDP or FSDP2 only")
    if (precision := precision_asked(environment)) is not None:
        raise UsageError(
            f"accelerate launch --mixed_precision {precision}: the recipe sets it, so that its results say what "
            f'was trained: leave the option out and write autocast = "{precision}" into the recipe'
        )
    if (backend := compiler_asked(environment)) is not None:
        raise UsageError(f"accelerate launch --dynamo_backend {backend}: training runs are not compiled; leave it out")
    if is_set(environment, "ACCELERATE_USE_FSDP"):
        _refuse_of_fsdp(environment)


def _refuse_of_fsdp(environment: Mapping[str, str]) -> None:
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UsageError(f"accelerate launch --use_fsdp with --fsdp_version {version}: give --fsdp_version 2")
    if is_set(environment, "FSDP_OFFLOAD_PARAMS"):
        raise UsageError("accelerate launch --fsdp_offload_params true: training runs keep parameters on the device")
    if is_set(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        raise UsageError(
            "accelerate launch --fsdp_activation_checkpointing true: recomputing blocks is a scheme, which results "
            "have: leave the option out and name the scheme checkpoint in the recipe, alone or after a +"
        )
    policy = environment.get("FSDP_AUTO_WRAP_POLICY", _BY_BLOCK)
    if policy.upper() != _BY_BLOCK:
        raise UsageError(
            f"accelerate launch --fsdp_auto_wrap_policy {policy}: parameters are gathered block by block; give "
            f"{_BY_BLOCK}, or leave it out"
        )
