"""The typer application and the options that several verbs share; the only file that imports typer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from actbench.counts import COUNT_LIMIT, LONGEST_SECONDS
from actbench.errors import encodable, shortened
from actbench.records import Attention, FloatType, Optimizer, Task, WeightsChoice

# What click, or the copy of it that newer versions of typer carry, calls a usage error.
_WrongUsage: Any = typer.BadParameter.__base__


@contextmanager
def _shortened() -> Iterator[None]:
    try:
        yield
    except _WrongUsage as error:
        vars(error)["message"] = shortened(error.message)
        raise


class _Verbs(typer.core.TyperGroup):
    """The verbs; what a message about their flags repeats is shortened."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the flags before the verb."""
        with _shortened():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Read the flags of the verb that was asked for, and run it."""
        with _shortened():
            return super().invoke(ctx)


app = typer.Typer(
    name="actbench",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Convert, measure and compare schemes that save activation memory in training.\n\n"
    "Every number that actbench prints was measured: by the CUDA allocator, by the CPU allocator, or by running "
    "the training step on fake tensors with the operators that the named device would choose.\n\n"
    "Start with **actbench sweep**, which runs the quickstart recipe, or **actbench measure resnet50 --scheme "
    "checkpoint**.",
)

Exit = typer.Exit
LARGEST = COUNT_LIMIT - 1
echo = typer.echo


def named(text: str) -> str:
    """Return what names something, which is never nothing and can be written down."""
    if not text.strip():
        raise typer.BadParameter("it is empty; leave it out, or name something")
    if encodable(text) != text:
        raise typer.BadParameter(f"{encodable(text)!r} is not UTF-8, which results are written in; rename it")
    return text


def path_named(text: str | Path) -> Path:
    """Return the path of a text; that of an empty one would be the current folder."""
    return Path(named(str(text)))


def argument(metavar: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return a positional argument for an ``Annotated`` type."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, parser=parser)


def option(name: str, text: str, **details: Any) -> Any:
    """Return an option for an ``Annotated`` type."""
    return typer.Option(name, help=text, **details)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=named,
        help="roberta-base, resnet50, torchvision:NAME, hf:ORG/NAME, NAME@key=value (a changed configuration), a "
        "local folder, or file.py:function.",
    ),
]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        "-s",
        metavar="SPEC",
        help="NAME[:VALUE][,key=value…], joined by +: fewbit:3, randomized:0.2, fewbit:3+checkpoint. Repeat for "
        "several rows. 'actbench schemes' lists them.",
    ),
]
GeluBitsOption = Annotated[
    str | None,
    typer.Option("--gelu-bits", metavar="BITS", help="Short for the scheme fewbit:BITS,functions=gelu (1 to 8)."),
]
ActivationBitsOption = Annotated[
    str | None,
    typer.Option("--activation-bits", metavar="BITS", help="Short for the scheme fewbit:BITS, for all activations."),
]
LinearOption = Annotated[
    str | None,
    typer.Option("--linear", metavar="SPEC", help="Scheme for linear layers, such as randomized:0.2."),
]
TaskOption = Annotated[
    Task | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help="masked-lm, causal-lm, seq2seq-lm, sequence-, token- or image-classification, semantic-segmentation, "
        "object-detection, speech-seq2seq and others (docs/models.md); auto (the default) is what the model's config "
        "names.",
    ),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch-size",
        "-b",
        metavar="RANGE",
        help="8, a list 8,16,32, or a range 8-512*2 or 8-64+8.",
        show_default=False,
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option("--sequence-length", min=1, max=LARGEST, help="Tokens per sample (default 128).", show_default=False),
]
ImageOption = Annotated[
    int | None, typer.Option("--image-size", min=1, max=LARGEST, help="Height and width of images.", show_default=False)
]
AttentionOption = Annotated[
    Attention | None, typer.Option("--attention", help="Attention implementation of Hugging Face models.")
]
DtypeOption = Annotated[
    FloatType | None,
    typer.Option(
        "--dtype",
        help="Type of the weights and inputs. Without it file.py:function, a folder or a hub model keeps the types "
        "that it comes with; any other model is float32.",
        show_default=False,
    ),
]
AutocastOption = Annotated[
    str | None, typer.Option("--autocast", metavar="TYPE", help="bfloat16 or float16: train under torch.autocast.")
]
OptimizerOption = Annotated[
    Optimizer | None,
    typer.Option(
        "--optimizer",
        help="Optimizer of the training step. Without it the one that file.py:function returns, or else adamw.",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    WeightsChoice | None,
    typer.Option(
        "--weights",
        help="auto takes the cache or the hub and, when neither answers within seconds, random weights with a "
        "warning; random never asks the network.",
    ),
]
MeterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--meter",
        "-m",
        metavar="METER",
        help="simulated, cpu or cuda; repeat or separate by commas for several side by side. Default: cuda with a "
        "GPU, otherwise simulated.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--device-profile", metavar="NAME", help="Device that the simulated meter stands for (default cuda-16gib)."
    ),
]
MemoryLimitOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", help="Memory a step may use, such as 16GiB; stands for a smaller card."
    ),
]
MaxBatchOption = Annotated[
    bool, typer.Option("--max-batch", help="Find the largest batch that fits, and prove that the next one does not.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, max=LARGEST, help="Seed of weights, data and sketches.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, max=LARGEST, help="Timed steps of a case, at least.")
]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", min=0, max=LONGEST_SECONDS, help="Seconds of timed steps of a case, at least."),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, max=LARGEST, help="Simulated cases that run at a time (default: one a core)."),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=1,
        max=LONGEST_SECONDS,
        help="Seconds after which each case, and each trial of --max-batch, is stopped.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Measure again what the results file already holds.")]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Measure again the rows of that file that failed.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with a hub model.")
]
TrustRecipeOption = Annotated[
    bool,
    typer.Option(
        "--trust-recipe",
        help="Run the code that a recipe file names: file.py:function, or that of hub models.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="PATH", parser=path_named, help="Folder or file to write to.", show_default=False
    ),
]


def _checked(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path is not None:
        from actbench.render.exports import check

        check(path)
    return path


def _file_option(name: str, text: str) -> Any:
    return option(name, text, metavar="FILE", parser=path_named, callback=_checked)


MarkdownOption = Annotated[Path | None, _file_option("--export-markdown", "Write the table as Markdown.")]
CsvOption = Annotated[
    Path | None, _file_option("--export-csv", "Write the table as CSV, numbers in full and without units.")
]
JsonOption = Annotated[Path | None, _file_option("--export-json", "Write the records as JSON.")]
HtmlOption = Annotated[Path | None, _file_option("--export-html", "Write the table as HTML.")]


def _show_version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        echo(f"actbench {importlib.metadata.version('actbench')}")
        raise Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every verb; ``--debug`` is acted on by the entry point, before any verb runs."""
