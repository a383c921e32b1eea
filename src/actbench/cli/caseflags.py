"""The flags of the verbs that measure a grid of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from actbench.cli.app import count_option, option, seconds_option
from actbench.cli.flags import DeviceFlags, ModelFlags
from actbench.errors import UsageError
from actbench.model.records import Cache, Optimizer, TorchEra

if TYPE_CHECKING:
    from actbench.run.recipes import Recipe


_USUALLY_WRITTEN = 128
"""Tokens that --infer lets a model write, where --generate does not say it."""


@dataclass(frozen=True)
class CaseFlags(ModelFlags, DeviceFlags):
    """Flags: which schemes are applied to what, and how they are measured."""

    batch_size: Annotated[
        str | None,
        option(
            "--batch-size -b",
            "8, a list 8,16,32, or a range 8-512*2 or 8-64+8; of one process, under a scheme that spreads a model.",
            metavar="RANGE",
            show_default=False,
        ),
    ] = None
    sequence_length: Annotated[
        str | None,
        option(
            "--sequence-length --prompt",
            "Tokens per sample, or of a prompt (default 128): a number, or a list or range as of --batch-size.",
            metavar="RANGE",
            show_default=False,
        ),
    ] = None  # type: ignore[assignment]  # verbs of one case take one length
    no_exact: Annotated[
        bool, option("--no-exact", "Measure neither the unchanged model nor errors of gradients, which need it.")
    ] = False
    meter: Annotated[
        list[str] | None,
        option(
            "--meter -m",
            "simulated, cpu or cuda; repeat or separate by commas for several side by side. Default: cuda with a GPU, "
            "otherwise simulated.",
            metavar="METER",
        ),
    ] = None
    optimizer: Annotated[
        Optimizer | None,
        option(
            "--optimizer",
            "adamw, adamw-fused (the default of transformers' Trainer), adamw-loop, adam, adafactor, muon, sgd, "
            "sgd-momentum or sgd-nesterov; docs/optimizers.md has their bytes. Default: the one that file.py:function "
            "returns, or else adamw.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    infer: Annotated[
        bool,
        option(
            "--infer",
            "No training step: the model reads a prompt and writes --generate tokens (default 128), with a cache.",
        ),
    ] = False
    generate: Annotated[
        int | None,
        count_option(
            "--generate", "Tokens that the model writes after its prompt; implies --infer.", show_default=False
        ),
    ] = None
    cache: Annotated[
        Cache | None,
        option(
            "--cache",
            "Cache of keys and values: dynamic (default, grows by copies), static (whole from the start) or fp8.",
            show_default=False,
        ),
    ] = None
    torch_era: Annotated[
        TorchEra | None,
        option(
            "--torch-era",
            "Simulate a step of older torch, to compare with figures of its time: before 2.15 (2.14, 2.13, 2.11) "
            "workspaces of cuBLAS stayed through the step, before 2.0 (1.13) zero_grad kept gradients and optimizers "
            "looped, before 1.11 (1.10) softmax also saved its input. Default: the installed torch, with its variables "
            "such as TORCH_CUBLAS_WORKSPACE_CACHE.",
            show_default=False,
        ),
    ] = None
    no_workspaces: Annotated[
        bool, option("--no-workspaces", "Leave out what CUDA's libraries allocate for themselves in a simulated step.")
    ] = False
    steps: Annotated[int | None, count_option("--steps", "Least number of timed steps of a case.")] = None
    seconds: Annotated[float | None, seconds_option("--seconds", "Least seconds of timed steps of a case.")] = None

    @property
    def schemes(self) -> list[str]:
        """The schemes, as of :class:`SchemeFlags`.

        Raises:
            UsageError: ``exact`` is among them and --no-exact is given, or as for :class:`SchemeFlags`.
        """
        found = super().schemes
        if self.no_exact and "exact" in found:
            raise UsageError("--no-exact leaves out the scheme exact, and --scheme names it: take one of them")
        return found

    def recipe(
        self, make: Callable[..., Recipe], usual: tuple[Mapping[str, Any], Mapping[str, Any]], *, cumulative: bool
    ) -> Recipe:
        """Return the recipe that ``make`` makes of these flags, such as ``Recipe.from_flags``.

        ``usual`` has the fields of ``[workload]`` and of ``[measure]`` that the flags may replace.

        Raises:
            UsageError: A flag is wrong, or it concerns simulated steps alone and nothing is simulated.
        """
        workload, measure = {**usual[0], **self.workload}, {**usual[1], **self.measure}
        made = make(workload, measure, self.schemes, cumulative=cumulative, exact=not self.no_exact)
        of_simulations = {"--torch-era": self.torch_era, "--no-workspaces": self.no_workspaces}
        given = [name for name, value in of_simulations.items() if value]
        if given and "simulated" not in made.meters:
            raise UsageError(
                f"{' and '.join(given)} changes only a simulated step, and nothing is simulated here "
                f"(--meter {','.join(sorted(made.meters))}): add --meter simulated, or leave it out"
            )
        return made

    @property
    def workload(self) -> dict[str, Any]:
        """The given flags, by field of a recipe's ``[workload]``."""
        from actbench.run.recipes.sections import WorkloadGrid

        given = self.given(WorkloadGrid.model_fields) | ({"workspaces": False} if self.no_workspaces else {})
        return {"generate": _USUALLY_WRITTEN, **given} if self.infer else given

    @property
    def measure(self) -> dict[str, Any]:
        """The given flags, by field of a recipe's ``[measure]``."""
        meters = None if self.meter is None else [name.strip() for text in self.meter for name in text.split(",")]
        flags = {
            "meters": meters,
            "device_profile": self.device_profile,
            "memory_limit": self.memory_limit,
            "largest_batch": True if self.max_batch else None,
            "seed": self.seed,
            "min_steps": self.steps,
            "min_seconds": self.seconds,
        }
        if self.device_profile is None and {"simulated", "cpu"} == set(meters or ()):
            flags["device_profile"] = "cpu"  # so the simulation estimates the measured CPU
        return {name: value for name, value in flags.items() if value is not None}
