"""Compilers and kernels that a simulated card does not run: what they compute is simulated by torch's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.device.patches import replaced
from actbench.errors import UntraceableError
from actbench.ops.simulation import one_kernel, plain_tensors
from actbench.simulator.places import is_on_card
from actbench.tools.script.libraries.importpatches import Change, changed, rebind

Note = Callable[[str], None]

_EAGER = (
    "torch.compile runs eagerly here: compiled code may hold less memory (fused operators, smaller saved tensors) and "
    "take less time."
)
_SCORES = (
    "flex_attention is compiled on a card; here it runs eagerly and holds all attention scores, which makes the peak "
    "an upper bound."
)


def eager(note: Note, why: str = _EAGER) -> Callable[..., Any]:
    """Return what stands in for ``torch.compile`` and leaves models and functions as they are; ``note`` is told so."""

    def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - torch's name
        if model is None:
            return lambda given: compile(given, **options)
        if isinstance(model, nn.Module):
            note(why)
            return model

        if getattr(model, "__name__", "") == "single_param_adam":  # see _compiled_step
            return model

        @functools.wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:  # libraries compile functions that no script calls
            note(_SCORES if getattr(model, "__name__", "") == "flex_attention" else why)
            return model(*args, **kwargs)

        return run

    return compile


@contextmanager
def without_compile(note: Note) -> Iterator[None]:
    """Inside the block, let ``torch.compile`` and ``Module.compile`` leave models and functions as they are."""

    def in_place(_: Any) -> Callable[..., None]:
        def compile(self: nn.Module, *args: Any, **options: Any) -> None:  # noqa: A001 - torch's name
            note(_EAGER)

        return compile

    with rebind(torch, "compile", lambda _: eager(note)), changed(nn.Module, "compile", in_place):
        yield


@contextmanager
def without_nested_tensors() -> Iterator[None]:
    """Inside the block, refuse nested tensors: no fake tensor holds rows of several lengths.

    ``nn.TransformerEncoder`` makes them only in evaluation; it keeps padded rows, and holds more than on a card.
    """

    def refusing(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def make(*args: Any, **options: Any) -> Any:
            raise UntraceableError(
                f"torch.nested.{own.__name__}: nested tensors are not simulated; pad the rows, or run it with --meter "
                "cuda or --meter cpu"
            )

        return make

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "_nested_tensor_from_mask_left_aligned", lambda _: lambda *args: False))
        for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow"):
            stack.enter_context(replaced(torch.nested, name, refusing))
        yield


@contextmanager
def recurrent_refused() -> Iterator[None]:
    """Inside the block, refuse recurrent layers on fake tensors for a CPU, which saves more than its operators show."""

    def refusing(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(parameter, FakeTensor) for parameter in self.parameters()):
                raise UntraceableError(
                    f"the model holds a {type(self).__name__}, and fake tensors do not show what a CPU saves for each "
                    "of its time steps; simulate a card, or run it with --meter cpu"
                )
            return own(self, *args, **kwargs)

        return forward

    with (
        changed(nn.RNN, "forward", refusing),
        changed(nn.LSTM, "forward", refusing),
        changed(nn.GRU, "forward", refusing),
    ):
        yield


def without_flat_rnn_weights() -> AbstractContextManager[object]:
    """Inside the block, leave the weights of recurrent layers apart: to put them in one tensor needs addresses."""
    return changed(nn.RNNBase, "flatten_parameters", lambda _: lambda self: None)


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of Triton and of transformers' choice of kernels, by the names of their modules."""
    return {
        "triton.runtime.jit": _triton(note),
        "triton.runtime.autotuner": _autotuner(note),
        "transformers.utils.import_utils": _as_real,
        "torchao.optim.adam": lambda module: rebind(module, "single_param_adam", _compiled_step),
    }


def _as_real(module: ModuleType) -> AbstractContextManager[object]:
    """Let transformers read the values of masks and positions, which are known, and leave out masks as on a card.

    Asked by it, a fake tensor is one that is traced, whose values it may not read: it would build all masks.
    """
    return rebind(module, "is_fake_tensor", lambda _: lambda tensor: False)


def _compiled_step(own: Callable[..., None]) -> Callable[..., None]:
    """Let torchao's step of a parameter on the card be the one kernel that it compiles there, without temporaries."""

    @functools.wraps(own)
    def step(p: Tensor, grad: Tensor, *state: Any) -> None:
        if not is_on_card(p):
            return own(p, grad, *state)
        moments = [each for each in state if isinstance(each, Tensor) and each.dim()]
        return one_kernel([*plain_tensors(p, *moments)], [*plain_tensors(grad)])

    return step


def _triton(note: Note) -> Change:
    """Let kernels that are launched do nothing.

    A kernel cannot allocate memory of the card: it fills tensors that torch allocated before. So memory is right
    without it. Its time is not counted.
    """

    def change(module: ModuleType) -> AbstractContextManager[object]:
        return changed(module.JITFunction, "run", lambda _: _launch(note))

    return change


def _autotuner(note: Note) -> Change:
    def change(module: ModuleType) -> AbstractContextManager[object]:
        with ExitStack() as stack:
            for owner in ("Autotuner", "Heuristics"):
                if owner in vars(module):
                    stack.enter_context(changed(vars(module)[owner], "run", lambda _: _launch(note)))
            return stack.pop_all()

    return change


def _launch(note: Note) -> Callable[..., None]:
    def run(self: Any, *args: Any, **options: Any) -> None:
        note(
            f"Triton kernels of {_package(self)} are not run: their memory is that of the tensors they fill, which is "
            "exact; their time is not counted."
        )

    return run


def _package(kernel: Any) -> str:
    """Return the package, or the script, that a kernel comes from."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    place = str(getattr(kernel, "__module__", "")).partition(".")[0]
    return f"the script ({kernel.__name__})" if place == "__main__" else place
