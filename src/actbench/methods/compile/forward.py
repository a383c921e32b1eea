"""A forward that runs as graphs of ``torch.compile``; a budget limits what they save for backward."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch._functorch import config as partitioning
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from actbench.errors import ActbenchError, ConversionError, UntraceableError, message_of, shortened
from actbench.packing import savedtensors
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.refusals import refuse_compiling
from actbench.simulator.card import until_the_end
from actbench.simulator.profiles import DeviceProfile

Backend = Literal["inductor", "aot_eager_decomp_partition"]

UNTRACEABLE = "torch.compile compiles nothing while every operator is watched, as the ledger does"
_REST = re.compile(r"from user code:|For more information, run with|Developer debug context:|Set TORCHDYNAMO_VERBOSE")
_TWICE = ("a model that the scheme compile has compiled", "its graphs are made already")


def needed_by_inductor(device: torch.device) -> str | None:
    """Return the compiler that inductor's kernels for a device need if it is missing, else None."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "triton, and a CUDA device that it knows"
    command = os.environ.get("CXX", "g++")
    return None if shutil.which(command) else f"the C++ compiler {command} (the environment variable CXX)"


def _with_kernels(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], partition: Any) -> Any:
    """Return the code of a graph by torch's ``inductor``."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(custom_partitioner_fn=partition):
        return compile_fx(graph, inputs)


def _by_operators(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], partition: Any) -> Any:
    """Return the code of a graph as torch's ``aot_eager_decomp_partition`` makes it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    def partitioned(joint: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        remove_noop_ops(joint.graph)  # as inductor does: else a layer in place and the next one save a copy each
        return partition(joint, *arguments, **named)

    backend: Any = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, decompositions=select_decomp_table, partition_fn=partitioned
    )
    return backend(graph, inputs)


_BACKENDS: Final[dict[Backend, Callable[..., Any]]] = {
    "inductor": _with_kernels,
    "aot_eager_decomp_partition": _by_operators,
}


def _for_the_card(profile: DeviceProfile) -> AbstractContextManager[None]:
    """Let Inductor compile for a simulated card."""
    from actbench.simulator.inductor import Inductor
    from actbench.simulator.tracker import StorageTracker

    assert profile.compute_capability is not None
    return Inductor(profile.compute_capability).simulated(StorageTracker)


class CompiledForward(ReboundForward):
    """A forward that is compiled at its first call, and runs uncompiled without gradients.

    On fake tensors it is traced and partitioned as always, and runs the program that inductor makes, without kernels.

    Args:
        module: The module.
        budget: The ``activation_memory_budget`` by which its graphs are partitioned, 0 to 1.
        backend: The backend that compiles the graphs.
        fullgraph: Whether the whole forward must be one graph; else parts that make no graph run uncompiled.
        shared_code: The code of graphs on fake tensors, which several forwards share.

    Attributes:
        graphs: How many graphs were made.
        graphs_of_a_pass: How many of them ran in the last pass.
    """

    compiles = True

    def __init__(
        self,
        module: nn.Module,
        budget: float,
        backend: Backend,
        fullgraph: bool,
        shared_code: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(module)
        self.budget, self.backend, self.fullgraph = budget, backend, fullgraph
        self.graphs = self.graphs_of_a_pass = 0
        self.shared_code = {} if shared_code is None else shared_code
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graphs of the forward; compile them if there are none for such arguments.

        Raises:
            UntraceableError: A dispatch mode is active on a real model, under which ``torch.compile`` runs the plain
                forward instead; or a model on fake tensors cannot be traced.
            ConversionError: The forward, or the whole of it, cannot be compiled, or runs inside code that is being
                compiled.
        """
        module = self.module
        if not torch.is_grad_enabled():
            return self.inner(module, *args, **kwargs)
        refuse_compiling(*_TWICE)
        watched = _get_current_dispatch_mode() is not None
        if watched and not is_fake(module):
            raise UntraceableError(f"compile: {UNTRACEABLE}")
        self.graphs_of_a_pass = 0
        found = self._under_modes(module, args, kwargs) if watched else self._run(module, args, kwargs)
        if not self.graphs_of_a_pass:
            raise ConversionError(
                f"compile: torch.compile ran {type(module).__name__} uncompiled, without a message; if "
                "TORCHDYNAMO_DISABLE or torch.compiler.set_stance switches it off, undo that, or leave compile out"
            )
        savedtensors.acted(self)
        return found

    def _under_modes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from actbench.methods.compile.simulated import compiled_under_modes  # takes seconds to import

        if next(module.parameters()).is_cuda:
            until_the_end(_for_the_card)
        with compiled_under_modes():
            try:
                return self._run(module, args, kwargs)
            except RuntimeError as error:
                if self.graphs or isinstance(error, ActbenchError):
                    raise
                raise UntraceableError(
                    f"compile: torch.compile cannot trace {type(module).__name__} on fake tensors: {message_of(error)}"
                ) from error

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._compiled is None:
            self._compiled = self._compile()
        from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

        try:
            return self._compiled(module, *args, **kwargs)
        except TorchDynamoException as error:
            allowed = "; fullgraph=false compiles what lies between the breaks" if self.fullgraph else ""
            # the start of the error, without the pages of advice and frames that follow
            lines = (line.strip() for line in _REST.split(str(error))[0].splitlines())
            reason = shortened(" ".join(line for line in lines if line)) or message_of(error)
            raise ConversionError(
                f"compile: torch.compile makes no graph of {type(module).__name__}: {reason}{allowed}"
            ) from error

    def _compile(self) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.inner(module, *args, **kwargs)

        run.__code__ = run.__code__.replace()  # torch keeps graphs by code object, and gives up after 8 for one
        # batches of other sizes are other graphs on fake tensors, whose programs have numbers for sizes
        dynamic = False if is_fake(self.module) else None
        return torch.compile(run, backend=self._graph, fullgraph=self.fullgraph, dynamic=dynamic)

    def _graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the code of a graph; ``torch.compile`` calls this."""
        from actbench.methods.compile.partition import Partition

        partition = Partition(self.budget)
        with partitioning.patch(activation_memory_budget=self.budget):
            if is_fake(self.module):
                code = self._code_on_fakes(graph, inputs, partition)
            else:
                code = _BACKENDS[self.backend](graph, inputs, partition)
        self.graphs += 1

        def counted(*args: Any) -> Any:
            self.graphs_of_a_pass += 1
            return code(*args)

        return counted

    def _code_on_fakes(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor], partition: Any
    ) -> Callable[..., Any]:
        """Return the code of a graph on fake tensors, which is that of an equal graph if there is one.

        The parameters of a block are inputs of its graph, so that the graphs of equal blocks are equal.
        """
        from actbench.methods.compile import simulated

        form = simulated.form(graph, inputs)
        code: Callable[..., Any] | None = self.shared_code.get(form)
        if code is None and self.backend == "inductor":
            made = _with_kernels if next(self.module.parameters()).is_cuda else simulated.programs
            code = made(graph, inputs, partition)
        elif code is None:
            code = _by_operators(graph, inputs, partition)
        if form is not None:
            self.shared_code[form] = code
        return code

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"graphs": 0, "graphs_of_a_pass": 0, "shared_code": {}, "_compiled": None}
        return {**super().__getstate__(), **fresh}


def is_fake(module: nn.Module) -> bool:
    """Return whether the parameters of a module are fake."""
    return isinstance(next(module.parameters(), None), FakeTensor)
