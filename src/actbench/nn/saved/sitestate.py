"""The state of a site: a place of a model where a tensor is packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actbench.nn.precision import wide
from actbench.nn.saved.samplegradients import SampleGradients

_OF_A_STEP = ("bits", "inside", "watched", "ranges", "gradients", "elements")


@dataclass(eq=False)
class SiteState:
    """What is known of one input of one layer that is packed. A copy knows nothing of a step.

    Attributes:
        path: The layer's path in the model.
        bits: Bits an element is given on average, which need not be whole.
        per_sample: Whether the rows of dimension 0 share the bits out among themselves by their ranges.
        factor: A quarter of how many elements of the tensor each element of the layer's output is made of, so that
            ``factor * (mean squared range) * (squared norm of the output's gradient)`` is the variance that 1 bit
            leaves in the gradient of the weight (ActNN, arXiv 2104.14129, section 4): a quarter of the fan-in,
            ``weight[0].numel() / 4``.
        inside: Share of these elements that lie in the tensor and not in zeros around it.
        row: Elements of a row of the tensor that is scaled by itself, and shares no group with another; 0 for none.
        product: Whether the tensor is saved by a product with a weight: of a linear layer or a convolution.
        guarded: Whether the tensor is looked at for values that would be lost, and then left as it is.
        was_finite: Whether a tensor was looked at, in this run, and no value would have been lost.
        watched: Whether this step's ranges and gradients are to be noted.
        ranges: Sum over the groups of their squared ranges, float32: 0-d, or (rows,) with ``per_sample``; on the
            tensor's device. None before the watched forward.
        gradients: Squared norm of the output's gradient, as ``ranges``. None before the watched backward.
        elements: Elements of the tensor at the last forward; 0 where another site's tensor is shared.
        owner: The site whose tensor was shared at the last forward, or None.
        followers: Sites that are given the same bits, and whose elements count as this one's: norms have no variance of
            their own in the paper, and go with the layer before them, unless another layer shares their tensor.
        sample_gradients: Squared norms of the gradients of single samples over time, for ``per_sample``, or None.
        chunk: Into how many pieces of the batch the backward pass of the layer is cut, at least.
        pipeline_threshold: Bytes of the layer's gradient and input above which it is cut further; None for never.
        kept: What the codec keeps here from pass to pass, and copies have too; None for nothing.
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

    def pieces(self, size_bytes: int) -> int:
        """Return into how many pieces the backward pass is cut, for the bytes of the layer's gradient and input."""
        most = self.pipeline_threshold
        return self.chunk if most is None else max(self.chunk, (size_bytes + most) // most)

    def begin(self, x: Tensor) -> None:
        """Say that a tensor is about to be packed."""
        self.owner, self.elements = None, x.numel()
        if self.sample_gradients is not None:
            self.sample_gradients.begin(x)

    def share(self, owner: SiteState) -> None:
        """Say that the tensor was packed before, for this site or for another one, and is not looked at."""
        self.guarded = False
        if owner is not self:
            self.owner, self.elements = owner, 0

    def see_gradient(self, grad: Tensor) -> None:
        """Note the squared norm of a gradient of the output, where the site is watched or weighs samples."""
        if not self.watched and self.sample_gradients is None:
            return
        squares = _squared_norms(grad.detach(), self.per_sample)
        if self.watched:
            self.gradients = squares
        if self.sample_gradients is not None:
            self.sample_gradients.note(squares)

    def forget(self) -> None:
        """Let go of what was seen in a watched step."""
        self.ranges = self.gradients = None

    def adapted(self) -> Any:
        """Return what later steps go on from; see :class:`actbench.nn.forwardwrapper.Adapted`."""
        return {
            **{name: getattr(self, name) for name in _OF_A_STEP},
            "owner": None if self.owner is None else self.owner.path,
            "history": None if self.sample_gradients is None else self.sample_gradients.adapted(),
            "kept": self.kept,
        }

    def adapt(self, state: Any, sites: Mapping[str, SiteState]) -> None:
        """Go on from what :meth:`adapted` returned, among the sites of the model by path.

        Raises:
            KeyError: Of another model.
        """
        for name in _OF_A_STEP:
            setattr(self, name, state[name])
        self.kept = state.get("kept")  # older states have none
        self.owner = None if state["owner"] is None else sites[state["owner"]]
        if self.sample_gradients is not None:
            self.sample_gradients.adapt(state["history"])

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "was_finite": False,
            "watched": False,
            "ranges": None,
            "gradients": None,
            "elements": 0,
            "owner": None,
        }


def _squared_norms(grad: Tensor, by_row: bool) -> Tensor:
    """Return the squared norm of a tensor, or of each of its rows, float32, without a copy of it in that type."""
    dims = list(range(1, grad.dim())) if by_row else None
    if dims == []:
        return grad.float().square()
    norm: Tensor = torch.linalg.vector_norm(grad, dim=dims, dtype=wide(grad.dtype))
    return norm.float().square()
