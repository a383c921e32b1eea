import re

import pytest

from actbench.errors import UsageError
from actbench.measuring.kernels import choices
from actbench.measuring.kernels.subjects import SUBJECTS


def test_lists_may_be_repeated_or_separated_by_commas():
    assert choices.sizes(["512x3072,1x2", "1x2"]) == ((512, 3072), (1, 2))
    assert choices.bits(["3", "1,8"]) == (3, 1, 8)
    assert choices.dtypes(["bfloat16"]) == ("bfloat16",)


def test_a_first_word_stands_for_all_that_begin_with_it_and_nothing_for_everything():
    assert choices.operators(["layer"]) == ("layer:gelu", "layer:silu", "layer:relu")
    assert choices.operators(["groupquant"]) == ("groupquant_encode", "groupquant_decode")
    assert choices.operators([]) == choices.OPERATORS


def test_every_name_has_a_subject():
    assert tuple(SUBJECTS) == choices.OPERATORS
    assert set(choices.OPERATORS) >= choices.ONE_WIDTH | choices.OF_BYTES


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (choices.sizes, "512", "--size '512': give rows and columns, such as 512x3072"),
        (choices.sizes, "0x4", "--size '0x4'"),
        (choices.bits, "9", "--bits '9': give whole numbers from 1 to 8"),
        (choices.dtypes, "float64", "--dtype 'float64' is not one of float32, bfloat16, float16"),
        (choices.operators, "stepwise_encod", "did you mean 'stepwise_encode'?"),
    ],
)
def test_what_cannot_be_measured_is_refused(read, given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read([given])
