"""What a scheme declares: its card, its specification and its fields."""

from __future__ import annotations

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.scheme.card import Card
from actbench.testing.subject import Subject

_WRONG = "no-such-value"


def card(subject: Subject) -> None:
    """Check that a list of schemes and a reader of the class find what they need."""
    kind = type(subject.scheme)
    found = getattr(kind, "card", None)
    if not isinstance(found, Card):
        raise AssertionError(
            f"{kind.__name__} has no card; give it one: card: ClassVar[Card] = Card(summary='what it does')"
        )
    if not found.summary.strip():
        raise AssertionError(f"the summary of {kind.__name__}.card is empty; 'actbench schemes' shows it")
    if not ("__doc__" in vars(kind) and (kind.__doc__ or "").strip()):
        raise AssertionError(f"{kind.__name__} has no docstring; say in it what is kept for backward")


def specification(subject: Subject) -> None:
    """Check that the scheme is installed, and that records, which have its specification, build it again."""
    scheme = subject.scheme
    for name in scheme.spec.split("+"):
        name = name.partition(":")[0].partition(",")[0]
        if name not in schemes.find_schemes():
            raise AssertionError(
                f"no installed package brings a scheme {name!r}; name its class in pyproject.toml, under "
                f'[project.entry-points."actbench.schemes"], and install the package again'
            )
    built = schemes.build(scheme.spec)
    if built != scheme:
        raise AssertionError(f"scheme.spec is {scheme.spec!r}, which builds {built!r}, not {scheme!r}")


def wrong_values(subject: Subject) -> None:
    """Check that a wrong key, and a wrong value where not every text is right, are refused by name."""
    kind = type(subject.scheme)
    _refused(f"{subject.scheme.spec},no_such_key=1", "no_such_key", f"{kind.__name__} takes any key")
    field = kind.model_fields.get(kind.positional or "")
    if field is not None and field.annotation in (int, float, bool):
        why = f"{kind.__name__}.{kind.positional} takes any text"
        _refused(f"{kind.name}:{_WRONG}", _WRONG, why)


def _refused(spec: str, word: str, otherwise: str) -> None:
    try:
        schemes.build(spec)
    except SpecError as error:
        if word not in str(error):
            raise AssertionError(f"the message for {spec!r} does not name {word!r}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{spec!r} raises {type(error).__name__} in place of a SpecError: {error}") from error
    else:
        raise AssertionError(f"{spec!r} is not refused: {otherwise}")
