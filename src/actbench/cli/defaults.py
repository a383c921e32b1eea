"""Defaults of options: from ``[tool.actbench]`` of the current folder's ``pyproject.toml``, and from the environment.

They are put before the options that a user types, which replace them; so the commands in records name them.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from actbench import plugins
from actbench.cli.app import WrongUsage, app, only_typed, verbs_of
from actbench.cli.conflicts import conflicting_options
from actbench.errors import UsageError, encodable
from actbench.model.namedcode import named_code
from actbench.paths import MOST_BYTES, read_bytes, read_toml

FILE: Final = Path("pyproject.toml")
PREFIX: Final = "ACTBENCH_"
_OF_OTHERS: Final = ("ACTBENCH_DATA", plugins.TOLD_BY)  # the folder of data sets, and what processes tell each other
_NEVER: Final = ("help", "version", "debug")


@dataclass(frozen=True)
class Default:
    """A value that an option has if it is not typed.

    Attributes:
        name: The option without its dashes, such as ``device-profile``.
        verb: The verb of the option; None for every verb that has it.
        value: As it was written; empty text, of a variable, for none.
        place: Where it was written.
        in_file: Whether a file has it.
    """

    name: str
    verb: str | None
    value: Any
    place: str
    in_file: bool


@dataclass
class Defaults:
    """All defaults, the strongest first, and what is wrong with those that are left out."""

    found: list[Default] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Errors in the file."""
    unknown: list[str] = field(default_factory=list)
    """Variables that set no option; they may be another program's."""


@dataclass(frozen=True)
class _Known:
    """An option, and what a file may set it to.

    Attributes:
        option: As click has it.
        only_typed: Whether it was declared as one that only the user types.
        is_ours: Whether the verb is actbench's own, and not that of another package.
    """

    option: Any
    only_typed: bool
    is_ours: bool


def read(variables: Mapping[str, str], file: Path = FILE, typed: Sequence[str] = ()) -> Defaults:
    """Return the defaults of the environment and of a file, if it is there.

    The file may have come with a folder of someone else: it may name only such code as the command line, ``typed``,
    names too. Variables are the user's own, as ``PYTHONPATH`` is, and may name any.
    """
    defaults = Defaults()
    sections = _sections(file, defaults.faults)
    named = {name: value for name, value in variables.items() if name.startswith(PREFIX) and name not in _OF_OTHERS}
    if not (sections or named):
        return defaults
    options = {verb: _options(verb, made) for verb, made in verbs_of(app).items()}
    trusted = {code for text in typed for code in named_code(text, is_ours=False)}
    for name, value in named.items():
        option = name.removeprefix(PREFIX).lower().replace("_", "-")
        before = (verb for verb, own in options.items() if option.removeprefix(f"{verb}-") in own)
        verb = None if _is_of_any(option, options) else next(before, None)
        own = option.removeprefix(f"{verb}-")
        if verb is None and not _is_of_any(option, options):
            defaults.unknown.append(f"{name} sets no option{_hint(option, _all(options), _variable)}")
        else:
            defaults.found.append(Default(own, verb, value, name, in_file=False))
    for verb, place, table in sections:
        if verb is not None and verb not in options:
            defaults.faults.append(f"{place}: there is no command {verb!r}{_hint(verb, options)}")
            continue
        known = _all(options) if verb is None else options[verb]
        for name, value in table.items():
            if (why := _fault(name, value, known, trusted)) is None:
                defaults.found.append(Default(name, verb, value, f"{place} {name}", in_file=True))
            else:
                defaults.faults.append(f"{place}: {why}")
    defaults.found.sort(key=lambda each: (each.in_file, each.verb is None))
    defaults.faults += [why for each in defaults.found if (why := _refused_by_all(each, options))]
    return defaults


def _sections(file: Path, faults: list[str]) -> list[tuple[str | None, str, Mapping[str, Any]]]:
    """Return the tables of a file: whose options they hold, what they are called, and what they hold."""
    try:
        if b"actbench" not in read_bytes(file, MOST_BYTES):
            return []
        tool = read_toml(file, str(file), UsageError).get("tool", {})
    except OSError:  # there is none, or it is no such file as a user writes
        return []
    except UsageError as error:
        faults.append(encodable(str(error)))
        return []
    table = tool.get("actbench", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        faults.append(f"{file}, tool.actbench: it is not a table of options")
        return []
    of_all = {name: value for name, value in table.items() if not isinstance(value, dict)}
    found: list[tuple[str | None, str, Mapping[str, Any]]] = [(None, f"{file} [tool.actbench]", of_all)]
    for verb, inside in table.items():
        if isinstance(inside, dict):
            found.append((verb, f"{file} [tool.actbench.{verb}]", inside))
    return [(verb, place, inside) for verb, place, inside in found if inside]


def _options(name_of_verb: str, verb: Any) -> dict[str, _Known]:
    """Return the options of a verb by each of their long names, without dashes; none of a group of verbs."""
    plugged, not_in_files = plugins.installed("commands").get(name_of_verb), only_typed(verb)
    is_ours = plugged is None or plugged.is_ours
    return {
        name.removeprefix("--"): _Known(each, each.name in not_in_files, is_ours)
        for each in verb.params
        if each.param_type_name == "option" and each.name not in _NEVER
        for name in each.opts
        if name.startswith("--")
    }


def _all(options: Mapping[str, Mapping[str, _Known]]) -> dict[str, _Known]:
    """Return the options of all verbs; of those with one name, the one that a file may set to the least."""
    found: dict[str, _Known] = {}
    for of_verb in options.values():
        for name, each in of_verb.items():
            other = found.get(name, each)
            found[name] = replace(
                other, only_typed=other.only_typed or each.only_typed, is_ours=other.is_ours and each.is_ours
            )
    return found


def _is_of_any(option: str, options: Mapping[str, Mapping[str, _Known]]) -> bool:
    return any(option in of_verb for of_verb in options.values())


def _variable(option: str) -> str:
    return PREFIX + option.upper().replace("-", "_")


def _hint(name: str, known: Iterable[str], written: Any = str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {written(close[0])}?" if close else ""


def _fault(name: str, value: Any, known: Mapping[str, _Known], trusted: Container[str]) -> str | None:
    """Return why a file may not have a default; None if it may."""
    if name not in known:
        return f"there is no option {name!r}{_hint(name, known)}"
    option = known[name].option
    if known[name].only_typed:
        return f"{name!r} cannot be set by a file, which may be someone else's: type --{name}"
    values = list(map(str, value)) if isinstance(value, list) else [str(value)]
    named = [code for text in values for code in named_code(text, is_ours=known[name].is_ours)]
    if unknown := [code for code in named if code not in trusted]:
        return (
            f"{name} names code, {', '.join(unknown)}, and the file may be someone else's: read that code; if you "
            f"trust it, type --{name} with that value"
        )
    if option.name == "output" and not _is_inside(str(value)):
        return f"{name} {str(value)!r} is not below this folder: type --{name}"
    if not all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value])):
        return f"{name} is neither text, a number, true or false, nor a list of these"
    if isinstance(value, list) and not option.multiple:
        return f"{name} takes one value, and not a list"
    return None


