"""Ctrl-C while a simulation begins or ends leaves torch as it was."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

import actbench
from actbench.device import patches
from actbench.device.patches import interrupts_wait

OWNERS = (torch, torch._C, torch.cuda, torch.serialization, torch.fft, Tensor, FakeTensor, nn.Module, distributed)
REPLACING = patches.attribute.__wrapped__.__code__  # type: ignore[attr-defined]


def state() -> dict[str, Any]:
    """Return what a simulation replaces, and has to restore."""
    found: dict[str, Any] = {f"{each} {name}": id(value) for each in OWNERS for name, value in vars(each).items()}
    found |= {f"c10d {name}": id(value) for name, value in vars(distributed_c10d).items() if callable(value)}
    return found | {
        "environment": dict(os.environ),
        "finders": list(sys.meta_path),
        "modes": torch._C._len_torch_dispatch_stack(),
        "hooks": len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks),
        "parameters": len(nn.modules.module._global_parameter_registration_hooks),
        "handler": signal.getsignal(signal.SIGINT),
        "excepthook": sys.excepthook,
    }


@contextmanager
def interrupted(line: str, turn: int) -> Iterator[list[int]]:
    """Inside the block, press Ctrl-C before a line of the function that replaces attributes, when it comes that often.

    Gives a list that has each time so far.
    """
    times: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not REPLACING:
            return None
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == line:
            times.append(len(times))
            if len(times) == turn:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield times
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module", autouse=True)
def simulated_before() -> None:
    with actbench.simulate("rtx-4090"):
        pass


AFTER_REPLACING, BEFORE_RESTORING = "try:", "if own is not _MISSING:"


@pytest.mark.sampled(fast=2, slow=3)
@pytest.mark.parametrize(
    ("line", "turn"),
    [*((AFTER_REPLACING, turn) for turn in (20, 50, 150)), *((BEFORE_RESTORING, turn) for turn in (50, 100))],
)
def test_functions_of_torch_are_restored(line: str, turn: int) -> None:
    before = state()

    with pytest.raises(KeyboardInterrupt), interrupted(line, turn) as times, actbench.simulate("rtx-4090"):
        pass

    after = state()
    assert len(times) >= turn
    assert {name: after[name] for name in after if after[name] != before.get(name)} == {}


def test_interrupts_wait_for_the_end_of_a_block_and_then_are_those_of_before() -> None:
    reached = []

    def press() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        press()

    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_that_simulates_leaves_the_handler_alone() -> None:
    found = []

    def enter() -> None:
        with interrupts_wait():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert found == [signal.default_int_handler]
