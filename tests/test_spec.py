from __future__ import annotations

import math

import pytest
from hypothesis import example, given, strategies as st
from pydantic import BaseModel

from actbench.errors import SpecError
from actbench.model.spec import SpecPart, build, parse_spec, shortest


def test_a_name_a_value_and_options() -> None:
    assert parse_spec("fewbit:2,functions=gelu/silu") == (SpecPart("fewbit", "2", {"functions": "gelu/silu"}),)


def test_parts_joined_by_plus_keep_their_order() -> None:
    assert parse_spec(" fewbit:3 + randomized:0.2,sketch=rademacher ") == (
        SpecPart("fewbit", "3"),
        SpecPart("randomized", "0.2", {"sketch": "rademacher"}),
    )


@pytest.mark.parametrize("value", ["1e+3", "1.5E+30", "-2e+0"])
def test_the_plus_of_an_exponent_joins_no_schemes(value: str) -> None:
    number = value.replace("+", "")

    assert parse_spec(f"a:{value}+b,scale={value}") == (SpecPart("a", number), SpecPart("b", None, {"scale": number}))
    with pytest.raises(SpecError, match="'3' does not begin with a name"):
        parse_spec("a:1+3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the scheme is empty"),
        ("  ", "the scheme is empty"),
        ("fewbit:", "nothing follows the colon in 'fewbit:'"),
        ("+fewbit:3", "'' does not begin with a name"),
        ("fewbit:3+", "'' does not begin with a name"),
        ("Fewbit:3", "does not begin with a name"),
        (":3", "does not begin with a name"),
        ("fewbit 3", "does not begin with a name"),
        ("fewbit:3,gelu", "'gelu' in 'fewbit:3,gelu' is not of the form key=value"),
        ("fewbit:3,functions=", "is not of the form key=value"),
        ("fewbit:3,=gelu", "is not of the form key=value"),
        ("fewbit:3,a=1,a=2", "'a' is given twice"),
    ],
)
def test_what_does_not_follow_the_grammar_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)

    assert told in str(caught.value)


_names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_values = st.from_regex(r"[A-Za-z0-9./_-]{1,8}", fullmatch=True)
_parts = st.builds(SpecPart, _names, st.none() | _values, st.dictionaries(_names, _values, max_size=3))


@given(st.lists(_parts, min_size=1, max_size=4))
def test_what_is_written_reads_back(parts: list[SpecPart]) -> None:
    assert parse_spec("+".join(map(str, parts))) == tuple(parts)


class _Number(BaseModel):
    value: float


@given(st.floats(allow_nan=False))
@example(1e300)
@example(-0.0)
@example(5e-324)
@example(2.0**53 + 2)
def test_every_number_is_written_shortly_and_reads_back(value: float) -> None:
    text = shortest("a", "value", _Number(value=value))
    (part,) = parse_spec(text)
    read = build(_Number, "value", part, "").value

    assert len(text) <= len("a:-1.2345678901234567e-308")
    assert (read, math.copysign(1, read)) == (value, math.copysign(1, value))


@pytest.mark.parametrize("text", ["+".join(["fewbit:3"] * 4000), "fewbit:3,only=" + "a/" * 60_000 + "b"])
def test_a_specification_has_a_bounded_length_and_its_error_too(text: str) -> None:
    with pytest.raises(SpecError, match=r"it may have 100,000 and 100$") as refused:
        parse_spec(text)

    assert len(str(refused.value)) < 1000


def test_every_error_has_a_message_of_bounded_length() -> None:
    with pytest.raises(SpecError, match="does not begin with a name") as refused:
        parse_spec("X" * 90_000)

    assert len(str(refused.value)) < 2000
