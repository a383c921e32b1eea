"""Graphs of ``torch.compile`` on fake CPU tensors: each runs the program that inductor makes, without kernels.

Everything until the kernels is torch's own: the tracing, the decompositions, the partition by the memory budget, the
fusion, and the plan of buffers. The program allocates, reuses and frees buffers as a real one does, and calls torch's
operators where inductor does. Kernels do nothing, so no compiler is needed. For a simulated card there is
:mod:`actbench.simulator.inductor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._functorch import config as aot_config
from torch._inductor import async_compile, compile_fx, config, cpu_vec_isa
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from actbench.device.patches import attribute

Code = Callable[..., Any]

_SETTINGS: Final = {
    # with more, Inductor compiles in processes of its own, where nothing of this is replaced
    "compile_threads": 1,
    "force_disable_caches": True,  # a program without kernels must not be taken for a real one
}


# Of patches that overlap in two threads one would stay. Dynamo takes a lock of its own between these two: one lock for
# both could be taken before it in one thread, and after it in another, and each would wait for the other.
_TRACING: Final = RLock()
_LOWERING: Final = RLock()


@contextmanager
def compiled_under_modes() -> Iterator[None]:
    """Let ``torch.compile`` compile inside the block though dispatch modes are active, which see what graphs run.

    It traces without them in any case. Code between graphs runs under them as always. One thread at a time is inside.
    """
    with _TRACING, attribute(convert_frame, "any_torch_dispatch_mode_on_stack", lambda: False):
        yield


def form(graph: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the key of a graph for these inputs; None if more than code, shapes and types decides its operators.

    Tensor subclasses, such as DTensors, may decide more; those of parameters and of fake tensors do not.
    """
    if any(True for _ in graph.buffers()) or any(True for _ in graph.parameters()):
        return None
    if not all(type(each) in (Tensor, FakeTensor, nn.Parameter) for each in inputs):
        return None
    kinds = [type(each) for each in inputs]
    named = [(each.shape, each.stride(), each.storage_offset(), each.dtype, each.requires_grad) for each in inputs]
    # inputs that share memory are traced in another way (the synthetic bases of AOTAutograd)
    storages = [id(each.untyped_storage()) for each in inputs]
    first = [storages.index(storage) for storage in storages]
    device = next((each.device.type for each in inputs), "cpu")
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return graph.print_readable(print_output=False), *kinds, *named, *first, *autocast


def programs(graph: GraphModule, inputs: Sequence[Tensor], partition: Any) -> Code:
    """Return the code of a graph: inductor's programs of its forward and its backward pass, without kernels.

    Args:
        graph: The graph.
        inputs: Its inputs, fake.
        partition: Splits the joint graph of both passes.
    """

    def make(part: GraphModule, inputs: Sequence[Tensor], **named: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(_LOWERING)
            stack.enter_context(config.patch(_SETTINGS))
            stack.enter_context(attribute(compile_fx, "GraphLowering", _Lowering))
            # which vectors the processor knows changes no buffer, and to find it out takes a compiler and a minute
            stack.enter_context(attribute(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa))
            return compile_fx.compile_fx_inner(part, inputs, **named)

    with config.patch(custom_partitioner_fn=partition), aot_config.patch(enable_autograd_cache=False):
        code: Any = compile_fx.compile_fx(graph, inputs, inner_compile=make)
    return code  # type: ignore[no-any-return]


class _Lowering(GraphLowering):
    """Loads the program of a graph with fake allocations, and with kernels that do nothing."""

    def compile_to_module(self) -> Any:
        source, _ = self.codegen()
        program: dict[str, Any] = {"__name__": "inductor", **self.constants, **self.torchbind_constants}
        with _LOWERING, attribute(async_compile, "AsyncCompile", _NoKernels):
            exec(source.value, program)
        program.update({name: _nothing for name in program if name.startswith("assert_")})  # they ask for addresses
        program.update(empty_strided_cpu=_empty, reinterpret_tensor=_reinterpret)
        return SimpleNamespace(call=program["call"], __file__=__file__)


class _NoKernels:
    """Stands for what compiles the kernels of a program."""

    def cpp_pybinding(self, types: Sequence[str], source: str) -> Code:
        return _nothing

    def wait(self, program: dict[str, Any]) -> None:
        """Wait for no kernel."""


def _nothing(*args: Any) -> None:
    """Do what a kernel does to fake tensors."""


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], further: int = 0) -> Tensor:
    if tensor.untyped_storage().device.type != "meta":  # a constant, which has values
        return tensor.as_strided(size, stride, tensor.storage_offset() + further)
    # no view: autograd adds in place to what is none, and FSDP2 warns of views
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset() + further, size, stride)
