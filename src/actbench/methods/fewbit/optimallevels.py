"""Best piecewise-constant approximation of a function under a weight, by dynamic programming and Newton's method.

The function is a derivative d, the weight w; borders b and levels s minimise ``E = sum_i int w (d - s_i)**2`` over the
pieces. At the optimum ``s_i`` is the weighted mean of d on its piece and each border, unless it stands on a jump, is
where d crosses the mean of its two levels. Few-Bit Backward (arXiv 2202.00441, section 3) states the same problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]

# ten nodes of Gauss and Legendre integrate polynomials up to degree 19 exactly
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(10)
_SAMPLES = 8192
_RESIDUAL = 1e-13


@dataclass(frozen=True)
class Segments:
    """A piecewise-constant function: ``levels[i]`` between ``borders[i - 1]`` and ``borders[i]``, with its error E."""

    borders: Array
    levels: Array
    error: float


def best_segments(d: Function, w: Function, domain: tuple[float, float], count: int, kinks: Array) -> Segments:
    """Return the best approximation of d under the weight w with ``count`` levels over a domain.

    If Newton's method fails (d is constant in places, or jumps where ``kinks`` names no kink), the result is the best
    cut at the edges of a fine grid.
    """
    inside = kinks[(kinks > domain[0]) & (kinks < domain[1])]
    grid = _grid(d, w, domain, min(8 * count, 1536) + 512, inside)
    moments = _moments(d, w, grid)
    cut = _cut(moments, count)
    h = 1e-9 * (1 + np.abs(inside))
    jumps = inside[np.abs(d(inside + h) - d(inside - h)) > 1e-6]  # there a border stays; on a bend it may move
    try:
        return _polish(d, w, grid, grid[cut], jumps)
    except (ArithmeticError, np.linalg.LinAlgError):
        return _on_grid(d, grid, moments, cut)


def _grid(d: Function, w: Function, domain: tuple[float, float], cells: int, kinks: Array) -> Array:
    """Return cell edges, denser where the borders of a fine optimum are: like the cube root of ``w d'**2``."""
    low, high = np.arcsinh(domain[0]), np.arcsinh(domain[1])  # functions bend near zero, whatever the domain
    x = np.sinh(np.linspace(low, high, _SAMPLES))
    x[0], x[-1] = domain
    width = np.diff(x)
    density = np.cbrt(w((x[1:] + x[:-1]) / 2) * (np.diff(d(x)) / width) ** 2) * width
    even = np.diff(np.arcsinh(x))
    share = 0.9 * density / max(density.sum(), 1e-300) + 0.1 * even / even.sum()
    place = np.concatenate([[0.0], np.cumsum(share)])
    edges = np.interp(np.linspace(0, place[-1], cells + 1), place, x)
    edges[0], edges[-1] = domain
    return np.unique(np.concatenate([edges, kinks]))


def _moments(d: Function, w: Function, edges: Array) -> Array:
    """Return ``int w``, ``int w d`` and ``int w d**2`` over each cell ``(3, cells)``."""
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    weight = w(x) * half * _NODE_WEIGHTS
    value = d(x)
    return np.stack([weight.sum(1), (weight * value).sum(1), (weight * value * value).sum(1)])


def _cut(moments: Array, count: int) -> NDArray[np.int64]:
    """Return the ``count - 1`` cell edges that cut the cells into the best segments, over all ways to cut."""
    W, F, Q = np.concatenate([np.zeros((3, 1)), np.cumsum(moments, 1)], 1)
    mass, first, second = (total[:, None] - total for total in (W, F, Q))  # [end, start]
    explained = np.divide(first * first, mass, out=np.zeros_like(mass), where=mass > 1e-12 * W[-1])
    cost = np.maximum(second - explained, 0)  # where the weight is next to nothing, differences of sums are noise
    cost[np.triu_indices_from(cost)] = np.inf  # a segment has at least one cell
    cost = cost.astype(np.float32)  # half the time for the same cut; the polishing runs in float64
    best = cost[:, 0].copy()
    total = np.empty_like(cost)
    cuts = []
    # one more segment each time: the best cost up to each edge, over all places of the last cut
    for _ in range(count - 1):
        np.add(cost, best, out=total)
        cuts.append(total.argmin(1))
        best = total[np.arange(len(total)), cuts[-1]]
    borders = [len(W) - 1]
    for cut in reversed(cuts):
        borders.append(int(cut[borders[-1]]))
    return np.array(borders[:0:-1], dtype=np.int64)


def _on_grid(d: Function, grid: Array, moments: Array, cut: NDArray[np.int64]) -> Segments:
    mass, first, second = np.add.reduceat(moments, np.concatenate([[0], cut]), axis=1)
    ends = np.concatenate([grid[:1], grid[cut], grid[-1:]])
    light = mass <= 1e-300  # hardly any value will take this level
    levels = np.where(light, d((ends[1:] + ends[:-1]) / 2), first / np.where(light, 1, mass))
    return Segments(grid[cut], levels, float(np.maximum(second - first * levels, 0).sum()))


def _polish(d: Function, w: Function, grid: Array, borders: Array, kinks: Array) -> Segments:
    """Move borders to where the conditions of an optimum hold, by Newton's method; those on a kink stay."""
    free = ~np.isin(borders, kinks)
    for _ in range(50):
        ends = np.concatenate([grid[:1], borders, grid[-1:]])
        edges = np.union1d(grid, borders)
        mass, first, second = np.add.reduceat(_moments(d, w, edges), np.searchsorted(edges, ends[:-1]), axis=1)
        if not (mass > 0).all():
            break
        levels = first / mass
        residual = (d(borders) - (levels[:-1] + levels[1:]) / 2)[free]
        if np.abs(residual).max(initial=0.0) < _RESIDUAL:
            return Segments(borders, levels, float((second - first * levels).sum()))
        step = np.zeros_like(borders)
        step[free] = np.linalg.solve(_jacobian(d, w, borders, levels, mass)[np.ix_(free, free)], residual)
        borders = _stepped(borders, step, grid)
    raise ArithmeticError(f"the search for the best {len(borders) + 1} levels did not converge to {_RESIDUAL:g}")


def _stepped(borders: Array, step: Array, grid: Array) -> Array:
    """Take the step, or as much of it as keeps the borders in order and in the domain."""
    for _ in range(40):
        moved = borders - step
        if (np.diff(np.concatenate([grid[:1], moved, grid[-1:]])) > 0).all():
            return moved
        step = step / 2
    return borders


def _jacobian(d: Function, w: Function, borders: Array, levels: Array, mass: Array) -> Array:
    """Return the derivatives of ``d(b_i) - (s_i + s_(i+1)) / 2`` with respect to the borders."""
    value, weight = d(borders), w(borders)
    by_end = weight * (value - levels[:-1]) / mass[:-1]  # of each level by the border at its end
    by_start = -weight * (value - levels[1:]) / mass[1:]
    h = 1e-5 * (1 + np.abs(borders))
    slope = (d(borders + h) - d(borders - h)) / (2 * h)
    beside = np.diag(by_end[1:], 1) + np.diag(by_start[:-1], -1)
    return np.asarray(np.diag(slope - (by_end + by_start) / 2) - beside / 2)
