"""Remarks on the figures of a simulated script: what its steps were, and what it needs outside of them."""

from __future__ import annotations

from collections.abc import Iterator

from actbench.tools.script.steps import Steps
from actbench.units import format_bytes


def about_steps(steps: Steps, began: int) -> Iterator[str]:
    """Yield remarks if no two steps are equal, or if one step ran alone.

    ``began`` is the number of the step that makes optimizer state.
    """
    steady = steps.steady(began)
    peaks = [each.peak_bytes for each in steady]
    if max(peaks) > 1.01 * min(peaks) and not steady[-1].is_like(steady[-2]):
        yield (
            f"no two steps in a row were alike: their peaks lie between {format_bytes(min(peaks))} and "
            f"{format_bytes(max(peaks))}; the largest of {len(peaks)} is shown, and --steps runs more"
        )
    if len(steps.done) <= began:
        yield (
            "no step began with the optimizer's state: a later step holds the state from its beginning, so its peak "
            "may be larger; let the script take three steps"
        )


def about_outside(steps: Steps, last_bytes: int, peak_bytes: int) -> Iterator[str]:
    """Yield a remark on memory that is needed outside of the step with this peak: before, or since the last step."""
    most_bytes = max(last_bytes, *(each.peak_bytes for each in steps.done))
    if most_bytes > 1.01 * peak_bytes:
        yield (
            f"the script needs {format_bytes(most_bytes)} outside of the steps that are shown: as it begins, or "
            "between steps; reserved memory includes it"
        )
