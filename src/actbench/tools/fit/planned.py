"""``actbench.fit``: plans for a model on a card, from Python."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from actbench.display import Displayed
from actbench.errors import UsageError, check_argument
from actbench.keywords import check_keywords
from actbench.model.declared import check_model, device_named
from actbench.model.gradient import Gradient
from actbench.model.measured import Measurement
from actbench.model.records import Case, Optimizer
from actbench.report.tables import Table
from actbench.scheme import apply
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import convert
from actbench.tools.fit.budgets import BUDGET_SECONDS
from actbench.tools.fit.fit import fit as find
from actbench.tools.fit.fitting import Means
from actbench.tools.fit.records import Asked, Training, Tried
from actbench.tools.fit.shortlist import Fitted
from actbench.tools.fit.tables import FIT_TITLE, tables_of
from actbench.units import format_bytes, parse_bytes
from actbench.validation import explain


@dataclass(frozen=True, repr=False)
class PlannedStep:
    """A plan that was simulated whole, compared with the exact step.

    Attributes:
        spec: The specification of its schemes, for :func:`actbench.apply`, :func:`actbench.convert` and the commands;
            ``exact`` if there are none.
        optimizer: The optimizer that it was simulated with; None is the model's own.
        need_bytes: Bytes of the device that it needs, with those that the allocator loses between blocks.
        peak_bytes: The most bytes that are allocated at once.
        seconds: Estimated time of a step.
        slowdown: That over the exact step's.
        training: How training differs from the exact step's: gradient, updates, precision, trained parameters.
        measurement: All that the simulation found.
    """

    spec: str
    optimizer: Optimizer | None
    need_bytes: int
    peak_bytes: int
    seconds: float
    slowdown: float
    training: Training
    measurement: Measurement

    @property
    def gradient(self) -> Gradient:
        """What the schemes declare about the gradient."""
        return self.training.gradient

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return a training setup with the plan's schemes; its model is changed in place.

        The optimizer is made by the setup's own ``make_optimizer``: where :attr:`optimizer` names another one, such as
        ``adamw-fused``, let it make that.

        Raises:
            As of :func:`actbench.apply`.
        """
        return setup if self.spec == "exact" else apply(setup, self.spec)

    def convert(self, model: nn.Module) -> nn.Module:
        """Return a model with the plan's schemes, changed in place.

        Raises:
            As of :func:`actbench.convert`: a ConversionError also for schemes of the whole step, such as micro-batches
            and packed optimizer state, which need :meth:`apply`.
        """
        return model if self.spec == "exact" else convert(model, self.spec)

    def __repr__(self) -> str:
        """Return the schemes, with what a step needs and how long it takes."""
        return f"<PlannedStep {self.spec}: {format_bytes(self.need_bytes)}, {self.slowdown:.2f}x the exact step's time>"


@dataclass(frozen=True, repr=False)
class FitResult(Displayed):
    """What a fit found.

    Attributes:
        plans: The fastest plan that fits for each way of training, the fastest first, then those with adapters; empty
            if nothing fits within the allowed slowdown.
        exact: The exact step.
        limit_bytes: Memory that a step may use.
        least: What needs least of all that was simulated.
        is_over: Whether the time ended before all plans were simulated.
        crashed: Why simulations crashed, each with the scheme before it; if there are any, plans may be missing.
        path: The results file, if one is kept.
    """

    plans: tuple[PlannedStep, ...]
    exact: PlannedStep
    limit_bytes: int
    least: PlannedStep
    is_over: bool
    crashed: tuple[str, ...]
    path: Path | None
    _found: Fitted

    @property
    def fits(self) -> bool:
        """Whether some plan fits and is fast enough."""
        return bool(self.plans)

    def __repr__(self) -> str:
        """Return the fastest plan; where nothing fits, what needs least."""
        found = f"{len(self.plans)} plans, the fastest {self.plans[0]}" if self.plans else f"nothing fits, {self.least}"
        return f"<FitResult for {format_bytes(self.limit_bytes)}: {found}>"

    def drawn(self) -> list[Table]:
        """Return what a notebook shows: the table of plans."""
        return list(tables_of(self._found, FIT_TITLE))[:1]

    def frontier(self, *, exact: bool = True) -> tuple[PlannedStep, ...]:
        """Return the plans that no other undercuts in both bytes and time, the fastest first.

        Args:
            exact: Whether gradients must be exact; updates, precision and trained parameters are those of the exact
                step in any case.
        """
        return tuple(map(_planned, self._found.frontier(exact=exact)))


