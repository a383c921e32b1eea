from typing import get_args

import pytest
from hypothesis import given, strategies as st

from actbench.errors import UsageError
from actbench.methods.formats.encodings import (
    COMPARED,
    ENCODINGS,
    Fp8,
    IntGroups,
    NnwBdi,
    Rounding,
    Smaq,
    SmaqSimulated,
    build,
)


@pytest.mark.parametrize(
    "spec",
    [
        *COMPARED,
        "fp8:e5m2,group_size=64,scale=bfloat16,rounding=stochastic",
        "smaq_simulated,main_bits=5,main_threshold=0.75,nonnegative=true",
        "nnwbdi,bits=5,zeros=false,choice=smallest",
        "smaq,outliers=0.125,block=128",
        "smaq,outliers=0.16796875",
        "smaq_simulated,main_threshold=1e-07,outlier_threshold=2",
        "smaq_simulated,main_threshold=0.30000000000000004,outlier_threshold=1e16",
    ],
)
def test_a_specification_reads_back(spec):
    assert build(spec).spec == spec
    assert build(build(spec).spec) == build(spec)


_blocks = st.integers(2, 32).map(lambda groups: 32 * groups)


@st.composite
def _smaq(draw):
    block = draw(_blocks)
    return Smaq(
        outliers=draw(st.integers(0, block)) / block, block=block, rounding=draw(st.sampled_from(get_args(Rounding)))
    )


@st.composite
def _simulated(draw):
    main, outlier = sorted(draw(st.lists(st.floats(1e-30, 1e30), min_size=2, max_size=2, unique=True)))
    return SmaqSimulated(main_threshold=main, outlier_threshold=outlier, clamp=draw(st.booleans()))


@given(_smaq() | _simulated() | st.builds(IntGroups, bits=st.integers(2, 8), group_size=_blocks) | st.builds(NnwBdi))
def test_every_encoding_reads_back(encoding):
    assert build(encoding.spec) == encoding


def test_short_forms():
    assert build("int6") == build("int") == IntGroups(bits=6)
    assert build("int3,group_size=32") == IntGroups(bits=3, group_size=32)
    assert build(" fp8 ") == Fp8(format="e4m3")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bf61", "there is no encoding 'bf61'; did you mean 'bf16'?"),
        ("", "there is no encoding ''; 'actbench encodings' lists all"),
        ("int:9", "encoding 'int:9': bits=9 must be at most 8"),
        ("int1", "bits=1 must be at least"),
        ("bf16:3", "bf16 takes no value after the colon"),
        ("int:6,bits=5", "bits is given twice"),
        ("fp8:e3m4", "format=e3m4 must be 'e4m3' or 'e5m2'"),
        ("fp8,scales=none", "fp8 has no key 'scales'; its keys: format, group_size, scale, rounding"),
        ("nothing", "'actbench encodings' lists all"),
        ("int:6,bits=5,bits=4", "'bits' is given twice"),
        ("int:", "nothing follows the colon"),
        ("fp8,scale", "'scale' is not of the form key=value"),
        ("smaq_simulated,main_bits=2", "main_bits=2 must be at least 3"),
        ("smaq,outliers=0.3", "the outliers of a block of 256 must be a whole number"),
        ("smaq,main_bits=8", "main_bits must be from 3 to outlier_bits"),
    ],
)
def test_what_is_wrong_is_named(spec, message):
    with pytest.raises(UsageError) as error:
        build(spec)
    assert message in str(error.value)


def test_each_encoding_says_what_it_is():
    assert all(kind.name == name and kind.summary for name, kind in ENCODINGS.items())
    assert [name for name, kind in ENCODINGS.items() if not kind.stored] == ["smaq_simulated"]
