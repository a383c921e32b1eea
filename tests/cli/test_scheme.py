from __future__ import annotations

from typing import ClassVar

import pytest
from rich.console import Console

from actbench import scheme as schemes
from actbench.cli.described import described
from actbench.cli.listing import print_scheme
from actbench.scheme import Scheme
from actbench.scheme.base import OF_PARTS
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1200")


def row(out: str, name: str) -> str:
    """Return the line that begins with a name, with single spaces."""
    [line] = [line for line in out.splitlines() if line.split(" ")[0] == name]
    return " ".join(line.split())


def test_a_scheme_is_explained_in_parts(cli):
    out = cli("schemes", "fewbit").out
    lines = [" ".join(line.split()) for line in out.splitlines()]

    assert lines[0] == "fewbit:BITS"
    assert row(out, "Paper").startswith('Paper Novikov et al., "Few-Bit Backward')
    assert row(out, "Kept").startswith("Kept for backward ceil(elements * bits / 8) bytes, and 2**bits levels")
    assert row(out, "Not").endswith("which store one bit more than named.")
    assert "Forward pass exact, bit for bit" in lines
    assert "Bits per packed element 3 (fewbit:3)" in lines
    assert "``" not in out
    assert "Attributes" not in out


def test_keys_have_type_default_allowed_values_and_meaning(cli):
    out = cli("schemes", "randomized").out

    assert row(out, "ratio").startswith("ratio number 0.2 above 0, at most 1 Rows of the sketch per row")
    assert row(out, "ratio").endswith("Stands after the colon.")
    assert "rademacher gaussian, rademacher, dct" in row(out, "sketch")
    assert row(out, "dim") == "dim whole number – above 0 Rows of the sketch, in place of a ratio."
    assert row(out, "peak_saving").startswith("peak_saving 0.186")


def test_values_that_a_scheme_checks_itself_are_told_too(cli):
    out = cli("schemes", "fewbit").out

    assert row(out, "bits").startswith("bits whole number 3 at least 1, at most 8 Bits per element")
    assert "list, joined by / – gelu, gelu_tanh, " in row(out, "functions")
    assert "softshrink, file.py:name Which functions" in row(out, "functions")


@pytest.mark.parametrize("name", schemes.scheme_names())
def test_every_key_of_every_scheme_has_a_meaning(cli, name):
    out = cli("schemes", name).out

    for key, field in schemes.lookup(name).model_fields.items():
        if key == "only" and OF_PARTS.isdisjoint(schemes.lookup(name).model_construct().changes):
            continue  # there is nothing that it could limit
        found = row(out, key)
        assert found.endswith("."), f"{name}: {key} is not among the Attributes of its docstring"
        assert field.is_required() == (" needed " in found)


def test_a_changed_forward_pass_is_told(capsys):
    class Rounding(Scheme):
        """Rounds."""

        card: ClassVar[Card] = Card(summary="rounds")

        @property
        def facets(self) -> tuple[Facet, ...]:
            return (LossyForward(),)

    print_scheme(described(Rounding), Console(width=200))

    assert "not bit for bit that of the exact model" in capsys.readouterr().out


def test_a_list_of_schemes_is_answered_with_the_option_repeated(cli):
    asked = cli("measure", "tiny-bert", "--scheme", "exact,checkpoint")
    other = cli("measure", "tiny-bert", "--scheme", "fewbit:3,gelu")

    assert asked.status == 2
    assert "for 2 rows, repeat the option: --scheme exact --scheme checkpoint" in asked.err
    assert "repeat the option" not in other.err
