"""torch's CUDA hooks are answered without a driver, and put back."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

from actbench.device import hooks
from actbench.errors import MeasurementError
from actbench.run.tasks import Tasks

Run = Callable[[str], str]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a process sees that has no real card")


HEAD = """
import os, sys, threading
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from actbench.device.hooks import answered
from actbench.errors import MeasurementError

def train_on_cpu():
    weight = torch.ones(3, requires_grad=True)
    (2 * weight).sum().backward()
    return weight.grad.tolist()

def train_on_card(make=lambda: nn.Linear(4, 4), shape=(2, 4)):
    with answered(), FakeTensorMode():
        with torch.device("cuda:0"):
            net = make()
        output = net(torch.empty(shape, device="cuda:0"))
        output.sum().backward()
        assert {str(each.grad.device) for each in net.parameters()} == {"cuda:0"}
        return type(output.grad_fn).__name__
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return what runs code in a process of its own that has torch: the guard for a card stays until a process ends."""
    with Tasks("codehere", ("torch", "torch._subclasses.fake_tensor", "actbench.device.hooks")) as tasks:
        yield lambda code: tasks.call("run", HEAD + textwrap.dedent(code), doing="using a card", timeout_seconds=120)


@pytest.mark.parametrize("name", hooks.answers(1))
def test_the_headers_declare_each_function_that_is_answered(name: str) -> None:
    assert name in hooks.places_of_functions()


@pytest.mark.skipif(sys.platform != "linux", reason="Mach-O keeps no sizes of symbols")
def test_the_headers_declare_as_many_functions_as_the_table_has() -> None:
    assert hooks.table_bytes() == 8 * (2 + len(hooks.places_of_functions()))


def test_libraries_may_ask_how_torch_was_built(run: Run) -> None:
    run("""
        before = torch.__config__.show()
        with answered():
            assert torch.__config__.show() == before
        assert torch.__config__.show() == before
    """)


def test_layers_optimizers_and_autocast_run_on_the_card(run: Run) -> None:
    told = run("""
    print(train_on_card())
    print(train_on_card(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (2, 3, 8, 8)))
    from torch.utils.checkpoint import checkpoint
    with answered(), FakeTensorMode():
        with torch.device("cuda:0"):
            net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        entered = torch.empty(2, 4, device="cuda:0", requires_grad=True)
        checkpoint(net, entered, use_reentrant=False, preserve_rng_state=False).sum().backward()
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        output = net(entered)
        output.float().sum().backward()
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            torch.optim.AdamW(net.parameters(), **options).step()
        print(output.dtype)
    """)

    assert told.split() == ["AddmmBackward0", "CudnnBatchNormBackward0", "torch.bfloat16"]


def test_a_process_that_trained_before_has_a_card_too_and_trains_on(run: Run) -> None:
    told = run("""
    print(train_on_cpu(), train_on_card(), train_on_cpu(), train_on_card(), train_on_cpu())
    print(torch.cuda.is_available(), torch.cuda.device_count())
    """)

    exact = "[2.0, 2.0, 2.0]"
    assert told.splitlines() == [f"{exact} AddmmBackward0 {exact} AddmmBackward0 {exact}", "False 0"]


def test_threads_and_processes_forked_before_have_a_card(run: Run) -> None:
    told = run("""
    train_on_cpu()
    child = os.fork()
    if not child:
        print(train_on_card(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    thread = threading.Thread(target=lambda: print(train_on_card()))
    thread.start()
    thread.join()
    """)

    assert told.split() == ["AddmmBackward0", "AddmmBackward0"]


def test_a_process_forked_from_one_with_a_card_trains_and_has_one_too(run: Run) -> None:
    told = run("""
    train_on_card()
    child = os.fork()
    if not child:
        print(train_on_cpu(), train_on_card(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """)

    assert told.split() == ["[2.0,", "2.0,", "2.0]", "AddmmBackward0"]


def test_a_backward_pass_stays_in_the_thread_that_calls_it(run: Run) -> None:
    told = run("""
    seen = []
    with answered(), FakeTensorMode():
        entered = torch.empty(2, device="cuda:0", requires_grad=True)
        doubled = 2 * entered
        doubled.register_hook(lambda grad: seen.append(threading.get_ident()))
        doubled.sum().backward(retain_graph=True)
        torch.autograd.grad(doubled.sum(), entered)
        print(seen == 2 * [threading.get_ident()], torch.autograd.is_multithreading_enabled())
    """)

    assert told.split() == ["True", "True"]


@pytest.mark.parametrize("shift", [pytest.param(shift, marks=pytest.mark.slow) for shift in (-2, -1, 2)] + [1])
def test_a_wrong_place_of_a_function_is_found_before_a_card_is_used(run: Run, shift: int) -> None:
    told = run(f"""
    from actbench.device import hooks
    places = dict(hooks.places_of_functions())
    places["hasPrimaryContext"] += {shift}
    own = hooks.answers(1)["hasPrimaryContext"]
    hooks.answers = lambda *_: {{"hasPrimaryContext": own}}
    hooks.places_of_functions = lambda: places
    try:
        train_on_card()
    except MeasurementError as error:
        print("refused")
    print(train_on_cpu())
    """)

    assert told.splitlines() == ["refused", "[2.0, 2.0, 2.0]"]


def test_headers_of_another_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: place for name, place in hooks.places_of_functions().items() if name != "deviceSynchronize"}
    monkeypatch.setattr(hooks, "places_of_functions", lambda: places)

    with pytest.raises(MeasurementError, match=f"its headers declare {8 * (2 + len(places))}"), hooks.answered():
        pass


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(MeasurementError, match="Windows"), hooks.answered():
        pass


def test_a_second_card_in_one_process_is_refused(run: Run) -> None:
    told = run("""
    with answered():
        try:
            with answered():
                pass
        except MeasurementError as error:
            print(error)
    print(train_on_card())
    """)

    refused, trained = told.splitlines()
    assert refused.endswith("one process has one")
    assert trained == "AddmmBackward0"
