"""The typer application, and functions that make options.

No other file imports typer.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from typer.main import get_command_from_info, get_group

from actbench import plugins
from actbench.cli.panels import panel_of
from actbench.errors import encodable, message_of, shortened
from actbench.units import COUNT_LIMIT, LONGEST_SECONDS

# The usage error of click, or of the copy of click inside newer versions of typer.
WrongUsage: Any = typer.BadParameter.__base__


@contextmanager
def _shortened() -> Iterator[None]:
    try:
        yield
    except WrongUsage as error:
        vars(error)["message"] = shortened(error.message)
        raise


_OWN = {
    "sweep": "sweep",
    "measure": "sweep",
    "report": "report",
    "compare": "report",
    "doctor": "doctor",
    "schemes": "listing",
    "models": "listing",
    "recipes": "listing",
    "devices": "listing",
}
"""The verbs of the frame itself, each with its file in this folder. Plug-ins bring the others."""


class _Verbs(typer.core.TyperGroup):
    """The verbs, each imported when it is asked for; it shortens messages about their flags."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = plugins.installed("commands")
        for name in others.keys() & _OWN:
            plugins.leave_out(others[name], "commands", "actbench has a command of that name itself")
        return sorted({*_OWN, *others}, key=lambda name: (float(getattr(_verb(name), "rank", math.inf)), name))

    def get_command(self, ctx: Any, name: str) -> Any:
        verb = _verb(name)
        return None if verb is None else _built(verb, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except WrongUsage as error:
            if close := difflib.get_close_matches(args[0], self.list_commands(ctx), n=1):
                vars(error)["message"] = f"{error.message} Did you mean {close[0]!r}?"
            raise

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _shortened():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _shortened():
            return super().invoke(ctx)


def _verb(name: str) -> typer.Typer | None:
    if name in _OWN:
        found: typer.Typer = getattr(importlib.import_module(f"actbench.cli.{_OWN[name]}"), name)
        return found
    return plugins.find_plugin("commands", name, typer.Typer)


def _built(verb: typer.Typer, name: str) -> Any:
    """Return the command of click behind a verb; None, with a warning, if a plug-in's object has none."""
    commands, is_group = verb.registered_commands, bool(verb.registered_groups or verb.registered_callback)
    try:
        if len(commands) == 1 and not is_group:
            markup = verb.rich_markup_mode
            found: Any = get_command_from_info(commands[0], pretty_exceptions_short=False, rich_markup_mode=markup)
        else:
            found = get_group(verb)
        why = None if commands or is_group else f"{plugins.installed('commands')[name].entry.value} has no command"
    except Exception as error:  # as of a type that typer makes no option of
        why = message_of(error)
    usual = getattr(verb, "usual", "").split()
    if why is None and name not in _OWN and (unknown := set(usual).difference(*(each.opts for each in found.params))):
        why = f"usual= names {', '.join(sorted(unknown))}, which is not an option of {name}"
    if why is not None:
        plugins.leave_out(plugins.installed("commands")[name], "commands", why)
        return None
    found.name, found.usual = name, usual
    return found


class _Verb(typer.core.TyperCommand):
    """A verb whose ``--help`` fits a screen: a sentence of it, of a few examples, and of the options most used."""

    usual: Sequence[str] = ()

    def get_params(self, ctx: Any) -> Any:
        found, option = super().get_params(ctx), self.get_help_option(ctx)
        if not self.usual or option is None:
            return found
        whole = copy.copy(option)  # of the kind that this version of typer makes
        vars(whole).update(name="help_all", opts=["--help-all"], callback=_show_all, help=_ALL_OPTIONS)
        return [*found, whole]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if not self.usual or ctx.meta.get(_ALL):
            super().format_help(ctx, formatter)
            return
        page = copy.copy(self)
        options: dict[str, Any] = {each.opts[0]: each for each in self.params if each.param_type_name == "option"}
        shown = [copy.copy(options[name]) for name in self.usual if name in options]  # an export may be left out
        for each in shown:
            sentence, period, _ = each.help.partition(". ")
            value = each.metavar or (None if each.is_flag else "VALUE")  # what typer writes of a type is wide
            vars(each).update(rich_help_panel=None, help=sentence + period.rstrip(), metavar=value)
        page.params = [*(each for each in self.params if each.param_type_name == "argument"), *shown]
        first, *others = (self.help or "").split("\n\n")
        start = next((place + 1 for place, text in enumerate(others) if text.startswith("Examples:")), len(others))
        page.help = "\n\n".join((first, *others[start - 1 : start + _EXAMPLES]))
        page.epilog = f"{len(options) - len(shown)} more options: **actbench {self.name} --help-all**"
        super(_Verb, page).format_help(ctx, formatter)


def _show_all(ctx: Any, _: Any, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_ALL = "actbench.help_all"
_ALL_OPTIONS = "Show all options and exit."
_EXAMPLES = 2


def command(
    *, rank: float = math.inf, usual: str = "", extras: Mapping[str, str] | None = None, **details: Any
) -> Callable[[Callable[..., None]], typer.Typer]:
    """Make a verb of a function for ``actbench.commands``.

    Args:
        rank: Its place on the help page, where the verbs that most people need have the least; equal ranks by name.
        usual: The options that ``--help`` shows, separated by blanks, where ``--help-all`` shows all; empty for all.
        extras: What the verb needs each extra for.
        details: As of typer's decorator.
    """

    def made(function: Callable[..., None]) -> typer.Typer:
        verb = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        verb.command(cls=_Verb, **details)(function)
        vars(verb).update(rank=rank, usual=usual, extras=extras or {})
        return verb

    return made


app = typer.Typer(
    name="actbench",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a training script on a card that need not be there; measure and compare schemes that save its memory.\n\n"
    "Start with one of these. **actbench run --device-profile rtx-4090 train.py** tells whether a script of your own "
    "fits, unchanged, and what holds the memory. **actbench measure resnet50 --scheme checkpoint** compares a scheme "
    "with the exact step. **actbench fit llama-3.2-1b --device-profile rtx-4090** plans which schemes to turn on. "
    "**actbench sweep** runs the quickstart recipe.\n\n"
    "Memory is measured, by the CUDA allocator or the CPU's, or simulated: the training step runs on fake tensors with "
    "the operators that the named device would choose. Times of simulated steps are estimated, and marked so.\n\n"
    "Options have defaults in **[tool.actbench]** of pyproject.toml and in the environment (ACTBENCH_DEVICE_PROFILE, "
    "or ACTBENCH_FIT_BUDGET for one command); **actbench doctor** shows them.",
)


def verbs_of(application: typer.Typer) -> dict[str, Any]:
    """Return the command of click behind each verb, without those that have verbs of their own."""
    whole: Any = get_group(application)
    found = {name: whole.get_command(None, name) for name in whole.list_commands(None)}
    return {name: verb for name, verb in found.items() if verb is not None and not hasattr(verb, "commands")}


BadParameter = typer.BadParameter
Exit = typer.Exit
Typer = typer.Typer
Context = typer.Context
LARGEST = COUNT_LIMIT - 1
STDOUT = Path("-")
echo = typer.echo


def named(text: str) -> str:
    """Return a name; refuse one that is empty or not UTF-8."""
    if not text.strip():
        raise typer.BadParameter("it is empty; leave it out, or name something")
    if encodable(text) != text:
        raise typer.BadParameter(f"{encodable(text)!r} is not UTF-8, which results are written in; rename it")
    return text


def one_of(text: str, allowed: Sequence[str]) -> str:
    """Return a name; refuse one that is not allowed."""
    if text not in allowed:
        raise typer.BadParameter(f"{encodable(text)!r} is not one of {', '.join(allowed)}")
    return text


def path_named(text: str | Path) -> Path:
    """Return a text as a path; refuse an empty one, which would be the current folder."""
    return Path(named(str(text)))


def argument(metavar: str, text: str, parser: Callable[[str], Any] | None = None, **details: Any) -> Any:
    """Return a positional argument for an ``Annotated`` type."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, parser=parser, **details)


def option(names: str, text: str, *, only_typed: bool = False, **details: Any) -> Any:
    """Return an option for an ``Annotated`` type.

    Args:
        names: Separated by blanks.
        text: For ``--help``.
        only_typed: Whether no settings file may set it: it names or trusts code or a host, or replaces what is stored.
        details: As of ``typer.Option``.
    """
    first, *others = names.split()
    made = typer.Option(first, *others, help=text, rich_help_panel=panel_of(first), **details)
    if only_typed:
        vars(made)[_ONLY_TYPED] = True
    return made


def only_typed(verb: Any) -> set[str]:
    """Return the parameters of a verb, as a command of click, that no settings file may set."""
    written = inspect.signature(verb.callback, eval_str=True).parameters.values()
    declared = {each.name: getattr(each.annotation, "__metadata__", ()) for each in written}
    return {name for name, details in declared.items() if any(_ONLY_TYPED in vars(each) for each in details)}


_ONLY_TYPED = "actbench_only_typed"


def count_option(
    names: str, text: str, *, least: int = 1, most: int = LARGEST, metavar: str = "N", **details: Any
) -> Any:
    """Return an option for a whole number from ``least`` to ``most``, the largest that a file may hold."""
    return option(names, text, metavar=metavar, parser=lambda given: _number(given, int, least, most), **details)


def whole_number(text: str) -> int:
    """Return a number from 1 to the largest that a file may hold; refuse any other text."""
    return int(_number(text, int, 1, LARGEST))


def seconds_option(names: str, text: str, *, least: float = 0) -> Any:
    """Return an option for a number of seconds, at least ``least``."""
    read = lambda given: _number(given, float, least, LONGEST_SECONDS)  # noqa: E731  (typer shows the name of a def)
    return option(names, text, metavar="SECONDS", parser=read)


def _number(given: Any, kind: type[int] | type[float], least: float, most: float) -> float:
    try:
        found = kind(given)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{encodable(str(given))!r} is not {_KINDS[kind]}") from None
    if not least <= found <= most:
        raise typer.BadParameter(
            f"{found} is more than {most:g}" if found >= least else f"{found} is not at least {least}"
        )
    return found


_KINDS = {int: "a whole number", float: "a number"}


def _checked(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before any work begins."""
    if path not in (None, STDOUT):
        from actbench.report.render.exports import check_writable

        check_writable(path)
    return path


def file_option(name: str, text: str) -> Any:
    """Return an option for a file to write, or standard output."""
    return option(
        name, f"{text} - is standard output.", only_typed=True, metavar="FILE", parser=path_named, callback=_checked
    )


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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, and of failed cases.")
    ] = False,
) -> None:
    """Options of every verb; the entry point reads ``--debug`` before any verb runs."""
