from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from actbench.errors import ConversionError, IdleError, MeasurementError
from actbench.methods.compile.forward import UNTRACEABLE, Backend, CompiledForward, is_fake, needed_by_inductor
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.packing.refusals import is_compiled, uncompilable_in
from actbench.scheme.base import Change, Scheme, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import Part, TrainingSetup
from actbench.simulator import inductor

UNTIMED = "compile is simulated without kernels, and how long inductor's take is not known"


class Compile(Scheme):
    """``torch.compile`` makes one graph of the model, and recomputes in backward what a memory budget leaves out.

    Paper: He and Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023, and
    ``torch._functorch.config.activation_memory_budget``.
    Kept for backward: at budget 1 what torch.compile saves by itself, which for most models is less than they save
    without it; at budget 0 the model's inputs, and the whole model runs twice; in between about that share of budget 1,
    chosen so that few operations run again. Random numbers are drawn once. What a loss outside of the model saves is
    unchanged. Gradients equal those of the model to rounding; a compiled dropout draws other masks, from the same seed
    too. A pass without gradients is not compiled. The backward pass may free what it reads: ``retain_graph`` then
    raises an error of torch, which says how to allow it. The backward pass gives the gradients of all parameters at its
    end, so that ``release`` frees nothing earlier.
    Compiling takes seconds to minutes in the first step with a shape; no timing includes it. ``only=model.layers.*``
    compiles each block by itself, as trainers do. Packing schemes are refused beside it.
    Simulated: the tracing, partition, fusion and buffers are torch's own, and the program that inductor makes of a
    graph runs on fake tensors, without kernels: its allocations, reuse and frees are those of a real step. For a card
    this takes torch 2.15 and triton. No time is estimated.

    Attributes:
        budget: The share that may be saved of what torch.compile saves by itself.
        backend: What compiles the graph; auto is inductor if a compiler for its kernels is installed (triton on CUDA,
            g++ or CXX on a CPU), else aot_eager_decomp_partition, which runs the graph operator by operator: it saves
            the same, is not faster, and its backward pass has temporaries that kernels avoid.
        fullgraph: Whether to refuse a model that does not compile to one graph; false compiles what it can.
    """

    name: ClassVar[str] = "compile"
    positional: ClassVar[str | None] = "budget"
    card: ClassVar[Card] = Card(
        summary="torch.compile, which recomputes in the backward pass to stay within a memory budget",
        paper="He and Yu 2023, MLSys",
        rank=45,  # around the changes of all other schemes
        draws_alike=False,
        variants=(),  # no time of a compiled step is estimated
    )
    changes: ClassVar[tuple[Change, ...]] = ("recomputation",)
    gradient: ClassVar[Gradient] = "exact"  # the kernels of a graph only round differently

    budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    backend: Literal["auto", "inductor", "aot_eager_decomp_partition"] = "auto"
    fullgraph: bool = True

    @property
    def facets(self) -> Iterable[Facet]:
        """Kernels of a graph round otherwise, and no module of it runs by itself, so that none is watched."""
        return LossyForward(), Limits(untraceable=UNTRACEABLE, estimated=UNTIMED)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a compiled forward on the model.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: The model is compiled already, or a change by another scheme cannot be compiled.
            MeasurementError: The backend lacks its compiler.
        """
        module = setup.module
        refuse_untrained(self.spec, module)
        if any(is_compiled(part) or CompiledForward.of(part) for part in module.modules()):
            raise ConversionError(f"{self.spec}: the model is compiled already; give the uncompiled model")
        refused = uncompilable_in(module)
        if refused is not None:
            raise ConversionError(
                f"{self.spec}: {refused[0]} cannot be compiled: {refused[1]}; leave out compile or the other scheme, "
                "or take fewbit or randomized with compile"
            )
        # equal blocks of one scheme share the code of their graphs
        earlier = (part.acts for part in setup.parts if part.spec == self.spec)
        shared_code = next((bound.shared_code for bound in earlier if isinstance(bound, CompiledForward)), None)
        bound = CompiledForward(module, self.budget, self._backend(module), self.fullgraph, shared_code)
        bound.bind()
        becomes = f"compiled by {bound.backend}, activation budget {self.budget:g}"
        site = Site(path="", was=type(module).__name__, becomes=becomes)
        return setup.changed(module, (site,), by=Part(self.spec, acts=bound, after=lambda: self._seen(bound)))

    def _backend(self, module: nn.Module) -> Backend:
        """Return the backend for a model; raise a MeasurementError if its compiler is missing."""
        if self.backend == "aot_eager_decomp_partition":
            return self.backend
        device = next(module.parameters()).device
        lacks = (
            needed_by_inductor(device) if not is_fake(module) else inductor.lacks() if device.type == "cuda" else None
        )
        if lacks is None:
            return "inductor"
        if self.backend == "inductor" or is_fake(module):
            raise MeasurementError(
                f"{self.spec}: inductor needs {lacks}, which is not here; install it, or take "
                "backend=aot_eager_decomp_partition"
            )
        return "aot_eager_decomp_partition"

    def _seen(self, bound: CompiledForward) -> tuple[str, ...]:
        """Return the warnings about a model that has run; raise an IdleError if it has not."""
        if not bound.graphs:
            raise IdleError(
                f"{self.spec} does nothing in a training step, which calls parts of the model and never the whole "
                "model; name the parts in only="
            )
        if self.fullgraph:
            return ()
        return (f"{self.spec}: a pass runs {bound.graphs_of_a_pass} compiled graphs; the rest runs uncompiled",)
