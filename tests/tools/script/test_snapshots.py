"""Copies of a process in which schemes are tried on what its script trains."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from actbench.tools.script.steps import schemes


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch has one thread here")
def test_a_copy_computes_though_the_threads_of_its_parent_are_not_in_it() -> None:
    def compute() -> None:
        torch.ones(2**22).exp().sum().item()

    compute()  # starts the pool of threads
    child = schemes._copied(compute)
    ended, until = (0, 0), time.monotonic() + 30
    while ended == (0, 0) and time.monotonic() < until:
        time.sleep(0.05)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    assert ended == (child, 0)
