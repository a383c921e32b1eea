"""A command that several processes run which were launched together: who does what, and what launchers may ask for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from actbench.cli.app import app
from actbench.errors import ActbenchError, UsageError, shortened
from actbench.measuring import launch
from actbench.results.plain import plain

_MEASURE: Final = ("measure", "sweep")
_TRAIN: Final = "train"
_HELP: Final = ("-h", "--help")


def run(arguments: Sequence[str]) -> None:
    """Run the command line ``arguments`` in this process.

    Of several processes all take part in measuring and in training; the first alone does everything else, prints,
    writes files and has the exit status of the command.
    """
    place = launch.place(os.environ)
    verb = next((word for word in arguments if not word.startswith("-")), None)
    asks = any(word in _HELP for word in arguments)
    if verb in _MEASURE and not asks:
        launch.refuse_a_lone_process(os.environ)
    if place.size == 1 or (verb == _TRAIN and not asks):
        app(prog_name="actbench")
    elif asks or verb not in _MEASURE:
        if place.is_first:
            app(prog_name="actbench")
    elif place.is_first:
        _lead(place)
    else:
        _follow(place)


def _lead(place: launch.Place) -> None:
    from actbench.experiments.ranks.rendezvous import leading

    with leading(place, launch.address(os.environ)) as team:
        _refuse(os.environ)  # when the others have come: they end with this process
        app(prog_name="actbench", obj=team)


def _follow(place: launch.Place) -> None:
    from actbench.experiments.ranks.follower import Follower
    from actbench.experiments.ranks.rendezvous import following

    try:
        with following(place, launch.address(os.environ)) as frames, Follower(frames) as follower:
            follower.follow()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ActbenchError, OSError) as error:
        print(plain(f"actbench: process {place.rank}: {shortened(str(error))}"), file=sys.stderr)
        sys.exit(2)


def _refuse(environment: Mapping[str, str]) -> None:
    """Raise a UsageError where accelerate was asked for what schemes and flags of actbench say."""
    shared = launch.sharing_asked(environment)
    if shared is None and launch.is_set(environment, "ACCELERATE_USE_FSDP"):
        shared = "FSDP"
    if shared is not None:
        raise UsageError(
            f"{shared} was asked of accelerate launch; schemes say how processes share a model: leave it out, give "
            "--multi_gpu, and name a scheme such as fsdp:4"
        )
    if (precision := launch.precision_asked(environment)) is not None:
        raise UsageError(
            f"accelerate launch --mixed_precision {precision}: flags say that, so that records have it: leave "
            f"the option out and give --autocast {precision}"
        )
    if (backend := launch.compiler_asked(environment)) is not None:
        raise UsageError(f"accelerate launch --dynamo_backend {backend}: leave it out, and name the scheme compile")
