from __future__ import annotations

import gc
import threading

import torch

from actbench.packing import savedtensors


def test_what_is_said_is_noted_while_somebody_listens():
    x, codes, meta = torch.zeros(3, 4), torch.zeros(6, dtype=torch.uint8), torch.zeros(1)

    with savedtensors.observing():
        savedtensors.packed(x, codes, meta)
        savedtensors.left(x, "too small")

    source = savedtensors.source_of(codes.untyped_storage())
    assert source is savedtensors.source_of(meta.untyped_storage())
    assert source is not None
    assert (source.shape, source.dtype) == ((3, 4), torch.float32)
    assert savedtensors.reason_for(x.untyped_storage()) == "too small"


def test_nothing_is_noted_while_nobody_does():
    x, codes = torch.zeros(3), torch.zeros(3)
    with savedtensors.observing(), savedtensors.observing():
        pass

    savedtensors.packed(x, codes)
    savedtensors.left(x, "too small")

    assert savedtensors.source_of(codes.untyped_storage()) is None
    assert savedtensors.reason_for(x.untyped_storage()) is None


def test_a_note_keeps_no_tensor_alive():
    x, codes = torch.zeros(3), torch.zeros(3)
    with savedtensors.observing():
        savedtensors.packed(x, codes)
        savedtensors.left(x, "too small")
    before = len(savedtensors._sources), len(savedtensors._reasons)

    del x, codes
    gc.collect()

    assert (len(savedtensors._sources), len(savedtensors._reasons)) == (before[0] - 1, before[1] - 1)


def test_a_tensor_without_a_storage_has_no_reason():
    with savedtensors.observing():
        savedtensors.left(torch.zeros(3, 3).to_sparse(), "layout")


def test_observers_of_several_threads_hear_their_own_threads_alone() -> None:
    heard: dict[int, list[object]] = {number: [] for number in range(4)}
    begin = threading.Barrier(4)

    def act(number: int) -> None:
        begin.wait()
        for _ in range(200):
            with savedtensors.observing(heard[number].append):
                savedtensors.acted(number)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert heard == {number: [number] * 200 for number in range(4)}
    assert savedtensors.observers == ()


def test_an_observer_hears_a_backward_pass_that_runs_elsewhere() -> None:
    heard: list[object] = []

    class Acts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            savedtensors.acted("backward")
            return grad

    loss = Acts.apply(torch.ones(2, requires_grad=True)).sum()
    with savedtensors.observing(heard.append):
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()

    assert heard == ["backward"]