def _is_inside(text: str) -> bool:
    path = Path(text)
    try:
        return not path.is_absolute() and path.resolve().is_relative_to(Path.cwd().resolve())
    except ValueError:  # as of a null byte, which no path has
        return False


def _values(default: Default, option: Any) -> list[str]:
    """Return the texts of an option's values; of a flag, one text that says whether it is given."""
    value = default.value
    if option.is_flag:
        if str(value).lower() not in _SWITCH:
            raise UsageError(f"{default.place}: {str(value)!r} is not true or false")
        return ["true"] if _SWITCH[str(value).lower()] else []
    if isinstance(value, bool):
        raise UsageError(f"{default.place}: --{default.name} takes a value, and not {str(value).lower()}")
    if isinstance(value, list):
        return list(map(str, value))
    return str(value).split() if option.multiple and not default.in_file else [str(value)]


_SWITCH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _context(verb: Any) -> Any:
    return verb.context_class(verb, info_name=verb.name, **verb.context_settings)


def _check(default: Default, verb: Any, option: Any) -> None:
    """Raise a UsageError that names the place if the option of a verb does not take the value."""
    values = _values(default, option)
    if option.is_flag or not values:
        return
    try:
        option.process_value(_context(verb), values if option.multiple else values[0])
    except WrongUsage as error:
        raise UsageError(f"{default.place}: {encodable(error.message)}") from None


def _refused_by_all(default: Default, options: Mapping[str, Mapping[str, _Known]]) -> str | None:
    """Return why no verb takes a default; None if one does."""
    why = None
    made = verbs_of(app)
    for verb in [default.verb] if default.verb else options:
        if default.name in options[verb] and default.value != "":
            try:
                _check(default, made[verb], options[verb][default.name].option)
            except UsageError as error:
                why = str(error)
            else:
                return None
    return why


def put_before(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command line with defaults before those of the verb, and remarks on defaults.

    ``doctor`` and requests for help take none, so that they work whatever is written.

    Raises:
        UsageError: The file, or the value of a variable, is wrong; the message names the place.
    """
    at = next((place for place, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    if arguments[at : at + 1] in ([], ["doctor"]):
        return list(arguments), []
    defaults = read(variables, typed=arguments[at + 1 :])
    if defaults.faults and not {"-h", "--help"}.intersection(arguments):
        raise UsageError(defaults.faults[0])
    verb = verbs_of(app).get(arguments[at]) if defaults.found else None
    if verb is None:
        return list(arguments), defaults.unknown
    rest = list(arguments[at + 1 :])
    try:
        parsed, *_ = verb.make_parser(_context(verb)).parse_args(list(rest))
    except WrongUsage:  # which is told when the command runs
        return list(arguments), defaults.unknown
    if "help" in parsed:
        return list(arguments), defaults.unknown
    return [*arguments[: at + 1], *_typed(defaults.found, verb, parsed), *rest], defaults.unknown


def _typed(found: Sequence[Default], verb: Any, parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the strongest default of each option that was not typed, unless it conflicts with what was typed."""
    options = {name: each.option for name, each in _options(verb.name, verb).items()}
    has_default = {options[each.name].name for each in found if each.name in options and each.verb in (None, verb.name)}
    done = {*parsed, *conflicting_options(verb.name, parsed, has_default)}
    for default in found:
        option = options.get(default.name)
        if option is None or default.verb not in (None, verb.name) or option.name in done:
            continue
        done.add(option.name)
        if default.value == "":
            continue
        _check(default, verb, option)
        for value in _values(default, option):
            yield f"--{default.name}" if option.is_flag else f"--{default.name}={value}"


def shown(defaults: Defaults) -> Iterator[tuple[str, str]]:
    """Yield each default as one types it, and where it was written."""
    for each in defaults.found:
        values = " ".join(map(str, each.value)) if isinstance(each.value, list) else str(each.value)
        of = f"actbench {each.verb} " if each.verb else ""
        yield f"{of}--{each.name} {values.lower() if isinstance(each.value, bool) else values}", each.place
