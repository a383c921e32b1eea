"""Several GPUs of one machine: which of them measure, and each doing one timing group after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event
from typing import Generic, TypeVar

from actbench.experiments.runner.progress import Progress
from actbench.results.machine import Gpu, find_gpus

GroupT = TypeVar("GroupT")
T = TypeVar("T")


def chosen_gpus(jobs: int | None, progress: Progress) -> tuple[str | None, ...]:
    """Return the names in ``CUDA_VISIBLE_DEVICES`` of the GPUs that measure: ``jobs`` of them, or else the first.

    Only GPUs of the first one's kind count, since speeds of others cannot be compared with its. Where there is one GPU
    or none, it is None: what is visible here.
    """
    found = find_gpus()
    if len(found) < 2 or found[0].uuid is None:
        return (None,)
    alike = [gpu.uuid for gpu in found if _kind(gpu) == _kind(found[0]) and gpu.uuid is not None]
    if jobs is not None and jobs > len(alike) and len(alike) < len(found):
        progress.message(
            f"{len(alike)} of {len(found)} GPUs measure, those that are {found[0].name}: speeds of different GPUs are "
            "not compared; CUDA_VISIBLE_DEVICES chooses others"
        )
    return tuple(alike[: jobs or 1])


def _kind(gpu: Gpu) -> tuple[str, int]:
    return gpu.name, gpu.memory_bytes


def side_by_side(
    work: Callable[[GroupT, str | None], Iterator[T]],
    groups: Sequence[GroupT],
    gpus: Sequence[str | None],
    stop: Callable[[], None],
) -> Generator[T, None, None]:
    """Yield what ``work(group, gpu)`` yields for each group, as it comes; a GPU does one group after the other.

    Where ``work`` raises, or whoever takes the results stops, ``stop`` is called: it makes all work that goes on raise.
    """
    queue = _Queue(work, groups)
    with ThreadPoolExecutor(len(gpus)) as pool:
        for gpu in gpus:
            pool.submit(queue.serve, gpu)
        try:
            yield from queue.results(len(gpus))
        except BaseException:
            queue.stopped.set()
            stop()
            raise


class _Queue(Generic[GroupT, T]):
    """Groups that wait for a GPU, and what came of others."""

    def __init__(self, work: Callable[[GroupT, str | None], Iterator[T]], groups: Sequence[GroupT]) -> None:
        self._work = work
        self._waiting: SimpleQueue[GroupT] = SimpleQueue()
        for group in groups:
            self._waiting.put(group)
        self._told: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
        self.stopped = Event()

    def serve(self, gpu: str | None) -> None:
        """Do groups on a GPU until none is left."""
        try:
            while not self.stopped.is_set():
                for found in self._work(self._waiting.get_nowait(), gpu):
                    self._told.put((found,))
        except Empty:
            self._told.put(None)
        except BaseException as error:
            self._told.put(error)

    def results(self, at_work: int) -> Iterator[T]:
        """Yield results until so many GPUs are done, and raise what one raised."""
        while at_work:
            told = self._told.get()
            if told is None:
                at_work -= 1
            elif isinstance(told, BaseException):
                raise told
            else:
                yield told[0]
