from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actbench.records import Case, Failure, Machine, Measurement, Record, Versions

MakeRecord = Callable[..., Record]


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Return a maker of records: fields of the case and of the measurement by name, the rest as for any machine."""

    def make(
        scheme: str = "exact",
        *,
        failure: str | None = None,
        machine: str = "box",
        dirty: bool = False,
        label: str | None = None,
        published: tuple[Any, ...] = (),
        **fields: Any,
    ) -> Record:
        case = {name: fields.pop(name) for name in Case.model_fields if name in fields}
        outcome: Measurement | Failure = Measurement(
            **{"weights_bytes": 400, "activation_bytes": 600, "peak_bytes": 1000, **fields}
        )
        if failure is not None:
            outcome = Failure(reason="out-of-memory", message=failure)
        return Record(
            recipe="made",
            case=Case(**{"model": "tiny", "batch_size": 8, "scheme": scheme, **case}),
            outcome=outcome,
            machine=Machine(name=machine, system="Linux", processor="a processor", cores=2, memory_bytes=8 * 1024**3),
            versions=Versions(actbench="0.1.0", python="3.11.9", torch="2.11.0", commit="0123456789", dirty=dirty),
            command="actbench sweep made",
            recorded_at="2026-01-02T03:04:05+00:00",
            label=label,
            published=published,
        )

    return make
