"""Records as tables read them: without what no table shows, which is most of a line and of a record's memory."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Failure


class _Skipped:
    """Marks a field of which nothing is made, whatever a line has there: it is an empty tuple."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # a list is refused before its items are looked at, and the default takes its place
        return core_schema.with_default_schema(core_schema.none_schema(), default=(), on_error="default")


_NotRead = Annotated[Any, _Skipped, Field(exclude=True)]


class TabledTime(EstimatedTime):
    """An estimated time without its operators."""

    by_operator: _NotRead = ()


class TabledMeasurement(Measurement):
    """A measurement without its places, blocks and trace."""

    sites: _NotRead = ()
    unreached: _NotRead = ()
    blocks: _NotRead = ()
    trace: _NotRead = ()
    estimated: TabledTime | None = None


class TabledRecord(MeasuredRecord):
    """A record of a sweep, as much of it as tables show."""

    outcome: Annotated[TabledMeasurement | Failure, Field(discriminator="kind")]
