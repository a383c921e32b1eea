"""What progress says of a case and of its outcome."""

from __future__ import annotations

from actbench.experiments.runner.pace import Paces
from actbench.results.measured import Measurement, Outcome
from actbench.results.modelspecs import optimizer_for
from actbench.results.records import Case, Failure
from actbench.results.runs import Trained, TrainingCase
from actbench.units import format_bytes

AnyCase = Case | TrainingCase
AnyOutcome = Outcome | Trained


def paces() -> Paces[AnyCase]:
    """Return paces of cases by their meter, of which simulated ones are searched while they are measured."""
    return Paces(
        lambda case: case.meter if isinstance(case, Case) else type(case),
        lambda case: isinstance(case, Case) and case.find_largest_batch and case.meter != "simulated",
    )


def fits_text(fits: bool) -> str:
    """Return what a trial of a batch found."""
    return "fits" if fits else "does not fit"


def cells(case: AnyCase) -> dict[str, str]:
    """Return what tells a case from others, by heading."""
    device = case.meter if isinstance(case, Case) else case.device
    return {"model": case.model, "scheme": changed(case), "batch": _batch(case), "meter": device}


def _batch(case: Case | TrainingCase) -> str:
    rows = case.rows if isinstance(case, Case) else case.batch_size
    return "" if rows is None else str(rows)


def name_of(case: AnyCase) -> str:
    """Return the name of a case, with its optimizer if it is not the usual one."""
    return case.model_copy(update={"scheme": changed(case)}).name if isinstance(case, Case) else case.name


def changed(case: Case | TrainingCase) -> str:
    """Return the scheme of a case, with its optimizer if it is not the usual one."""
    usual = isinstance(case, TrainingCase) or case.script or case.optimizer == optimizer_for(case.model)
    return case.scheme if usual else f"{case.scheme}, {case.optimizer}"


def ending(outcome: AnyOutcome) -> str:
    """Return how a case ended."""
    if isinstance(outcome, Failure):
        return f"failed, {outcome.reason}"  # the message stands below the table
    if isinstance(outcome, Measurement):
        largest = "" if outcome.largest_batch is None else f", largest batch {outcome.largest_batch}"
        over = f", over the limit by {format_bytes(outcome.over_limit_bytes)}" if outcome.over_limit_bytes else ""
        return f"peak {format_bytes(outcome.peak_bytes)}{over}{largest}"
    accuracy = outcome.final.accuracy
    score = f"correlation {outcome.score:.3f}" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
    diverged = "" if outcome.diverged_at is None else f", diverged at step {outcome.diverged_at}"
    return f"{score}, loss {outcome.final.loss:.4g}{diverged}"
