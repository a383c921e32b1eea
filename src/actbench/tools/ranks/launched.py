"""What a command does in processes that a launcher started together: the first leads, the others follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from actbench.errors import ActbenchError, UsageError, shortened
from actbench.measuring import rank
from actbench.measuring.rank import Rank, is_set
from actbench.report.plain import plain
from actbench.tools.ranks import launch
from actbench.tools.ranks.team import Team


def check() -> None:
    """Raise a UsageError where accelerate was asked for many processes on the CPU and started this one only."""
    rank.refuse_a_lone_process(os.environ)


@contextmanager
def lead(place: Rank) -> Iterator[Team]:
    """Have the other processes inside the block; see :func:`actbench.tools.ranks.rendezvous.leading`.

    Raises:
        UsageError: The launcher was given an option that schemes or flags set.
    """
    from actbench.tools.ranks.rendezvous import leading

    with leading(place, launch.address(os.environ)) as team:
        _refuse(os.environ)  # when the others have come: they end with this process
        yield team


def follow(place: Rank) -> None:
    """Do what the first process asks for until it ends."""
    from actbench.tools.ranks.follower import Follower
    from actbench.tools.ranks.rendezvous import following

    try:
        with following(place, launch.address(os.environ)) as frames, Follower(frames) as follower:
            follower.follow()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ActbenchError, OSError) as error:
        print(plain(f"actbench: process {place.rank}: {shortened(str(error))}"), file=sys.stderr)
        sys.exit(2)


def _refuse(environment: Mapping[str, str]) -> None:
    """Refuse options of accelerate for which actbench has schemes and flags."""
    shared = rank.sharing_asked(environment)
    if shared is None and is_set(environment, "ACCELERATE_USE_FSDP"):
        shared = "FSDP"
    if shared is not None:
        raise UsageError(
            f"accelerate launch was given {shared}; schemes say how processes share a model: leave it out, give "
            "--multi_gpu, and name a scheme such as fsdp:4"
        )
    if (precision := rank.precision_asked(environment)) is not None:
        raise UsageError(
            f"accelerate launch --mixed_precision {precision}: flags set it, so that records have it: leave "
            f"the option out and give --autocast {precision}"
        )
    if (backend := rank.compiler_asked(environment)) is not None:
        raise UsageError(f"accelerate launch --dynamo_backend {backend}: leave it out, and name the scheme compile")
