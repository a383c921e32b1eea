"""The flags of fit that say what has to fit on which card: a model, or a script."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from actbench.cli import completions
from actbench.cli.app import count_option, named, one_of, option
from actbench.cli.flags import StepFlags, device_option
from actbench.errors import UsageError
from actbench.model.declared import check_model
from actbench.model.records import Case, Optimizer
from actbench.model.scripts import Script
from actbench.units import parse_bytes

if TYPE_CHECKING:
    from actbench.tools.fit.records import Asked

ROWS = 8
"""Rows of a batch by default."""


def _optimizer(text: str) -> str:
    return one_of(text, get_args(Optimizer))


@dataclass(frozen=True)
class FitFlags(StepFlags):
    """Flags: what must fit, and on which card."""

    device_profile: Annotated[
        str | None,
        device_option(
            "The card, such as rtx-4090: a name that actbench devices lists with times, or a .toml file.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        count_option(
            "--batch-size -b",
            f"Rows of the batch of a step (default {ROWS}; a script's own).",
            metavar="ROWS",
            show_default=False,
        ),
    ] = None
    memory_limit: Annotated[
        str | None,
        option(
            "--memory-limit",
            "Memory that a step may use, such as 20GiB, taken as given (default: the card's without 0.5 GiB for its "
            "CUDA context).",
            metavar="SIZE",
        ),
    ] = None
    optimizer: Annotated[
        list[str] | None,
        option(
            "--optimizer",
            "As for measure; fit replaces it only with another implementation of the same optimizer. Repeat to name "
            "optimizers that may replace the first.",
            metavar="NAME",
            parser=_optimizer,
            autocompletion=completions.optimizers,
            show_default=False,
        ),
    ] = None
    script: Annotated[
        str | None,
        option(
            "--script",
            "Plan for a training script, in place of MODEL: as python takes it, with its arguments, in quotes. Its own "
            "lines set batch, types and optimizer.",
            only_typed=True,
            metavar='"FILE.py ARGS"',
            parser=named,
            show_default=False,
        ),
    ] = None

    def case(self, model: str | None, *, elsewhere: bool = False) -> Case:
        """Return the case of the exact step; ``elsewhere`` is that of :func:`check_model`.

        Raises:
            UsageError: A flag is wrong, or none says what has to fit.
            ModelError: There is no such model.
        """
        limit = {} if self.memory_limit is None else {"memory_limit_bytes": parse_bytes(self.memory_limit)}
        if self.script is not None:
            return self._of_script(self.script, limit)
        if model is None:
            raise UsageError("name the MODEL that is to fit, such as llama-3.2-1b, or a training script by --script")
        check_model(model, elsewhere=elsewhere)
        given = {"batch_size": ROWS, **self.given(set(Case.model_fields) - {"optimizer", "script"})}
        return Case(**{**given, **limit, "model": model, "optimizer": self._optimizers[0]})

    def _of_script(self, text: str, limit: dict[str, Any]) -> Case:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--script {text}: {error}".lower()) from None
        is_module = words[0] == "-m"
        target, *arguments = words[is_module:] or [""]
        if not target:
            raise UsageError(f"--script {text}: name the module behind -m")
        script = Script(target=target, is_module=is_module, arguments=tuple(arguments), batch_size=self.batch_size)
        also = {} if self.seed is None else {"seed": self.seed}
        return Case(
            model=script.text,
            script=script,
            batch_size=self.batch_size or 1,
            device_profile=self.device_profile,
            gradient_quality=False,
            **limit,
            **also,
        )

    def asked(self, **more: Any) -> Asked:
        """Return the request, with ``more`` of its fields."""
        from actbench.tools.fit.records import Asked

        optimizer, others = self._optimizers
        return Asked(optimizer=optimizer, others=others, **more)

    @property
    def _optimizers(self) -> tuple[str | None, tuple[str, ...]]:
        """The optimizer of the exact step, and those that may replace it."""
        chosen = self.optimizer or []
        return (chosen[0], tuple(chosen[1:])) if chosen else (None, ())
