"""The state of a site, a place in a model where a tensor is packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actbench.packing.precision import wide
from actbench.packing.samplegradients import SampleGradients

_OF_A_STEP = ("bits", "inside", "watched", "ranges", "gradients", "elements")


@dataclass(eq=False)
class SiteState:
    """The state of one packed input of one layer. A copy has no state of a step.

    Attributes:
        path: The layer's path in the model.
        bits: Average bits of an element, maybe a fraction.
        per_sample: Whether bits are allocated to the rows of dimension 0 by their ranges.
        factor: A quarter of the number of the tensor's elements that each output element is a sum of, so that
            ``factor * (mean squared range) * (squared norm of the output's gradient)`` is the variance that 1 bit
            leaves in the gradient of the weight (ActNN, arXiv 2104.14129, section 4): a quarter of the fan-in,
            ``weight[0].numel() / 4``.
        inside: Share of these elements that are in the tensor, not in the zeros around it.
        row: Elements of a row of the tensor that is normalised by itself and shares no group with another; 0 for none.
        product: Whether the tensor is saved by a product with a weight: of a linear layer or a convolution.
        guarded: Whether the tensor is checked for values that would be lost, and then not packed.
        was_finite: Whether a tensor was checked, in this run, and no value would have been lost.
        watched: Whether the site notes this step's ranges and gradients.
        ranges: Sum over the groups of their squared ranges, float32: 0-d, or (rows,) with ``per_sample``; on the
            tensor's device. None before the watched forward.
        gradients: Squared norm of the output's gradient, as ``ranges``. None before the watched backward.
        elements: Elements of the tensor at the last forward; 0 if it shares another site's tensor.
        owner: The site whose tensor was shared at the last forward, or None.
        followers: Sites that get the same bits, and whose elements count as this site's: norms have no variance of
            their own in the paper, and follow the layer before them, unless another layer shares their tensor.
        sample_gradients: Squared norms of the gradients of single samples over time, for ``per_sample``, or None.
        chunk: The fewest pieces of the batch that the backward pass of the layer is cut into.
        pipeline_threshold: Bytes of the layer's gradient and input above which it is cut further; None for never.
        kept: A tensor that the codec keeps here from pass to pass, and copies have too; None for nothing.
        plan: The :class:`actbench.packing.packer.SitePlan` of the last tensor that was packed here, or None.
    """

    path: str
    bits: float
    per_sample: bool = False
    factor: float = 0.25
    inside: float = 1.0
    row: int = 0
    product: bool = False
    guarded: bool = False
    was_finite: bool = False
    watched: bool = False
    ranges: Tensor | None = None
    gradients: Tensor | None = None
    elements: int = 0
    owner: SiteState | None = field(default=None, repr=False)
    followers: list[SiteState] = field(default_factory=list, repr=False)
    sample_gradients: SampleGradients | None = field(default=None, repr=False)
    chunk: int = 1
    pipeline_threshold: int | None = None
    kept: Tensor | None = field(default=None, repr=False)
    plan: Any = field(default=None, repr=False)

    def pieces(self, size_bytes: int) -> int:
        """Return how many pieces the backward pass is cut into, for the bytes of the layer's gradient and input."""
        most = self.pipeline_threshold
        return self.chunk if most is None else max(self.chunk, (size_bytes + most) // most)

    def begin(self, x: Tensor) -> None:
        """Prepare to pack a tensor."""
        self.owner, self.elements = None, x.numel()
        if self.sample_gradients is not None:
            self.sample_gradients.begin(x)

    def share(self, owner: SiteState) -> None:
        """Record that the tensor was packed before, for this site or another, so that it is not checked."""
        self.guarded = False
        if owner is not self:
            self.owner, self.elements = owner, 0

    def see_gradient(self, grad: Tensor) -> None:
        """Note the squared norm of a gradient of the output, if the site is watched or weighs samples."""
        if not self.watched and self.sample_gradients is None:
            return
        squares = _squared_norms(grad.detach(), self.per_sample)
        if self.watched:
            self.gradients = squares
        if self.sample_gradients is not None:
            self.sample_gradients.note(squares)

    def forget(self) -> None:
        """Forget what a watched step saw."""
        self.ranges = self.gradients = None

    def adapted(self) -> Any:
        """Return the state that later steps need; see :class:`actbench.packing.forwardwrapper.Adapted`."""
        return {
            **{name: getattr(self, name) for name in _OF_A_STEP},
            "owner": None if self.owner is None else self.owner.path,
            "history": None if self.sample_gradients is None else self.sample_gradients.adapted(),
            "kept": self.kept,
        }

    def adapt(self, state: Any, sites: Mapping[str, SiteState]) -> None:
        """Restore what :meth:`adapted` returned, given sites by path; raise a KeyError for another model's state."""
        for name in _OF_A_STEP:
            setattr(self, name, state[name])
        self.kept = state.get("kept")  # older states have none
        self.owner = None if state["owner"] is None else sites[state["owner"]]
        if self.sample_gradients is not None:
            self.sample_gradients.adapt(state["history"])

    def __getstate__(self) -> dict[str, Any]:
        of_a_step = {"was_finite": False, "watched": False, "ranges": None, "gradients": None, "elements": 0}
        return vars(self) | of_a_step | {"owner": None, "plan": None}


def _squared_norms(grad: Tensor, by_row: bool) -> Tensor:
    """Return the squared norm of a tensor, or of each of its rows, in float32, without a float32 copy of the tensor."""
    dims = list(range(1, grad.dim())) if by_row else None
    if dims == []:
        return grad.float().square()
    norm: Tensor = torch.linalg.vector_norm(grad, dim=dims, dtype=wide(grad.dtype))
    return norm.float().square()
