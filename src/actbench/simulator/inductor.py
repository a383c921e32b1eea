"""Inductor compiles for a simulated card, and its kernels do nothing.

Inductor writes a Python program that allocates tensors, launches kernels on them and frees them. This program runs on
fake tensors, so fusion, what is kept for the backward pass, reuse in place and frees are Inductor's own. A kernel
allocates nothing, and is not even built.

:meth:`Inductor._replacements` has each internal of torch that this takes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from actbench.caches import user_cache
from actbench.device.patches import attribute, entries
from actbench.errors import MeasurementError
from actbench.ops.simulation import one_kernel

_OLDEST = (2, 15)
"""The oldest version of torch whose internals are known to be those that are replaced here."""

_HOST = torch.device("cpu")
_THREADS_OF_WARP = 32

_HARMLESS = (
    "Using `torch.compile\\(module\\)` when there are global hooks on modules",  # ours
    "Accessing the data pointer of FakeTensor is deprecated",  # where Inductor looks whether inputs are aligned
)
_IN_SOURCE = re.compile(r"^def \w+\((.*?)\):", re.MULTILINE)
_OURS = ("actbench.device", "actbench.simulator", "actbench.tools.script")
_READ_AND_WRITTEN = "in_out_ptr"


def lacks() -> str | None:
    """Return what compiling takes and is not here: a torch that is known, or Triton; None if nothing is missing."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST:
        return f"torch {_OLDEST[0]}.{_OLDEST[1]} or later, and this is {torch.__version__}"
    return None if importlib.util.find_spec("triton") else "the package triton, which comes with torch for CUDA"


class Inductor:
    """Compiles for a card that is not there.

    Args:
        capability: Compute capability of the card.
        ran: Called where compiled code runs.
    """

    def __init__(self, capability: tuple[int, int], ran: Callable[[], object] = lambda: None) -> None:
        self._capability, self._ran = capability, ran

    @contextmanager
    def simulated(self, *seeing: type[TorchDispatchMode]) -> Iterator[None]:
        """Inside the block, let Inductor compile for the card; inside another such block, change nothing.

        ``seeing`` are classes of modes that see operators; torch compiles none of their code.
        """
        import torch._inductor.utils

        if isinstance(_triton_driver()._active, _Driver):  # as where a scheme compiles what a script trains
            yield
            return
        # no real run may find code that was generated here: nothing was measured for it
        folder = {"TORCHINDUCTOR_CACHE_DIR": str(user_cache() / "inductor-simulated")}
        with ExitStack() as stack:
            stack.enter_context(entries(os.environ, folder))
            for message in _HARMLESS:
                stack.enter_context(_ignored(message))
            for owner, name, value in self._replacements():
                stack.enter_context(attribute(owner, name, value))
            # code for this card is for no other card, and for no other simulation
            # before the block too: a cache may hold what was compiled for a real card, or for another profile
            for forget in (torch._dynamo.reset, torch._inductor.utils.clear_caches, _forget_card):
                forget()
                stack.callback(forget)
            for kind in seeing:
                stack.enter_context(attribute(kind, "__torch_dispatch__", _disable_dynamo(kind.__torch_dispatch__)))
            _leave_ours()
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield owners, names and values of the internals of torch, and of Triton, that are replaced."""
        import torch._inductor.config
        from torch._dynamo.convert_frame import ConvertFrame
        from torch._dynamo.variables.optimizer import OptimizerVariable
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.constant_folding import ConstantFolder
        from torch._inductor.fx_passes import pad_mm
        from torch.fx.experimental import proxy_tensor

        # operators of tracing are not the script's; torch itself leaves modes on for a DistributedDataParallel
        yield ConvertFrame, "__call__", _traced_alone(ConvertFrame.__call__)
        # what generated code allocates and views with; it looks them up when it is loaded
        yield torch._C._dynamo.guards, "_empty_strided_cuda", self._allocate
        yield torch._C._dynamo.guards, "_reinterpret_tensor", _reinterpret
        # kernels are not built
        yield AsyncCompile, "triton", lambda _, name, source, device_str="cuda": _Kernel(source, self._ran)
        yield AsyncCompile, "cpp_pybinding", _on_real_tensors(AsyncCompile.cpp_pybinding)
        yield AsyncCompile, "warm_pool", classmethod(lambda cls: None)
        # with more, Inductor compiles in processes of its own, where nothing of this is replaced
        yield torch._inductor.config, "compile_threads", 1
        # a driver tells for what card code is generated
        driver, stand_in = _triton_driver(), _Driver(self._capability)
        yield driver, "_active", stand_in
        yield driver, "_default", stand_in
        # nothing can be computed or measured on the card
        yield ConstantFolder, "run", _folded_on_host(ConstantFolder.run)
        yield proxy_tensor, "unset_fake_temporarily", _on_host
        yield pad_mm, "_should_pad", _padded_by_rule(pad_mm._should_pad)
        # _should_pad returns a cached answer before it would measure both forms
        yield pad_mm, "get_cached_should_pad", lambda key: True
        # it makes optimizer state while it traces, and calls this before
        yield OptimizerVariable, "graph_break_if_pending_mutation", _refuse_optimizer

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._ran()
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _leave_ours() -> None:
    """Let torch compile no code of the simulation, as it would where it runs a part of a function uncompiled."""
    from torch._dynamo.eval_frame import skip_code

    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            for code in _codes(vars(module).values(), name):
                skip_code(code)


def _codes(values: Iterable[Any], module: str) -> Iterator[CodeType]:
    """Yield the code of functions of a module, of its classes, and of what is defined inside of them."""
    for value in values:
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value).values(), module)
        elif isinstance(value, property):
            yield from _codes((value.fget, value.fset), module)
        elif isinstance(
            code := getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None), CodeType
        ):
            waiting = [code]
            while waiting:
                yield (code := waiting.pop())
                waiting += [each for each in code.co_consts if isinstance(each, CodeType)]


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    if not isinstance(tensor, FakeTensor):  # a constant, which has values
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
    # no view: autograd adds in place to what is none, and FSDP2 warns of views
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, size, stride)


class _Kernel:
    """Stands in for a kernel of Triton: it does nothing, but takes its time."""

    def __init__(self, source: str, ran: Callable[[], object]) -> None:
        self.inductor_meta: dict[str, Any] = {}
        found = _IN_SOURCE.search(source)
        self._names = [] if found is None else [name.partition(":")[0].strip() for name in found[1].split(",")]
        self._ran = ran

    def run(self, *args: Any, **options: Any) -> None:
        self._ran()
        # of a kernel of the user's, which Inductor launches too, the names tell nothing, but its tensors are moved
        moved = [each for each in args if isinstance(each, FakeTensor)]
        named = zip(self._names, args, strict=False)
        again = [each for name, each in named if name.startswith(_READ_AND_WRITTEN) and isinstance(each, FakeTensor)]
        if moved:
            # what a kernel updates in place is moved twice
            one_kernel([], [*moved, *again])


class _Driver:
    """Stands in for Triton's driver, which says what code is generated for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._architecture = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        target: Any = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", self._architecture, _THREADS_OF_WARP)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def _triton_driver() -> Any:
    return importlib.import_module("triton.runtime").driver


