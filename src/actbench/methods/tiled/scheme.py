from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.tiled.forward import UNCOMPILABLE, TiledForward
from actbench.methods.tiled.positionwise import linear_layers, why_not
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.packing.refusals import refuse_compiled
from actbench.packing.replacement import census
from actbench.packing.wrapped import bind_entries, refuse_hooks_inside, unbind_entries
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = (
    "they are in evaluation mode, or get one position, or are not called with one tensor alone; put them in training "
    "mode, or leave tiled_mlp out"
)


class TiledMlp(Scheme):
    """MLPs run a piece of the sequence at a time, and save only their input; in backward, each piece runs again.

    Paper: Bekman et al., "Arctic Long Sequence Training: Scalable and Efficient Training for Multi-Million Token
    Sequences", arXiv 2506.13996, section 3.1.1 (TiledMLP).
    Kept for backward: the input of each MLP. What an MLP computes inside, forward and backward, exists of
    ``ceil(positions / pieces)`` positions at a time. Gradients of the parameters are summed over the pieces in float32
    (float64 for float64), and rounded to their type once: loss and gradients equal the plain ones to rounding. Dropout
    draws a mask for each piece, the same in both runs. MLPs are found by what they compute: outermost modules of two
    linear layers or more, whose result has the shape of their only input and at each position follows from that
    position. Modules that mix positions are left as they are; so is an MLP that stands in two modules, as BERT's.
    Not reproduced: gradients added to the parameters piece by piece, without the sum; tiles of other modules.

    Attributes:
        pieces: How many pieces the sequence is cut into: the last dimension but one, rows of a matrix.
    """

    name: ClassVar[str] = "tiled_mlp"
    positional: ClassVar[str | None] = "pieces"
    card: ClassVar[Card] = Card(
        summary="MLPs run on one piece of the sequence at a time, in both passes; gradients are exact to rounding",
        paper="Bekman et al. 2025, arXiv 2506.13996",
        rank=9,  # after adapters and shared layers, whose operators are seen; before layers have operators of their own
        variants=(":4", ":16"),
        leading=(":4",),
        draws_alike=False,  # each piece draws its own
    )
    claims: ClassVar[tuple[str, ...]] = ("run MLPs in pieces",)
    changes: ClassVar[tuple[Change, ...]] = ("recomputation",)
    gradient: ClassVar[Gradient] = "exact"

    pieces: Annotated[int, Field(ge=2)] = 4

    @property
    def facets(self) -> Iterable[Facet]:
        """A product of fewer rows may round differently."""
        return (LossyForward(),)

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with its MLPs changed; raise a ConversionError if hooks pack what is saved inside one."""
        changed = super().apply(setup)
        refuse_hooks_inside(changed.module)
        return changed

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward on the MLPs.

        Raises:
            NothingToConvertError: The model has no MLP, or only MLPs that mix positions.
            ConversionError: The model is compiled, or its MLPs run in pieces already.
        """
        module = setup.module
        refuse_compiled(module, *UNCOMPILABLE)
        if any(TiledForward.of(part) for part in module.modules()):
            raise ConversionError("tiled_mlp: MLPs of the model run in pieces already; convert the original model")
        refused: dict[str, str] = {}
        found = list(_mlps(module, "", refused, set()))
        if not found:
            nearest = "".join(f"{path or 'it'} is no such MLP: {why}; " for path, why in list(refused.items())[-1:])
            raise NothingToConvertError(
                f"tiled_mlp: {type(module).__name__} has no MLP that computes each position by itself; {nearest}an "
                f"MLP in two modules, as BERT's, is not found; it holds {census(module, containers=True)}"
            )
        unbind_entries(module)
        for _, mlp in found:
            TiledForward(mlp, self.pieces).bind()
        # in front: an MLP that a step calls itself is a pass, and runs in pieces inside it
        bind_entries(module)
        sites = tuple(
            Site(path=path, was=type(mlp).__name__, becomes=f"in {self.pieces} pieces") for path, mlp in found
        )
        return setup.changed(module, sites, by=Part(self.spec, acts=TiledForward, idle=_IDLE))


def _mlps(
    module: nn.Module, path: str, refused: dict[str, str], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the outermost MLPs; add to ``refused`` why other modules of linear layers are none."""
    if module in seen or sum(1 for _ in linear_layers(module)) < 2:
        return
    seen.add(module)
    why = why_not(module)
    if why is None:
        yield path, module
        return
    refused[path] = why
    for name, child in module.named_children():
        yield from _mlps(child, f"{path}.{name}" if path else name, refused, seen)
