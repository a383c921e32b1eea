"""Allocates bits to the layers of a model while it trains, by what each layer's error adds to the gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.methods.actnn.solver import WIDTHS, all_spent
from actbench.ops.hostmemory import to_host
from actbench.packing.determinism import must_sync
from actbench.packing.sitestate import SiteState


class BitAllocation:
    """Allocates an average number of bits to sites (ActNN, arXiv 2104.14129, section 4.2).

    Every ``interval`` steps the sites are watched for one step. What they saw is copied to the host in one tensor, and
    the first later step that finds the copy finished sets the bits: no step waits for the device, except inside
    :func:`deterministic_bits`. Until then all sites have the average. If the gradients of a watched step overflow, the
    next step is watched too. A step is a forward pass of the model in training; each micro-batch counts as one.

    Args:
        sites: The sites where tensors are packed; more may be added later.
        average_bits: Average bits of an element, 1 to 8.
        interval: Steps from one watched step to the next, 1 or more.
        choices: Bits to choose from.
    """

    def __init__(
        self, sites: Sequence[SiteState], average_bits: float, interval: int, choices: Sequence[int] = WIDTHS
    ) -> None:
        self.sites, self.average_bits, self.interval, self.choices = sites, average_bits, interval, tuple(choices)
        self._watching, self._wait = False, 0
        self._seen: _Seen | None = None
        for site in self._all():
            site.bits = average_bits

    def begin(self) -> None:
        """Begin a training forward; a watched step that had no backward pass yet stays watched."""
        if self._watching:
            self._gather()
        if self._seen is not None and self._seen.is_there():
            if not self._seen.share_out(self.average_bits, self.choices):
                self._wait = 0
            self._seen = None
        if self._wait > 0:
            self._wait -= 1
        elif self._seen is None:
            self._watching = True
        for site in self._all():
            site.watched = self._watching

    def _all(self) -> Iterator[SiteState]:
        for site in self.sites:
            yield site
            yield from site.followers

    def _gather(self) -> None:
        self._seen = _sent(self.sites)
        if self._seen is not None:
            self._watching, self._wait = False, self.interval - 1
            for site in self._all():
                site.forget()

    def adapted(self) -> Any:
        """Return the state between two watched steps; see :class:`actbench.packing.forwardwrapper.Adapted`.

        Waits for a copy to the host that is under way.
        """
        return {"watching": self._watching, "wait": self._wait, "seen": self._seen and self._seen.written()}

    def adapt(self, state: Any, sites: Mapping[str, SiteState]) -> None:
        """Restore what :meth:`adapted` returned, given sites by path; raise a KeyError for another model's state."""
        self._watching, self._wait = state["watching"], state["wait"]
        self._seen = state["seen"] and _Seen.read(state["seen"], sites)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watching": False, "_wait": 0, "_seen": None}


class _Share(NamedTuple):
    """A site, its number of costs (one for each row, or one), and the elements of its tensor."""

    site: SiteState
    rows: int
    elements: int


@dataclass(frozen=True)
class _Seen:
    """What a watched step saw, on its way to the host.

    Attributes:
        shares: The sites that saw something.
        costs: The costs of each site in turn, float64, in host memory.
        copied: Event behind the copy to the host; None if the copy was not queued.
    """

    shares: list[_Share]
    costs: Tensor
    copied: torch.cuda.Event | None

    def is_there(self) -> bool:
        """Return whether the costs can be read; inside :func:`deterministic_bits`, wait for them."""
        if self.copied is not None and must_sync():
            self.copied.synchronize()
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def written(self) -> Any:
        """Return the state as plain values and a tensor."""
        if self.copied is not None:
            self.copied.synchronize()
        return {"shares": [(share.site.path, share.rows, share.elements) for share in self.shares], "costs": self.costs}

    @classmethod
    def read(cls, state: Any, sites: Mapping[str, SiteState]) -> _Seen:
        """Make the object from what :meth:`written` returned."""
        shares = [_Share(sites[path], rows, elements) for path, rows, elements in state["shares"]]
        return cls(shares, state["costs"], None)

    def share_out(self, average_bits: float, choices: Sequence[int]) -> bool:
        """Set the bits of each site, the average if its costs are not finite; return whether all costs are finite."""
        parts = np.split(self.costs.numpy(), np.cumsum([share.rows for share in self.shares])[:-1])
        fit = [share for share, part in zip(self.shares, parts, strict=True) if np.isfinite(part).all()]
        for share in self.shares:
            share.site.bits = average_bits
        if fit:
            costs = np.concatenate([part for part in parts if np.isfinite(part).all()])
            weights = np.concatenate([np.full(share.rows, share.elements / share.rows) for share in fit])
            widths = iter(all_spent(costs, weights, average_bits * float(weights.sum()), choices))
            for share in fit:
                share.site.bits = sum(islice(widths, share.rows)) / share.rows
        own = {share.site for share in self.shares}
        for share in self.shares:
            for follower in share.site.followers:
                if follower not in own:
                    follower.bits = share.site.bits
        return len(fit) == len(parts)


def _sent(sites: Iterable[SiteState]) -> _Seen | None:
    """Send the costs of sites to the host; return None if no site saw both ranges and gradients, or only fake ones.

    If several sites share a tensor, its cost is summed at the site that packed it. A norm that packed it is then
    allocated by itself.
    """
    costs: dict[SiteState, Tensor] = {}
    for site in sites:
        cost, packed = variance(site), site.owner or site
        if cost is not None:
            costs[packed] = _added(costs[packed], cost.to(costs[packed].device)) if packed in costs else cost
    if not costs:
        return None
    shares = [_Share(site, cost.numel(), _elements(site, costs)) for site, cost in costs.items()]
    device = next(iter(costs.values())).device
    # one tensor, and so one copy to the host
    together = torch.cat([cost.to(device, non_blocking=True).reshape(-1) for cost in costs.values()])
    return _Seen(shares, to_host(together), _recorded(device))


def _added(one: Tensor, other: Tensor) -> Tensor:
    return one + other if one.shape == other.shape else one.sum() + other.sum()


def _elements(site: SiteState, others: Collection[SiteState]) -> int:
    return site.elements + sum(follower.elements for follower in site.followers if follower not in others)


def variance(site: SiteState) -> Tensor | None:
    """Return the variance that 1 bit leaves in the gradient of a site's layer, up to a factor of the group size.

    It is float64 and 0-d or (rows,), like the ranges; None if the layer did not run in both passes of the watched step.
    """
    packed = site.owner or site
    ranges, gradients = packed.ranges, site.gradients
    if ranges is None or gradients is None or not packed.elements:
        return None
    if isinstance(ranges, FakeTensor) or isinstance(gradients, FakeTensor):
        return None
    of_rows = None if site.sample_gradients is None else site.sample_gradients.expected(ranges.device)
    if of_rows is None or of_rows.shape != ranges.shape:
        ranges, of_rows = ranges.sum(), gradients.sum()
    return site.factor * site.inside * ranges.double() * of_rows * (ranges.numel() / packed.elements)


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind the queued work of a device, or None for the host."""
    if device.type != "cuda":
        return None
    # Event.record() takes the current stream of the current device
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event