def fit(
    model: str,
    *,
    device_profile: str,
    batch_size: int = 8,
    sequence_length: int | None = None,
    memory_limit: str | int | None = None,
    max_slowdown: float = 2.0,
    exact: bool = False,
    optimizer: Optimizer | None = None,
    schemes: Sequence[str] | None = None,
    output: Path | str | None = None,
    jobs: int | None = None,
    budget_seconds: float | None = BUDGET_SECONDS,
    **case: Any,
) -> FitResult:
    """Plan what to do with each block of a model so that a step fits on a card and is as fast as it can be.

    Nothing is allocated, and the card is not needed: steps are simulated, in processes of their own. For example::

        found = actbench.fit("llama-3.1-8b", device_profile="rtx-4090", batch_size=1, sequence_length=2048)
        plan = found.plans[0]
        print(plan.spec, plan.need_bytes, plan.slowdown, plan.gradient)

        setup = actbench.TrainingSetup(model, loss=loss, make_optimizer=lambda model: AdamW(model.parameters()))
        step = actbench.TrainStep(plan.apply(setup))

    Args:
        model: As on the command line: a known name, ``hf:ORG/NAME``, a local folder, or ``file.py:function``, which
            names the user's own function.
        device_profile: A card that ``actbench devices`` lists with times, or a ``.toml`` file.
        batch_size: Rows of the batch of a step.
        sequence_length: Tokens per sample.
        memory_limit: Memory that a step may use, in bytes or as ``"20GiB"``; unless given, what a CUDA context leaves
            of the card.
        max_slowdown: The most that a plan may take, in multiples of the exact step's estimated time.
        exact: Whether training must equal the exact step's, to rounding.
        optimizer: The exact step's; None is the model's own, or else AdamW.
        schemes: Specifications to choose among, in place of what the schemes say is worth trying.
        output: A folder or ``.jsonl`` file for the simulations, from which a later call goes on; None keeps none.
        jobs: How many cases are simulated at a time; one a core unless given.
        budget_seconds: Seconds after which nothing new is simulated; None sets no limit.
        case: Other fields of :class:`actbench.Case`: ``dtype``, ``autocast``, ``image_size``, ``attention``, ``task``,
            ``scheme`` (what every plan has, such as ``"lora:16"``), ``seed`` and so on.

    Raises:
        UsageError: The device profile does not exist or has no figures of time, a keyword does not exist, or a value
            cannot be.
        SpecError: A scheme does not exist.
        ModelError: The model does not exist.
        MeasurementError: Not even the exact step can be simulated.
        StoreError: The results file is in use, broken or cannot be written.
    """
    own = [name for name in inspect.signature(fit).parameters if name != "case"]
    check_keywords("actbench.fit", case, [*own, *Case.model_fields])
    check_argument(device_profile, str, "fit: device_profile", "the name of a device, or a .toml file")
    check_argument(model, str, "fit", "the specification of a model, such as 'gpt2'")
    device_profile = device_named(device_profile)
    check_model(model)
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    said = {"sequence_length": sequence_length, "memory_limit_bytes": limit, "optimizer": optimizer, **case}
    given = {name: value for name, value in said.items() if value is not None}
    try:
        step = Case.model_validate(
            {"model": model, "device_profile": device_profile, "batch_size": batch_size, **given}
        )
        asked = Asked(max_slowdown=max_slowdown, exact=exact, optimizer=optimizer)
    except ValidationError as error:
        raise UsageError(f"actbench.fit: {'; '.join(explain(error, given, {'': Case}))}") from None
    means = Means(None if output is None else Path(output), schemes=schemes, jobs=jobs, budget_seconds=budget_seconds)
    result = find(step, asked, means)
    found = result.found
    fitting = [*found.shortlist(), *found.shortlist(adapters=True)]
    return FitResult(
        tuple(map(_planned, fitting)),
        _planned(found.exact),
        found.limit_bytes,
        _planned(found.least),
        bool(result.cut_short),
        tuple(f"{case.scheme}: {failure.message}" for case, failure in result.crashed.items()),
        result.path,
        found,
    )


def _planned(tried: Tried) -> PlannedStep:
    case, measured = tried.record.case, tried.measured
    return PlannedStep(
        case.scheme,
        case.optimizer,
        tried.need_bytes,
        measured.peak_bytes,
        tried.seconds,
        tried.slowdown,
        tried.training,
        measured,
    )
