"""How the processes that were launched together join each other to measure a case."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Final

from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from actbench.measuring.processgroup import take_gpu
from actbench.measuring.ranks import Ranks
from actbench.tools.ranks.launch import Meeting

_WAITING: Final = timedelta(days=7)  # the launcher ends the processes where one fails or takes too long
_LOST: Final = ("gloo", "Connection closed by peer", "Connection reset by peer")


def join(text: str, meter: str) -> Ranks:
    """Join the processes that measure a case together, over NCCL on GPUs and gloo elsewhere.

    ``text`` is a :class:`~actbench.tools.ranks.launch.Meeting` in JSON.

    Raises:
        MeasurementError: This process has no GPU of its own.
    """
    meeting = Meeting.model_validate_json(text)
    backend = "gloo"
    if meter == "cuda":
        take_gpu(meeting.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(meeting.size), LOCAL_RANK=str(meeting.local_rank))
    store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=_WAITING, wait_for_workers=False)
    distributed.init_process_group(
        backend, store=PrefixStore(meeting.name, store), rank=meeting.rank, world_size=meeting.size, timeout=_WAITING
    )
    return Ranks()


def is_of_others(error: BaseException) -> bool:
    """Return whether an error means that the process of another rank ended or does not answer."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
