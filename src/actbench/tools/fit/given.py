"""The schemes that a user gives to a fit: those that every plan has, and those to choose from."""

from __future__ import annotations

from actbench.cli.givenschemes import schemes_from
from actbench.errors import ConversionError, UsageError
from actbench.scheme import build
from actbench.scheme.base import Scheme
from actbench.scheme.composed import Composed, refuse_spread
from actbench.scheme.conditions import Limits


def of_all(base: str) -> str:
    """Return the schemes that every plan has, in canonical form.

    Raises:
        SpecError: There is no such scheme, or they do not stand together.
        UsageError: They spread the model over processes, or a step with them has no estimated time.
    """
    with schemes_from("--base"):
        scheme = build(base)
    refuse_several(scheme, f"--base {base}", "'actbench sweep'")
    refuse_untimed(scheme, f"--base {base}")
    return scheme.spec


def refuse_several(scheme: Scheme, given: str, other_commands: str) -> None:
    """Refuse a scheme that spreads the model over several processes; ``given`` is what was typed."""
    try:
        refuse_spread(
            scheme, f"{given}: fit plans for one process", f"{other_commands} simulates it with other schemes"
        )
    except ConversionError as error:
        raise UsageError(str(error)) from None


def refuse_untimed(scheme: Scheme, given: str) -> None:
    """Refuse a scheme whose steps have no estimated time, by which plans are compared; ``given`` is what was typed."""
    limits = scheme.facet(Limits)
    if limits and limits.untraceable:
        raise UsageError(
            f"{given}: fit compares estimated times, and a step with it has none; 'actbench measure' shows its peak"
        )


def alone(among: list[str] | None) -> list[str] | None:
    """Return the schemes to choose from in canonical form, each once.

    Raises:
        SpecError: There is no such scheme.
        UsageError: A specification is a stack of several schemes.
    """
    if among is None:
        return None
    built = {text: build(text) for text in among}
    stack = next((text for text, scheme in built.items() if isinstance(scheme, Composed)), None)
    if stack is not None:
        raise UsageError(f"--scheme {stack}: fit combines schemes itself; name them one by one, each with --scheme")
    return list(dict.fromkeys(scheme.spec for scheme in built.values() if scheme.spec != "exact"))
