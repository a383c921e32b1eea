from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.measuring.meters.meter import MemoryReading
from actbench.methods.actnn.scheme import ActNN
from actbench.methods.checkpointing.scheme import Checkpoint
from actbench.methods.fewbit.scheme import FewBit
from actbench.methods.formats.encode import Encode
from actbench.methods.formats.smaq import Smaq
from actbench.methods.formats.structures import STRUCTURES
from actbench.methods.randomized.scheme import Randomized
from actbench.model.advice import helping_changes
from actbench.model.records import Phase
from actbench.scheme.composed import Composed

_structures = st.lists(st.sampled_from(STRUCTURES), min_size=1, unique=True).map(tuple)
_outliers = st.integers(0, 256).map(lambda count: count / 256)
_schemes = st.one_of(
    st.builds(FewBit, bits=st.integers(1, 8), weight=st.just("normal"), scale=st.floats(1e-30, 1e30)),
    st.builds(Randomized, ratio=st.floats(1e-30, 1), sketch=st.sampled_from(["dct", "wta"])),
    st.builds(ActNN, bits=st.floats(1, 8), per_layer=st.none() | st.booleans(), swap=st.none() | st.booleans()),
    st.builds(Checkpoint, every=st.integers(1, 99), blocks=st.sampled_from([(), ("Block",), ("Block", "Head")])),
    st.builds(Smaq, on=_structures, outliers=_outliers, rounding=st.sampled_from(["nearest", "stochastic"])),
    st.builds(Encode, on=_structures, encoding=_outliers.map(lambda share: f"smaq/outliers={share}/rounding=nearest")),
)


@given(_schemes)
def test_every_scheme_reads_back(scheme):
    assert schemes.build(scheme.spec) == scheme


def test_schemes_that_are_composed_read_back():
    scheme = Composed.of([Randomized(ratio=1e-7), FewBit(weight="normal", scale=1e16)], "")

    assert scheme.spec == "fewbit:3,weight=normal,scale=1e16+randomized:1e-07"
    assert schemes.build(scheme.spec) == scheme


@pytest.mark.parametrize("name", ["Block+Head", "Block,Head", " Block", ""])
def test_what_no_specification_can_say_is_refused(name):
    with pytest.raises(SpecError) as caught:
        _ = Checkpoint(blocks=(name,)).spec

    assert str(caught.value) == (
        f"checkpoint: blocks={name!r} cannot be written in a specification; "
        "rename it without commas, + and spaces at its ends"
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("nothing", "'actbench schemes'"),
        ("encode:nothing", "'actbench encodings'"),
        ("fewbit:9", "'actbench schemes fewbit'"),
    ],
)
def test_an_error_says_where_to_look(text, where):
    with pytest.raises(SpecError, match=where) as caught:
        schemes.build(text)

    assert str(caught.value).count("'actbench ") == 1


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_few_schemes_are_examples_of_what_lowers_a_peak(phase: Phase) -> None:
    """Their cards say so, and a reading of a step has their names."""
    changes = helping_changes(phase, mostly_model=False)
    unread = MemoryReading(1, 1, 1, 1, peak_bytes=9)
    reading = replace(unread, peak_phase=phase)

    assert 2 <= len(schemes.examples(changes)) <= 3
    assert reading.against(5).remedies == tuple(schemes.examples(changes))
    assert unread.against(5).remedies == ()
