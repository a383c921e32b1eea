from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from actbench.cli.app import (
    ActivationBitsOption,
    AttentionOption,
    AutocastOption,
    BatchOption,
    CsvOption,
    DtypeOption,
    ForceOption,
    GeluBitsOption,
    HtmlOption,
    ImageOption,
    JobsOption,
    JsonOption,
    LinearOption,
    MarkdownOption,
    MaxBatchOption,
    MemoryLimitOption,
    MeterOption,
    ModelArgument,
    OptimizerOption,
    OutputOption,
    ProfileOption,
    SchemeOption,
    SecondsOption,
    SeedOption,
    SequenceOption,
    StepsOption,
    TaskOption,
    TimeoutOption,
    TrustOption,
    WeightsOption,
    app,
    argument,
)
from actbench.cli.flags import composed, default_meter, measure_flags, workload_flags
from actbench.cli.printing import export_results, finish, run_shown
from actbench.errors import RecipeError, SpecError

RecipeOrModel = Annotated[
    str | None,
    argument("[RECIPE|MODEL]", "A recipe's name or .toml file, or a model; without it, the recipe quickstart."),
]


@app.command()
def sweep(
    target: RecipeOrModel = None,
    scheme: SchemeOption = None,
    gelu_bits: GeluBitsOption = None,
    activation_bits: ActivationBitsOption = None,
    linear: LinearOption = None,
    batch_size: BatchOption = None,
    max_batch: MaxBatchOption = False,
    memory_limit: MemoryLimitOption = None,
    meter: MeterOption = None,
    device_profile: ProfileOption = None,
    task: TaskOption = None,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    attention: AttentionOption = None,
    dtype: DtypeOption = None,
    autocast: AutocastOption = None,
    optimizer: OptimizerOption = None,
    weights: WeightsOption = None,
    trust_remote_code: TrustOption = False,
    seed: SeedOption = None,
    steps: StepsOption = None,
    seconds: SecondsOption = None,
    jobs: JobsOption = None,
    timeout: TimeoutOption = 1800.0,
    force: ForceOption = False,
    output: OutputOption = Path("results"),
    export_markdown: MarkdownOption = None,
    export_csv: CsvOption = None,
    export_json: JsonOption = None,
    export_html: HtmlOption = None,
) -> None:
    """Measure a grid of models, batch sizes and schemes, and print the comparison.

    Each case runs in a process of its own, and its row is stored as soon as it ends, in
    OUTPUT/RECIPE/MACHINE.jsonl, with the tables beside it. Run the same command again and it goes on where it was
    stopped. A case that runs out of memory, takes too long or crashes is a row with the reason.

    Exit status: 0 all cases measured, 1 some case failed, 2 wrong usage.

    Examples:

    actbench sweep

    actbench sweep resnet50 --scheme checkpoint --scheme offload --batch-size 32-256*2

    actbench sweep roberta-base -s fewbit:3 -s randomized:0.2 --max-batch --memory-limit 16GiB

    actbench sweep mine.toml --meter cuda --export-markdown table.md
    """
    workload = workload_flags(locals())
    measure = measure_flags(locals())
    recipe = _recipe(target or "quickstart", workload, measure, composed(scheme, gelu_bits, linear, activation_bits))
    try:
        comparison = run_shown(recipe, output, jobs=jobs, timeout=timeout, force=force)
    except SpecError as error:
        raise RecipeError(f"{recipe.name if target is None else target}: {error}") from None
    export_results(comparison.records, recipe.title, export_markdown, export_csv, export_json, export_html)
    finish(comparison, recipe.title)


@app.command()
def measure(
    model: ModelArgument,
    scheme: SchemeOption = None,
    gelu_bits: GeluBitsOption = None,
    activation_bits: ActivationBitsOption = None,
    linear: LinearOption = None,
    batch_size: BatchOption = None,
    max_batch: MaxBatchOption = False,
    memory_limit: MemoryLimitOption = None,
    meter: MeterOption = None,
    device_profile: ProfileOption = None,
    task: TaskOption = None,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    attention: AttentionOption = None,
    dtype: DtypeOption = None,
    autocast: AutocastOption = None,
    optimizer: OptimizerOption = None,
    weights: WeightsOption = None,
    trust_remote_code: TrustOption = False,
    seed: SeedOption = None,
    steps: StepsOption = None,
    seconds: SecondsOption = None,
    timeout: TimeoutOption = 1800.0,
    output: OutputOption = None,
    export_markdown: MarkdownOption = None,
    export_csv: CsvOption = None,
    export_json: JsonOption = None,
    export_html: HtmlOption = None,
) -> None:
    """Measure one model with a scheme beside the exact model.

    Nothing is stored unless --output names a folder or a .jsonl file. Exit status as for sweep.

    Examples:

    actbench measure roberta-base --scheme fewbit:3 --batch-size 32

    actbench measure resnet50 -s checkpoint --meter cpu --batch-size 4 --image-size 128

    actbench measure train.py:build -s randomized:0.2
    """
    from actbench.recipe import Recipe

    flags = {"batch_size": _default_batch(max_batch), **workload_flags(locals()), "model": model}
    chosen = {"meters": [default_meter()], **measure_flags(locals())}
    recipe = Recipe.from_flags(flags, chosen, composed(scheme, gelu_bits, linear, activation_bits))
    comparison = run_shown(recipe, output, jobs=None, timeout=timeout, force=True)
    export_results(comparison.records, recipe.title, export_markdown, export_csv, export_json, export_html)
    finish(comparison, recipe.title)


def _recipe(target: str, workload: dict[str, Any], measure: dict[str, Any], schemes: list[str]) -> Any:
    """Return the recipe that a target names, with the flags in place of what it says."""
    from actbench import recipe

    if target in recipe.names() or target.endswith(".toml"):
        return recipe.load(target).with_flags(workload, measure, schemes)
    batch_size = _default_batch("largest_batch" in measure)
    measure = {"meters": [default_meter()], **measure}
    return recipe.Recipe.from_flags({"batch_size": batch_size, **workload, "model": target}, measure, schemes)


def _default_batch(max_batch: bool) -> str:
    """Return the batch of a model without --batch-size; the search for the largest one starts where most fit."""
    return "1" if max_batch else "8"
