"""Threads that a script starts: torch's dispatch modes are those of one thread, so each gets one of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch.utils._python_dispatch import TorchDispatchMode

from actbench.device.patches import replaced
from actbench.simulator.tracker import OnCard, StorageTracker
from actbench.tools.script.steps.steps import Ended


@contextmanager
def threads_followed(tracker: StorageTracker, modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Inside the block, let threads that begin compute on the card; in host memory they compute for real.

    Args:
        tracker: Counts what they make.
        modes: The modes below it.
    """

    def starting(own: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def start(thread: threading.Thread) -> None:
            run, context = thread.run, contextvars.copy_context()

            def run_on_card() -> None:
                with suppress(Ended), OnCard(tracker, modes):
                    context.run(run)

            thread.run = run_on_card  # type: ignore[method-assign]
            own(thread)

        return start

    with replaced(threading.Thread, "start", starting):
        yield
