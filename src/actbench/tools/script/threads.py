"""Threads that a script starts: torch's dispatch modes are those of one thread, so each gets one of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.device.patches import replaced
from actbench.simulator.fake import asks_for_device
from actbench.simulator.recalled import tensors_of
from actbench.simulator.tracker import StorageTracker
from actbench.tools.script.steps import Ended


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


class OnCard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a tracker and modes see operators on tensors of the card, and those that make such; others run for real."""

    def __init__(self, tracker: StorageTracker, modes: Sequence[TorchDispatchMode]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._modes = tracker, modes
        self.ignore_compile_internals = tracker.ignore_compile_internals  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of((args, kwargs)))
        if not (is_fake or asks_for_device((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            return self._tracker.__torch_dispatch__(func, types, args, kwargs)
