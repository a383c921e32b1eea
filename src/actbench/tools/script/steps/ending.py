"""The end of a script whose steps are read, whether it lets itself be ended or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import nn

from actbench.tools.script.steps.steps import Ended

_GRACE_SECONDS = 10.0
"""How long a script may go on after its end was raised: its ``finally`` blocks save, evaluate, or never end."""


class Ending:
    """Ends a script by an exception, and tells of one that goes on: it caught the exception, or takes long to end.

    Args:
        tell: Called in the script's thread when it comes to its end once more, or else in a thread of its own.
    """

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._timer: threading.Timer | None = None
        self._kept: Sequence[nn.Module] = ()

    def end(self, models: Sequence[nn.Module]) -> NoReturn:
        """Raise :class:`~actbench.tools.script.steps.steps.Ended`; keep the models, with which schemes are tried."""
        self._kept = models  # the frames of the script are left
        if self._timer is not None:
            self._tell()
        else:
            self._timer = threading.Timer(_GRACE_SECONDS, self._tell)
            self._timer.daemon = True
            self._timer.start()
        raise Ended

    @property
    def has_begun(self) -> bool:
        """Whether the end was raised in the script."""
        return self._timer is not None

    def done(self) -> None:
        """Note that the script has ended."""
        if self._timer is not None:
            self._timer.cancel()
