import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, IdleError, SpecError
from actbench.measuring import inspection
from actbench.methods.checkpointing.selective import SelectiveForward
from actbench.packing.blocks import blocks
from actbench.scheme.setup import TrainingSetup

WIDTH, BATCH = 16, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def setup(count=3):
    return TrainingSetup(
        nn.Sequential(*(Block() for _ in range(count))), loss=lambda model, batch: model(**batch).sum()
    )


def bytes_of(setup):
    return inspection.trace(setup, lambda: {"input": torch.randn(BATCH, WIDTH)}).total_bytes


def test_the_bytes_are_those_of_inputs_and_products():
    """The first block's input is the batch; the loss is one number."""
    inputs, wide, narrow = (4 * BATCH * columns for columns in (2 * WIDTH, 3 * 4 * WIDTH, 3 * WIDTH))
    inputs += 4

    assert bytes_of(schemes.build("checkpoint").apply(setup())) == inputs
    assert bytes_of(schemes.build("selective").apply(setup())) == inputs + wide + narrow
    assert bytes_of(schemes.build("selective:half").apply(setup())) == inputs + wide
    assert bytes_of(schemes.build("selective,keep=linear").apply(setup())) == inputs + wide + narrow
    assert bytes_of(schemes.build("selective,every=2").apply(setup())) < bytes_of(setup())


def test_sites_and_words():
    found = schemes.build("selective:half,only=1").apply(setup())

    assert [(site.path, site.was, site.becomes) for site in found.sites] == [
        ("1", "Block", "recomputed but for products")
    ]
    assert found.parts[0].spec == "selective:half,only=1,blocks=Block"
    named = schemes.build("selective,keep=bmm/linear").apply(setup())
    assert {site.becomes for site in named.sites} == {"recomputed but for bmm and linear"}


def test_names_of_operators_that_no_block_runs_are_refused():
    found = schemes.build("selective,keep=attention/softmax").apply(setup())
    trace = inspection.trace(found, lambda: {"input": torch.randn(BATCH, WIDTH)})

    with pytest.raises(IdleError, match="because they run no operator that keep=attention/softmax names"):
        inspection.refuse_idle(found.parts, trace)


@pytest.mark.parametrize(
    "spec",
    [
        "selective:all",
        "selective,policy=half/half",
        "selective,every=0",
        "selective,blocks=",
        "selective,keep=mm",
        "selective,keep=linear/matmul",
        "selective:half,keep=linear",
    ],
)
def test_wrong_values_are_refused(spec):
    with pytest.raises(SpecError, match=r"policy|every|blocks|keep"):
        schemes.build(spec)


def test_others_that_choose_what_waits_are_refused():
    for other in ("gact", "smaq", "encode:bf16"):
        with pytest.raises(SpecError, match="both choose by the operator what waits"):
            schemes.build(f"{other}+selective")
    with pytest.raises(SpecError, match="checkpoint and selective both run blocks again"):
        schemes.build("checkpoint+selective")
    hooked = schemes.build("gact").apply(setup())
    for path, block in blocks(hooked.module, ("Block",)):
        SelectiveForward(block, path).bind()
    with pytest.raises(ConversionError, match="hooks pack what the model saves"):
        hooked.module(torch.randn(BATCH, WIDTH))
