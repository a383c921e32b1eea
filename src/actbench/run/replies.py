"""What the process of a case replies, in JSON: news first, and then the answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from actbench.model.data import Data
from actbench.model.live import LiveMemory
from actbench.model.measured import Measurement
from actbench.model.records import Failure


class Seconds(Data):
    """Seconds of each step of one round; None where the meter has no clock."""

    kind: Literal["timed"] = "timed"
    steps: tuple[float, ...] | None


class Lost(Data):
    """The case goes no further here, because the process of another rank ended or does not answer."""

    kind: Literal["lost"] = "lost"
    message: str


class Tried(Data):
    """News, before the answer, of a trial of a simulated search for the largest batch."""

    kind: Literal["tried"] = "tried"
    batch_size: int
    fits: bool


class Said(Data):
    """News, before the answer, that the user should know."""

    kind: Literal["said"] = "said"
    text: str


AnyReply = Measurement | Failure | Seconds | Lost | Tried | Said | LiveMemory
NEWS = ("tried", "said", "live")
"""Kinds of replies after which the answer is still to come."""

Reply = Annotated[AnyReply, Field(discriminator="kind")]
REPLIES: TypeAdapter[AnyReply] = TypeAdapter(Reply)
