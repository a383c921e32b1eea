from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from actbench.errors import ConversionError, IdleError, MeasurementError
from actbench.nn.compiled import UNTRACEABLE, Backend, CompiledForward, needed_by_inductor
from actbench.nn.refusals import is_compiled, uncompilable_in
from actbench.results.fits import Gradient
from actbench.results.records import Site
from actbench.schemes.base import Change, Scheme, refuse_untrained
from actbench.setup import Part, TrainingSetup


class Compile(Scheme):
    """The model as one graph of ``torch.compile``, which computes again in backward what a budget has no room for.

    Paper: He and Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023, and
    ``torch._functorch.config.activation_memory_budget``.
    Kept for backward: at a budget of 1 what torch.compile keeps by itself, which is less than the model keeps without
    it; at 0 what goes into the model, and all of it runs twice; in between about that share of the one at 1, chosen so
    that few operations run again; random numbers are drawn once. What a loss outside of the model saves is kept as it
    is. Gradients are those of the model to rounding; a compiled dropout draws other masks, also of the same seed. A
    pass without gradients is not compiled. The backward pass may free what it reads: ``retain_graph`` is then an error
    of torch's, which says how to allow it. It gives the gradients of all parameters at its end, so that ``release``
    frees nothing earlier.
    Compiling takes seconds to minutes, in the first step with a shape; it is part of no timing. Not simulated. Packing
    schemes are refused beside it.

    Attributes:
        budget: Of what torch.compile keeps by itself, the share that may be kept.
        backend: What makes code of the graph; auto is inductor where there is a compiler for its kernels (triton on
            CUDA, g++ or CXX on a CPU), else aot_eager_decomp_partition, which runs the graph operator by operator: the
            same is kept, nothing is faster, and the backward pass has temporaries that kernels would not.
        fullgraph: Whether a model of which torch.compile cannot make one graph is refused; false compiles what it can.
    """

    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "torch.compile, which recomputes in backward what a memory budget has no room for"
    paper: ClassVar[str] = "He and Yu 2023, MLSys"
    positional: ClassVar[str | None] = "budget"
    rank: ClassVar[int] = 45  # around what the others have made of the model
    untraceable: ClassVar[str] = UNTRACEABLE
    draws_alike: ClassVar[bool] = False
    lossy_forward: ClassVar[bool] = True

    budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    backend: Literal["auto", "inductor", "aot_eager_decomp_partition"] = "auto"
    fullgraph: bool = True

    @property
    def changes(self) -> tuple[Change, ...]:
        """What runs again in the backward pass."""
        return ("recomputation",)

    @property
    def gradient(self) -> Gradient:
        """Kernels of a graph round otherwise than operators one by one; nothing else changes."""
        return "exact"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a compiled forward on the model.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: The model is compiled already, or another scheme made something of it that cannot be.
            MeasurementError: The backend lacks its compiler.
        """
        module = setup.module
        refuse_untrained(self.spec, module)
        if any(is_compiled(part) or CompiledForward.of(part) for part in module.modules()):
            raise ConversionError(f"{self.spec}: the model is compiled already; give it as it was before")
        refused = uncompilable_in(module)
        if refused is not None:
            raise ConversionError(
                f"{self.spec}: {refused[0]} cannot be compiled: {refused[1]}; leave one of the two out, or take fewbit "
                "or randomized beside it"
            )
        bound = CompiledForward(module, self.budget, self._backend(module), self.fullgraph)
        bound.bind()
        becomes = f"compiled by {bound.backend}, activation budget {self.budget:g}"
        site = Site(path="", was=type(module).__name__, becomes=becomes)
        return setup.changed(module, (site,), by=Part(self.spec, acts=bound, after=lambda: self._seen(bound)))

    def _backend(self, module: nn.Module) -> Backend:
        """Return the backend for a model, or raise a MeasurementError where it has no compiler."""
        if self.backend == "aot_eager_decomp_partition":
            return self.backend
        lacks = needed_by_inductor(next(module.parameters()).device)
        if lacks is None:
            return "inductor"
        if self.backend == "inductor":
            raise MeasurementError(
                f"{self.spec}: inductor needs {lacks}, which is not here; install it, or take "
                "backend=aot_eager_decomp_partition"
            )
        return "aot_eager_decomp_partition"

    def _seen(self, bound: CompiledForward) -> tuple[str, ...]:
        """Return what is to be said of a model that has run; an IdleError if it has not."""
        if not bound.graphs:
            raise IdleError(
                f"{self.spec} does nothing in a training step, which calls parts of the model and not the model; name "
                "these in only="
            )
        if self.fullgraph:
            return ()
        return (f"{self.spec}: a pass runs {bound.graphs_of_a_pass} compiled graphs; what is in none runs as it is",)
