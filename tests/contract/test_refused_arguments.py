"""Wrong arguments of operators are refused with what was found, on real tensors as on fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench import scheme as schemes
from actbench.methods.actnn.ops import groupquant
from actbench.methods.fewbit.ops import stepwise
from actbench.methods.formats.ops import smaq, smaqstep
from actbench.methods.formats.ops.smaq.format import Format, format_of
from actbench.methods.formats.ops.smaqstep import rules
from actbench.methods.randomized.ops.matrix import sketch_columns
from actbench.ops.noise import random_words

schemes.scheme_names()  # imports all schemes, and with them all operators
ops = torch.ops.actbench
CPU, SEED, WRONG_SEED, HALF_SEED = torch.device("cpu"), torch.tensor(0), torch.tensor([0]), torch.tensor(0.0)
X, ROWS, F32 = torch.ones(300), torch.ones(2, 150), torch.float32
BYTES = torch.zeros(300, dtype=torch.uint8)
CODES, WORDS = BYTES[:75], torch.zeros(2, dtype=torch.int32)
ONE_BIT = torch.ones(2, dtype=torch.int32)
BOUNDS, LEVELS = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.25, 0.5, 0.75, 1.0])
PACKED = BYTES[: 208 + 8 + 36 + 2]
FORM = Format(6, 7, 64, 256)
STATE = BYTES[: FORM.packed_bytes(300)]
RULE = rules.sgd_rule(1, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=False, maximize=False)

CALLS: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
    (ops.pack_codes, (BYTES[:4], 9), {}, "bits must be from 1 to 8, found 9"),
    (ops.pack_codes, (X, 3), {}, "contiguous uint8 vector, found torch.float32"),
    (ops.unpack_codes, (BYTES[:1], 3, 8), {}, "8 codes of 3 bits are 3 bytes, found 1"),
    (random_words, (WRONG_SEED, 0, 1), {}, "0-d int64"),
    (random_words, (HALF_SEED, 0, 1), {}, "0-d int64"),
    (random_words, (SEED, -1, 1), {}, "not negative"),
    (random_words, (SEED, 0, -1), {}, "not negative"),
    (sketch_columns, (SEED, 0, 2, 2, "dct", F32), {}, "gaussian or rademacher, not 'dct'"),
    (sketch_columns, (WRONG_SEED, 0, 2, 2, "gaussian", F32), {}, "0-d int64"),
    (sketch_columns, (HALF_SEED, 0, 2, 2, "gaussian", F32), {}, "0-d int64"),
    (sketch_columns, (SEED, 0, 2, 2, "gaussian", torch.int32), {}, "float entries"),
    (ops.relu_mask, (X.int(),), {}, "int32"),
    (ops.mask_select, (BYTES[:1], X[:9]), {}, "packed must have 2 bytes, found 1"),
    (ops.stepwise_activate, (X, "cube", BOUNDS, 2, False), {}, "one of gelu, gelu_tanh, silu, found 'cube'"),
    *(
        (encode, arguments, {}, message)
        for encode in (ops.stepwise_encode, stepwise.encode)  # the wrapper has checks of its own
        for arguments, message in [
            ((X, BOUNDS, 0, False), "bits must be from 1 to 8, found 0"),
            ((X, BOUNDS, 9, False), "bits must be from 1 to 8, found 9"),
            ((X, BOUNDS, 3, False), "3 bits take 7 bounds, found 3"),
            ((X, BOUNDS.double(), 2, False), "contiguous float32 vector"),
            ((X.int(), BOUNDS, 2, False), "int32"),
        ]
    ),
    (ops.stepwise_decode, (BYTES[:1], LEVELS, X[:5], 2), {}, "packed must have 2 bytes, found 1"),
    (groupquant.encode, (X, 0, 256, SEED), {}, "bits must be from 1 to 8, found 0"),
    (groupquant.encode, (X, 2, 48, SEED), {}, "multiple of 32 from 32 to 1024, found 48"),
    (groupquant.encode, (X, 2, 2048, SEED), {}, "found 2048"),
    (groupquant.encode, (ROWS, 2, 256, SEED), {}, "must have 1 dimensions"),
    (groupquant.encode, (X.int(), 2, 256, SEED), {}, "int32"),
    (groupquant.encode, (X, 2, 256, WRONG_SEED), {}, "0-d int64"),
    (groupquant.encode_, (CODES, WORDS[:1], X, 2, 256, SEED), {}, "do not take 75 bytes of codes and 1 words"),
    (groupquant.encode_, (CODES[1:], WORDS, X, 2, 256, SEED), {}, "do not take 74 bytes of codes"),
    (groupquant.encode_, (CODES, WORDS.long(), X, 2, 256, SEED), {}, "meta must be a contiguous torch.int32"),
    (groupquant.decode, (CODES, WORDS, 2, 256, 1, 300, F32), {}, "elements 1 to 301 are not in 75 bytes"),
    (groupquant.decode, (CODES, WORDS[:1], 2, 256, 0, 300, F32), {}, "in 1 groups of 256"),
    (groupquant.decode, (CODES, WORDS, 2, 256, -1, 3, F32), {}, "elements -1 to 2"),
    (groupquant.decode, (CODES.int(), WORDS, 2, 256, 0, 3, F32), {}, "codes must be a contiguous torch.uint8"),
    (groupquant.encode_rows, (ROWS, ONE_BIT[:1], 1, 256, SEED), {}, "2 rows need as many row_bits, found 1"),
    (groupquant.encode_rows, (ROWS, ONE_BIT.long(), 2, 256, SEED), {}, "row_bits must be a contiguous torch.int32"),
    (groupquant.decode_rows, (ROWS, CODES, WORDS, ONE_BIT, 256, 1), {}, "rows 1 to 3 are not among the 2 rows"),
    (groupquant.decode_rows, (ROWS, CODES, WORDS, ONE_BIT, 64, 0), {}, "do not have 2 groups"),
    (groupquant.encode_in_one, (X, 0, SEED), {}, "bits"),
    (groupquant.encode_in_one, (X, 9, SEED), {}, "bits"),
    (groupquant.encode_in_one, (ROWS, 2, SEED), {}, "vector"),
    (smaq.encode, (X, SEED), {"form": Format(2, 7, 64, 256)}, "main_bits must be from 3 to outlier_bits"),
    (smaq.encode, (X, SEED), {"form": Format(6, 9, 64, 256)}, "found 6 and 9"),
    (smaq.encode, (X, SEED), {"form": Format(6, 5, 64, 256)}, "found 6 and 5"),
    (smaq.encode, (X, SEED), {"form": Format(6, 7, 8, 32)}, "multiple of 32 from 64 to 1024, found 32"),
    (smaq.encode, (X, SEED), {"form": Format(6, 7, 384, 256)}, "from none to all of a block, found 384 of 256"),
    (format_of, (6, 7, 0.3, 256), {}, "outliers of a block of 256 must be a whole number, found 76.8"),
    (smaq.encode, (X.int(), SEED), {}, "int32"),
    (smaq.encode, (X, WRONG_SEED), {}, "0-d int64"),
    (smaq.decode, (PACKED, 305, F32), {}, "elements 0 to 305 are not in 254 bytes"),
    (smaq.decode, (PACKED, 1, F32, -1), {}, "elements -1 to 0"),
    (smaq.decode, (PACKED[:-1], 1, F32), {}, "no number of elements takes 253 bytes"),
    (smaq.decode, (PACKED.int(), 1, F32), {}, "packed must be a contiguous torch.uint8 vector"),
    (smaqstep.sgd_, (X.double(), X.double(), STATE, 0, RULE, FORM), {}, "must not be torch.float64"),
    (
        smaqstep.sgd_,
        (X, X.half(), STATE, 0, RULE, FORM),
        {},
        r"must be torch.float32 \(300,\) on cpu, found torch.float16",
    ),
    (smaqstep.sgd_, (X, X[:299], STATE, 0, RULE, FORM), {}, r"found torch.float32 \(299,\)"),
    (smaqstep.sgd_, (X, X, STATE[1:], 0, RULE, FORM), {}, "vector of 254 bytes on cpu, found torch.uint8"),
    (smaqstep.sgd_, (X, X, STATE.int(), 0, RULE, FORM), {}, "found torch.int32"),
    (smaqstep.sgd_, (X, X, STATE, 0, RULE, Format(6, 7, 128, 512)), {}, "at most 256 elements, found 512"),
    (smaqstep.sgd_, (X, X, STATE, 0, RULE, Format(2, 7, 64, 256)), {}, "main_bits"),
    (smaqstep.sgd_, (X, X, STATE, 0, RULE, FORM), {"first": -4}, "the first element must not be negative, found -4"),
    (smaqstep.adam_, (X, X, STATE, STATE.clone(), 0, RULE, FORM), {}, r"must be 10 numbers, sign, kept, .*; found 6"),
]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("function", "arguments", "named", "message"), CALLS)
def test_wrong_arguments_are_refused(
    function: Callable[..., object], arguments: tuple[Any, ...], named: dict[str, Any], message: str, fake: bool
) -> None:
    with (
        FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad(),
        pytest.raises(ValueError, match=message),
    ):
        function(*arguments, **named)
