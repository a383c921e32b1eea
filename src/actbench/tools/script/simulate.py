"""The block of :func:`actbench.simulate`, in which a training loop of one's own runs on a simulated card."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, ValidationError

from actbench.errors import UsageError, check_argument
from actbench.model.data import Data
from actbench.scheme import Scheme
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation
from actbench.units import MOST_PROCESSES, Count
from actbench.validation import explain


class _Asked(Data):
    """What :func:`simulate` is asked for in numbers."""

    memory_limit_bytes: Count | None = None
    batch_size: Count | None = None
    steps: Count | None = None
    raise_oom: StrictBool = False
    processes: Annotated[Count, Field(le=MOST_PROCESSES)] = 1


def simulate(device_profile: str, **options: Any) -> Simulation:
    """Return a context manager in which a training loop runs on a simulated card.

    ::

        with actbench.simulate("rtx-4090") as card:
            train()
        print(card.peak_bytes, card.table())

    The loop ends by itself after two equal steps in a row.

    Args:
        device_profile: A name of ``actbench devices``, or a ``.toml`` file.
        options: Those of :class:`Simulation`.

    Warns:
        UserWarning: The block ended, and a step does not fit.

    Raises:
        UsageError: There is no such device, or an option has a value that cannot be used.
    """
    check_argument(device_profile, str, "simulate: device_profile", "the name of a device, or a .toml file")
    try:
        _Asked.model_validate({name: value for name, value in options.items() if name in _Asked.model_fields})
    except ValidationError as error:
        raise UsageError(f"simulate: {'; '.join(explain(error, options, {'': _Asked}))}") from None
    if (scheme := options.get("scheme")) is not None:
        check_argument(scheme, Scheme, "simulate: scheme", "a scheme, such as actbench.scheme.build('fewbit:3')")
    gc.collect()
    caller = Path(sys._getframe(1).f_code.co_filename)
    if caller.is_file():
        options = {"folder": caller.parent, "script": caller, **options}
    return Simulation(profiles.get(device_profile), **{"warns": True, **options})
