"""Scripts that call ``torch.compile``: Inductor compiles for the simulated card, and its kernels do nothing."""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.simulator import inductor
from actbench.tools.script.libraries import kernels
from actbench.tools.script.libraries.importpatches import changed, rebind

_COMPILED = (
    "Compiled with torch {}: the peak is that of the code that this version of Inductor generates. What it takes to "
    "tune kernels at their first launch is not counted, and their time is that of reading and writing their tensors "
    "once."
)
_EAGER = (
    "{} runs eagerly here, as only Inductor is simulated: compiled code may hold less memory (fused operators, smaller "
    "saved tensors), and take less time."
)
_WITHOUT_TUNING = (
    "{} is compiled here without measuring kernels: products are those of cuBLAS, and no operators are fused with them."
)
_WITHOUT_GRAPHS = (
    "{} is compiled here without CUDA graphs: on a card, a graph keeps what it allocates in a pool of its own, so more "
    "memory is reserved than shown."
)
_TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_GRAPHS = ("triton.cudagraphs",)

Calling = Callable[[nn.Module, Any], AbstractContextManager[None]]
"""From a module and its arguments to the context in which it is called."""


def is_possible() -> bool:
    """Return whether scripts are compiled: where Inductor can be simulated, unless torch is told not to compile."""
    return inductor.lacks() is None and os.environ.get("TORCH_COMPILE_DISABLE") != "1"


class Inductor:
    """Compiles a script for a card that is not there.

    Args:
        capability: Compute capability of the card.
        calling: Follows modules that are compiled in place, of which no hook tells.

    Attributes:
        has_run: Whether compiled code has run.
    """

    def __init__(self, capability: tuple[int, int], calling: Calling, *, is_first: bool = False) -> None:
        self._simulated = inductor.Inductor(capability, self._ran)
        self._calling = calling
        self._note: kernels.Note = print
        self._outermost: TorchDispatchMode | None = None
        self._stack = ExitStack()
        # code may have been compiled before the simulation, and run inside
        self._may_be_late = not is_first and "torch._dynamo.eval_frame" in sys.modules
        self.has_run = False

    def see_into(self, *modes: TorchDispatchMode) -> None:
        """Let modes, the outermost last, see operators of compiled code, but not of its tracing.

        Without this, all code runs eagerly.
        """
        self._outermost = modes[-1]
        for mode in modes:
            # torch asks the class for it; as an attribute of an object it is that of one simulation
            mode.ignore_compile_internals = lambda: True  # type: ignore[method-assign]

    @contextmanager
    def compiling(self, note: kernels.Note) -> Iterator[None]:
        """Inside the block, let ``torch.compile`` and ``Module.compile`` compile; another mode or backend runs eagerly.

        ``note`` is told how code was compiled, when it runs.
        """
        self._note = note
        with self._stack as stack:
            stack.enter_context(rebind(torch, "compile", self._compiling))
            stack.enter_context(changed(nn.Module, "compile", self._in_place))
            if self._may_be_late:
                self._prepare()
            yield

    def _prepare(self) -> None:
        """Let Inductor compile for the card until the end of the block; a script that compiles nothing is spared it."""
        import torch._dynamo

        # it is read when torch's compiler is imported, which may have been before the script set it
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            torch._dynamo.config.disable = True
        if self._outermost is not None:
            self._stack.enter_context(self._simulated.simulated(type(self._outermost)))
            self._outermost = None

    def _compiling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - torch's name
            if model is None:
                return lambda given: compile(given, **options)
            if (asked := _other_backend(options)) is not None and not _is_ours(options["backend"]):
                return kernels.eager(self._note, _EAGER.format(asked))(model)
            if getattr(model, "__name__", "") == "single_param_adam":  # see kernels.py
                return model
            self._prepare()
            return own(model, **self._without_measuring(options))

        return compile

    def _in_place(self, own: Callable[..., None]) -> Callable[..., None]:
        def compile(module: nn.Module, *args: Any, **options: Any) -> None:  # noqa: A001 - torch's name
            if (asked := _other_backend(options)) is not None:
                self._note(_EAGER.format(asked))
                return
            own(module, *args, **self._without_measuring(options))
            run: Any = module._compiled_call_impl

            @functools.wraps(run)
            def call(*given: Any, **more: Any) -> Any:
                if torch.compiler.is_dynamo_compiling():  # as a part of another module that is compiled
                    return run(*given, **more)
                with self._calling(module, given):
                    return run(*given, **more)

            module._compiled_call_impl = call

        return compile

    def _without_measuring(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options of ``torch.compile`` that take no card to compile with; tell what was asked for beyond."""
        import torch._inductor

        mode = options.get("mode")
        wanted = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options.get("options") or {})}
        for names, text in ((_TUNING, _WITHOUT_TUNING), (_GRAPHS, _WITHOUT_GRAPHS)):
            named = [name for name in names if wanted.get(name, _is_set(name))]
            if named:
                self._note(text.format(f"torch.compile(mode={mode!r})" if mode else f"torch.compile with {named[0]}"))
                wanted |= dict.fromkeys(names, False)
        return {**options, "mode": None, "options": wanted} if wanted else options

    def _ran(self) -> None:
        self.has_run = True
        self._note(_COMPILED.format(torch.__version__))


def _other_backend(options: dict[str, Any]) -> str | None:
    """Return what is asked of ``torch.compile`` that is not Inductor; None if nothing is."""
    backend = options.get("backend", "inductor")
    if options.get("disable") or backend == "inductor":
        return None
    return f"torch.compile(backend={getattr(backend, '__name__', backend)!r})"


def _is_ours(backend: Any) -> bool:
    """Return whether a backend is that of a scheme, which calls Inductor."""
    return getattr(backend, "__module__", "").startswith("actbench.")


def _is_set(name: str) -> bool:
    """Return whether a script has switched on a setting of Inductor for all that it compiles."""
    import torch._inductor.config

    return bool(operator.attrgetter(name)(torch._inductor.config))
