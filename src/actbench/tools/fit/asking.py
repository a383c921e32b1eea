"""The flags of fit that ask another question than which plan is fastest, and the way to its answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import option
from actbench.errors import UsageError

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
    if not 2 <= found <= 1 << 16:
        raise UsageError(f"--processes {text}: give a whole number from 2 to {1 << 16}")
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
            "Share the model out over N processes with a card each (fsdp, zero1, ddp, tp and tp around these), by the "
            "fastest of these ways; the batch size is that of one process. Repeat to find the fewest on which it fits.",
            metavar="N",
            parser=_processes,
            show_default=False,
        ),
    ] = None

    def check(
        self,
        *,
        measure: bool,
        device_profile: str | None,
        memory_limit: str | None,
        max_gradient_error: float | None,
        script: str | None,
        cluster: str | None,
    ) -> None:
        """Check flags beside each other.

        Raises:
            UsageError: Two questions, or flags that do not go with one.
        """
        asked = ["--" + each.name.replace("_", "-") for each in fields(self) if getattr(self, each.name)]
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)}: ask one at a time")
        if script is not None:
            others = {"--measure": measure, "--max-gradient-error": max_gradient_error, "--cluster": cluster}
            if given := [*asked, *(flag for flag, value in others.items() if value not in (None, False))]:
                raise UsageError(f"{' and '.join(given)}: not with --script, whose model and data are its own")
        if asked and measure:
            raise UsageError(f"--measure: not with {asked[0]}; measure the plan that it finds by 'actbench measure'")
        if asked and max_gradient_error is not None:
            raise UsageError(
                f"--max-gradient-error: not with {asked[0]}, which does not measure errors of the gradient"
            )
        if self.which_card and memory_limit is not None:
            raise UsageError("--memory-limit: not with --which-card, where each card has its own memory")
        if device_profile is None and not self.which_card:
            raise UsageError(
                "--device-profile: name the card that the step is to fit on, as rtx-4090; 'actbench devices' lists "
                "them, and --which-card finds one"
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