def _traced_alone(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Let no mode see the operators that run while code is traced and compiled."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return convert(*args, **options)

    return call


def _refuse_optimizer(*_: Any) -> NoReturn:
    raise MeasurementError(
        "torch.compile of an optimizer's step is not simulated: compile the model, or set TORCH_COMPILE_DISABLE=1 to "
        "run all of the script eagerly"
    )


def _on_real_tensors(build: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel of the host run on real tensors, and do nothing where one is fake, which has no memory."""

    def pybinding(*args: Any) -> Callable[..., None]:
        kernel: Any = None

        def run(*given: Any) -> None:
            nonlocal kernel
            if any(isinstance(each, FakeTensor) for each in given):
                return
            # built when it first runs: on fake tensors none does
            kernel = build(*args) if kernel is None else kernel
            kernel(*given)

        return run

    return pybinding


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes in host memory what is asked for on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _HOST
        return func(*(_HOST if isinstance(each, torch.device) else each for each in args), **kwargs)


@contextmanager
def _on_host() -> Iterator[None]:
    """Inside the block, compute constants of a graph that is traced, which no card has."""
    with unset_fake_temporarily(), _OnHost():  # type: ignore[no-untyped-call]
        yield


def _folded_on_host(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the constants of a graph be computed in host memory."""

    def folded(folder: Any) -> Any:
        with _OnHost():  # type: ignore[no-untyped-call]
            return run(folder)

    return folded


def _padded_by_rule(measured: Callable[..., bool]) -> Callable[..., bool]:
    """Pad the odd sizes of products that torch would measure if tensor cores compute them, which need even ones."""

    def should_pad(match: Any, mat1: Tensor, *others: Any, **more: Any) -> bool:
        half = mat1.dtype in (torch.float16, torch.bfloat16)
        return (half or torch.backends.cuda.matmul.allow_tf32) and measured(match, mat1, *others, **more)

    return should_pad


def _forget_card() -> None:
    """Forget what torch asked of a card once: whether Triton runs on it, and its properties."""
    from torch._dynamo import device_interface
    from torch._inductor import codecache, utils
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    device_interface.caching_worker_device_properties.clear()
    asked = [*vars(_triton).values(), *vars(utils).values()]
    for each in (*asked, codecache.CacheBase.get_system, hints.DeviceProperties.create):
        if isinstance(each, functools._lru_cache_wrapper):
            each.cache_clear()


@contextmanager
def _ignored(message: str) -> Iterator[None]:
    """Inside the block, show no warning that begins so; other filters of warnings stay as a script sets them."""
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
