"""check_scheme fails for schemes that break one part of the contract, and its message says which."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from actbench.errors import NothingToConvertError, SpecError
from actbench.packing import Codec, Layout, Parts, SavedTensors, SiteState
from actbench.scheme import Card, Scheme, TrainingSetup, with_packed_saved_tensors
from actbench.testing import PARTS, check_scheme


@dataclass(frozen=True)
class Halves(Codec):
    """float16, plus what a broken codec adds."""

    claimed: int = 0
    factor: float = 1.0

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        return ((flat * self.factor).half(),)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        return layout.laid_out(parts[0].to(layout.dtype))

    def packed_bytes(self, layout: Layout) -> int:
        return 2 * layout.elements + self.claimed


class Theirs(Scheme):
    """A scheme that fulfils the contract, but that no package brings it."""

    name: ClassVar[str] = "theirs"
    card: ClassVar[Card] = Card(summary="halves")
    codec: ClassVar[Codec] = Halves()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        return with_packed_saved_tensors(self, setup, SavedTensors(self.codec), "halves")


class OtherBytes(Theirs):
    """Its codec claims fewer bytes than it takes."""

    codec: ClassVar[Codec] = Halves(claimed=-3)


class Biased(Theirs):
    """What it decodes is too small."""

    gradient: ClassVar[Any] = "unbiased"
    codec: ClassVar[Codec] = Halves(factor=0.9)


class NotExact(Theirs):
    """Its gradient is not exact."""

    gradient: ClassVar[Any] = "exact"


class NotFinite(Theirs):
    """It decodes to NaN."""

    codec: ClassVar[Codec] = Halves(factor=float("nan"))


class OtherLoss(Theirs):
    """It seeds torch's generator, and so changes the masks of dropout."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        setup.module.register_forward_pre_hook(lambda module, inputs: torch.manual_seed(2) and None)
        return super().change(setup)


class LostKeys(Theirs):
    """It puts a module around the model."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        return super().change(setup.changed(nn.Sequential(setup.module), ()))


class Nothing(Theirs):
    """It changes nothing."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        return setup


class WrongSecondDerivative(torch.autograd.Function):
    """The identity; its backward pass is twice the identity, with half of it outside of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad.detach()


class WrongSecond(Theirs):
    """Its backward pass adds something that is not a function of the gradient."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        for layer in setup.module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda layer, inputs, output: WrongSecondDerivative.apply(output))
        return setup


class WrongSecondOfEmbeddings(Theirs):
    """It does the same to embeddings alone, which no small network has."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        embeddings = [layer for layer in setup.module.modules() if isinstance(layer, nn.Embedding)]
        if not embeddings:
            raise NothingToConvertError("theirs: no embedding")
        for layer in embeddings:
            layer.register_forward_hook(lambda layer, inputs, output: WrongSecondDerivative.apply(output))
        return setup


class NoCard(Theirs):
    """It has no card of its own."""


class NoSummary(Theirs):
    """Its card says nothing."""

    card: ClassVar[Card] = Card(summary=" ")


BROKEN = [
    (OtherBytes, "packed bytes", r"is packed in [\d,]+ bytes, and the codec's packed_bytes says [\d,]+"),
    (Biased, "mean gradient", r"declared unbiased, and the mean gradient of 100 draws is 8"),
    (NotExact, "gradient", r"declared exact, and \d\.\d+e-0\d of the exact gradient's norm away"),
    (NotFinite, "gradient", r"the gradients of \d+ of 28 parameters are not finite, such as transformer"),
    (OtherLoss, "forward", r"the loss is \d\.\d+, and \d\.\d+ without the scheme: declare a LossyForward"),
    (LostKeys, "keys", r"keys of the state_dict change: \d+ go \(\['transformer.wte.weight'"),
    (Nothing, "saved bytes", "no site says what was changed"),
    (Nothing, "converting twice", "raise a ConversionError"),
    (WrongSecond, "second derivative", "away from the exact one, and not refused"),
    (WrongSecondOfEmbeddings, "second derivative", "away from the exact one, and not refused"),
    (NoSummary, "card", r"the summary of NoSummary\.card is empty"),
    (Theirs, "specification", "no installed package brings a scheme 'theirs'"),
]


@pytest.mark.sampled(fast=6, slow=4)
@pytest.mark.parametrize(("broken", "part", "said"), BROKEN)
def test_a_broken_scheme_fails_by_the_part_that_it_breaks(broken: type[Theirs], part: str, said: str) -> None:
    with pytest.raises(AssertionError) as failed:
        check_scheme(broken(), parts=[part])

    assert str(failed.value).startswith(f"theirs: {part}: ")
    assert re.search(said, str(failed.value)), failed.value


@pytest.mark.parametrize("part", sorted({part for _, part, _ in BROKEN} - {"mean gradient", "specification"}))
def test_a_whole_scheme_passes_the_same_parts(part: str) -> None:
    check_scheme(Theirs(), parts=[part])


def test_gradients_are_compared_without_dropout_where_one_of_several_parts_draws_other_masks() -> None:
    check_scheme("accumulate:2+checkpoint", on="tiny-bert", parts=["gradient"])


def test_a_scheme_without_a_card_is_told_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Theirs, "card")

    with pytest.raises(AssertionError, match=r"card: NoCard has no card; give it one: card: ClassVar\[Card\] = "):
        check_scheme(NoCard(), parts=["card"])


def test_parts_and_specifications_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the contract has no part \['byte'\]; its parts are card, "):
        check_scheme("fewbit:3", parts=["byte"])
    with pytest.raises(SpecError, match="no-such-scheme"):
        check_scheme("no-such-scheme")


def test_the_docstring_lists_every_part() -> None:
    assert re.findall(r"\* ``(.*)``:", check_scheme.__doc__ or "") == list(PARTS)
    assert isinstance(PARTS, types.MappingProxyType)
