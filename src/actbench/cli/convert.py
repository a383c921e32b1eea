from __future__ import annotations

from typing import Annotated

from actbench.cli.app import (
    AttentionOption,
    CsvOption,
    ForceOption,
    GeluBitsOption,
    ImageOption,
    JsonOption,
    LinearOption,
    MarkdownOption,
    ModelArgument,
    OutputOption,
    SchemeOption,
    SeedOption,
    SequenceOption,
    TaskOption,
    TrustOption,
    WeightsOption,
    app,
    option,
)


@app.command()
def convert(
    model: ModelArgument,
    scheme: SchemeOption = None,
    gelu_bits: GeluBitsOption = None,
    linear: LinearOption = None,
    output: OutputOption = None,
    dry_run: Annotated[bool, option("--dry-run", "Show what would be converted and write nothing.")] = False,
    force: ForceOption = False,
    task: TaskOption = "auto",
    batch_size: Annotated[int, option("--batch-size", "Batch for which bytes are shown.", min=1)] = 8,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    attention: AttentionOption = "sdpa",
    weights: WeightsOption = "auto",
    seed: SeedOption = 0,
    trust_remote_code: TrustOption = False,
    export_markdown: MarkdownOption = None,
    export_csv: CsvOption = None,
    export_json: JsonOption = None,
) -> None:
    """Convert a model: show each place that changes with the bytes it keeps before and after, and write the folder.

    The folder holds what save_pretrained writes, so a plain from_pretrained still loads the unconverted model, and
    actbench.json, with which actbench.load_converted brings the converted one back.

    Examples:

    actbench convert roberta-base --gelu-bits 3 --linear randomized:0.2

    actbench convert resnet50 --scheme checkpoint --dry-run

    actbench convert ./my-model --scheme fewbit:2+randomized:0.1 --output my-model-small
    """
