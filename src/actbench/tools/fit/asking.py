"""The flags of fit that ask another question than which plan is fastest, and the way to its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import option
from actbench.errors import UsageError
from actbench.units import MOST_PROCESSES

if TYPE_CHECKING:
    from actbench.model.records import Case
    from actbench.tools.fit.fitting import Means
    from actbench.tools.fit.questions import Answer
    from actbench.tools.fit.records import Asked


def _processes(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        found = 0
    if not 2 <= found <= MOST_PROCESSES:
        raise UsageError(f"--processes {text}: give a whole number from 2 to {MOST_PROCESSES}")
    return found


@dataclass(frozen=True)
class QuestionFlags:
    """Flags: what is asked of a model and a card."""

    longest_sequence: Annotated[
        bool,
        option(
            "--longest-sequence",
            "Find the longest sequence with which a step fits, for each way of training; one token more is simulated, "
            "too.",
        ),
    ] = False
    largest_batch: Annotated[
        bool,
        option(
            "--largest-batch",
            "Find the largest batch that fits in one pass, without micro-batches; one row more is simulated, too.",
        ),
    ] = False
    which_card: Annotated[
        bool,
        option("--which-card", "List the cards on which a step fits, the smallest first, and how fast it is there."),
    ] = False

    processes: Annotated[
        list[int] | None,
        option(
            "--processes",
            "Train on N processes with a card each, by the fastest of fsdp, zero1, ddp, tp, and tp combined with one "
            "of these; the batch size is that of one process. Repeat to find the smallest N that fits.",
            metavar="N",
            parser=_processes,
            show_default=False,
        ),
    ] = None

    @property
    def asks(self) -> bool:
        """Whether anything is asked but which plan is fastest."""
        return self.longest_sequence or self.largest_batch or self.which_card or bool(self.processes)

    def check(self, device_profile: str | None) -> None:
        """Raise a UsageError if no card is named and none is looked for."""
        if device_profile is None and not self.which_card:
            raise UsageError(
                "--device-profile: name the card that the step is to fit on, such as rtx-4090; 'actbench devices' "
                "lists them, and --which-card finds one"
            )

    def answer(self, case: Case, asked: Asked, means: Means) -> Answer | None:
        """Return the answer; None if nothing is asked but which plan is fastest."""
        from actbench.tools.fit import questions

        if self.longest_sequence:
            return questions.largest(case, "sequence_length", asked, means)
        if self.largest_batch:
            return questions.largest(case, "batch_size", asked, means)
        if self.processes:
            return questions.over_processes(case, self.processes, asked, means)
        return questions.which_card(case, asked, means) if self.which_card else None
