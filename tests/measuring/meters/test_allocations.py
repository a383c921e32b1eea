from __future__ import annotations

import pytest
import torch

from actbench.measuring.meters.cpumeter import AllocationTrace

FLOAT = 4


def test_live_and_peak_equal_hand_arithmetic() -> None:
    with AllocationTrace() as trace:
        trace.mark("begin")
        a = torch.empty(1000)
        b = torch.empty(3000)
        del a
        trace.mark("middle")
        c = torch.empty(500)
        del b
        trace.mark("end")
        del c

    assert trace.live_bytes("begin") == 0
    assert trace.live_bytes("middle") == 3000 * FLOAT
    assert trace.live_bytes("end") == 500 * FLOAT
    assert trace.peak_bytes("begin", "middle") == 4000 * FLOAT
    assert trace.peak_bytes("middle", "end") == 3500 * FLOAT


def test_temporaries_inside_an_operator_are_seen() -> None:
    scores = torch.zeros(16, 1000)

    with AllocationTrace() as trace:
        trace.mark("begin")
        result = torch.ops.aten._safe_softmax(scores, -1)
        trace.mark("end")

    mask = scores.numel()  # one byte for each score
    assert trace.live_bytes("end") == result.numel() * FLOAT
    assert trace.peak_bytes("begin", "end") >= result.numel() * FLOAT + mask


def test_no_event_is_lost_in_a_long_run() -> None:
    steps = 20_000
    kept = []

    with AllocationTrace() as trace:
        trace.mark("begin")
        for step in range(steps):
            kept.append(torch.empty(step % 7 + 1))
            if step % 3 == 0:
                kept.pop()
        trace.mark("end")

    assert trace.live_bytes("end") == sum(tensor.numel() * FLOAT for tensor in kept)


def test_a_tensor_at_the_address_of_one_that_outlived_an_earlier_trace_is_not_taken_for_it() -> None:
    with AllocationTrace():
        outlived = [torch.empty(1000) for _ in range(200)]
    addresses = {tensor.data_ptr() for tensor in outlived}
    outlived.clear()
    later = [torch.empty(1000) for _ in range(200)]
    assert addresses & {tensor.data_ptr() for tensor in later}

    with AllocationTrace() as trace:
        later.clear()
        trace.mark("end")

    assert trace.live_bytes("end") == 0


def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), AllocationTrace():
        _ = 1 / 0


def test_the_profiler_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with AllocationTrace() as trace:
        trace.mark("begin")

    assert capfd.readouterr().err == ""
