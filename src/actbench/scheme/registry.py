"""From specifications to schemes."""

from __future__ import annotations

import functools
from collections.abc import Collection

from actbench import plugins
from actbench.model import spec
from actbench.model.declared.schemes import examples as declared_examples
from actbench.scheme.base import PLACEMENT, Scheme
from actbench.scheme.card import Card
from actbench.scheme.composed import Composed


@functools.cache
def find_schemes() -> dict[str, type[Scheme]]:
    """Return every scheme by name; one that is not a scheme of this name, or has no card, is warned of and left out."""
    return plugins.loaded("schemes", fault)


def fault(plugin: plugins.Plugin) -> str | None:
    """Return why a plug-in is not a scheme of its name; None if it is one."""
    if why := plugins.fault(plugin, type):
        return why
    scheme = plugin.load()
    if not (issubclass(scheme, Scheme) and getattr(scheme, "name", None) == plugin.name):
        return f"it is no Scheme whose name is {plugin.name!r}"
    if not isinstance(getattr(scheme, "card", None), Card):
        return "it has no card, which says what it does: card: ClassVar[Card] = Card(summary=...)"
    return None


def scheme_names() -> list[str]:
    """Return the names of all schemes."""
    return list(find_schemes())


def alone() -> list[str]:
    """Return the names of the schemes that one process runs alone."""
    return [name for name, scheme in find_schemes().items() if PLACEMENT not in scheme.model_construct().changes]


def changing(changes: Collection[str]) -> list[str]:
    """Return the names of the schemes that may change any of these; see :data:`actbench.scheme.base.Change`."""
    return [
        name for name, scheme in find_schemes().items() if not set(changes).isdisjoint(scheme.model_construct().changes)
    ]


def examples(changes: Collection[str]) -> list[str]:
    """Return the schemes that may change any of these and that messages name as examples; imports none of ours."""
    declared, found = declared_examples(changes), []
    for name, plugin in plugins.installed("schemes").items():
        if plugin.is_ours:
            is_example = name in declared
        else:
            cls = _installed(name)
            may_change = cls is not None and not set(changes).isdisjoint(cls.model_construct().changes)
            is_example = may_change and cls is not None and cls.card.is_example
        found += [name] * is_example
    return found


def lookup(name: str, text: str | None = None) -> type[Scheme]:
    """Return the scheme of a name.

    Raises:
        SpecError: There is no such scheme; the message names the closest one, and ``text``, the whole specification.
    """
    return _installed(name) or spec.find_named(name, find_schemes(), "scheme", text or name)


@functools.cache
def _installed(name: str) -> type[Scheme] | None:
    """Return the scheme of a name without importing the others, which takes seconds; None if it cannot be used."""
    plugin = plugins.installed("schemes").get(name)
    return None if plugin is None or fault(plugin) else plugin.load()


def build(text: str) -> Scheme:
    """Build the scheme that a specification names; several joined by ``+`` become one composed scheme.

    Raises:
        SpecError: A name, key or value is wrong; the message names it and what is allowed.
    """
    parts = [_build_part(part, text) for part in spec.parse_spec(text)]
    return parts[0] if len(parts) == 1 else Composed.of(parts, text)


def _build_part(part: spec.SpecPart, text: str) -> Scheme:
    cls = lookup(part.name, text)
    built = spec.build(cls, cls.positional, part, f"scheme {text!r}", f" (see 'actbench schemes {cls.name}')")
    spec.check_sizes(built, f"scheme {text!r}")
    return built
