"""The body of a test on its card: what it needed, and why the test fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from actbench.errors import ActbenchError
from actbench.model.advice import PHASES
from actbench.model.measured import Measurement
from actbench.model.timeline import Kind
from actbench.report.advice import needed_bytes
from actbench.report.render import markdown
from actbench.tools.pytest.baseline import Reading
from actbench.tools.pytest.mark import MARK, Asked, asked_of
from actbench.tools.pytest.session import BEFORE, THRESHOLD, Threshold
from actbench.tools.script.answers.tables import script_tables
from actbench.tools.script.simulate import simulate
from actbench.units import format_bytes


@contextmanager
def on_card(item: pytest.Function) -> Iterator[None]:
    """Simulate the card of a test inside the block, in which its training loop ends by itself.

    The reading goes into the properties of the test's report, so that it comes from the processes of pytest-xdist, too.

    Raises:
        pytest.fail.Exception: The step does not fit, or needs more than in the last passing run; or no step ended, or
            no card can be simulated here.
    """
    with ExitStack() as stack:
        with _failing():
            asked = asked_of(item)
            card = stack.enter_context(
                simulate(
                    asked.profile.name,
                    memory_limit_bytes=asked.limit_bytes,
                    folder=item.config.rootpath,
                    script=item.path,
                    warns=False,
                )
            )
        yield
    with _failing():
        measured = card.measurement
    reading = _reading(asked, measured)
    item.user_properties.append((MARK, reading.model_dump_json()))
    before = item.config.stash.get(BEFORE, {}).get(item.nodeid)
    if why := list(_reasons(asked, measured, reading, before, item.config.stash.get(THRESHOLD, None))):
        more = [] if before is None else [reading.compared_with(before)]
        tables = [markdown(table) for table in script_tables(measured)]
        text = "\n".join([*why, *more, *measured.warnings, "", *tables])
        raise pytest.fail.Exception(text, pytrace=False) from None  # what ended the training loop is no news


@contextmanager
def _failing() -> Iterator[None]:
    """Fail the test with the message of an error, and without a traceback through actbench."""
    try:
        yield
    except ActbenchError as error:
        raise pytest.fail.Exception(f"{MARK}: {error}", pytrace=False) from None


def _reading(asked: Asked, measured: Measurement) -> Reading:
    timeline, limit = measured.timeline, measured.memory_limit_bytes
    assert timeline is not None
    assert limit is not None
    held: dict[Kind, int] = {}
    for holder in timeline.holders:
        if holder.kind != "host":
            held[holder.kind] = held.get(holder.kind, 0) + holder.held_bytes
    return Reading(
        device=asked.profile.name,
        peak_bytes=measured.peak_bytes,
        needed_bytes=needed_bytes(measured),
        limit_bytes=limit,
        mark="at most " if measured.at_most else "~" if measured.approximate else "",
        held_bytes=held,
    )


def _reasons(
    asked: Asked, measured: Measurement, reading: Reading, before: Reading | None, threshold: Threshold | None
) -> Iterator[str]:
    """Yield why a test fails, in sentences."""
    where = f" in the {PHASES[measured.peak_phase]}" if measured.peak_phase else ""
    gaps = reading.needed_bytes - reading.peak_bytes
    lost = f", and {format_bytes(gaps)} lost in gaps of torch's allocator" if gaps else ""
    if measured.over_limit_bytes:
        room = f'limit="{asked.limit}"' if asked.limit else f"the {format_bytes(reading.limit_bytes)} for a step"
        yield (
            f"{MARK}: the step does not fit into {room} on {reading.device}: {format_bytes(measured.over_limit_bytes)} "
            f"are missing. Its peak is {reading.peak}{where}{lost}."
        )
    change = None if before is None else reading.change(before)
    if threshold is not None and change is not None and change > threshold.share:
        yield f"{MARK}: the peak has grown by more than {threshold.text}: it is {reading.peak}{where}."
