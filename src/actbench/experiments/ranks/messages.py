"""What the first of the launched processes and the others tell each other, in JSON over a socket between the two."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from actbench.experiments.runner.member import Question, Report
from actbench.results.records import Data


class Hello(Data):
    """What a process says of itself when it comes.

    Attributes:
        host: Name of its machine, for messages.
        versions: Of actbench, with a digest of its files, and of torch: all processes must have the same.
    """

    rank: int
    local_rank: int
    host: str
    versions: str


class Begin(Data):
    """Be ready to start the processes of cases, in place of those that were started before."""

    kind: Literal["begin"] = "begin"
    bench: str
    preload: tuple[str, ...]


class Open(Data):
    """Start a process, which is called by a number from now on."""

    kind: Literal["open"] = "open"
    number: int


class Ask(Data):
    """Ask a process; the answer is a :class:`Told`."""

    kind: Literal["ask"] = "ask"
    number: int
    question: Question


class End(Data):
    """Let a process end by itself, or kill it; answered by :class:`Ended` when it is gone."""

    kind: Literal["end"] = "end"
    number: int
    killed: bool = False


class Told(Data):
    """What came of a question."""

    kind: Literal["told"] = "told"
    number: int
    report: Report


class Ended(Data):
    """A process is gone."""

    kind: Literal["ended"] = "ended"
    number: int


ORDERS: TypeAdapter[Begin | Open | Ask | End] = TypeAdapter(
    Annotated[Begin | Open | Ask | End, Field(discriminator="kind")]
)
NEWS: TypeAdapter[Told | Ended] = TypeAdapter(Annotated[Told | Ended, Field(discriminator="kind")])
