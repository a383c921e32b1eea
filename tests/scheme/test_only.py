"""Schemes that are limited to parts of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from actbench import Controller, scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.measuring import inspection
from actbench.scheme.only import compiled, parts_of
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert import model as conversion


def block(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(12)), nn.Linear(32, 8))


def gradient(module: nn.Module, x: Tensor) -> Tensor:
    module.zero_grad()
    module(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def converted(spec: str, exact: nn.Module) -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("only", "paths"),
    [
        ("layer1", ["layer1"]),
        ("layer[1-2].0", ["layer1.0", "layer2.0"]),
        ("layer*.1.conv1", [f"layer{n}.1.conv1" for n in (1, 2, 3, 4)]),
        ("layer3/layer3.0/fc", ["layer3", "fc"]),
        ("downsample.[0-9]", [f"layer{n}.0.downsample.{k}" for n in (2, 3, 4) for k in (0, 1)]),
        ("Linear", ["fc"]),
        ("*Pool2d", ["maxpool", "avgpool"]),
        ("_MaxPoolNd/fc", ["maxpool", "fc"]),  # a class that MaxPool2d derives from
    ],
)
def test_patterns_name_paths_and_their_ends(only: str, paths: list[str]) -> None:
    assert [path for path, _ in parts_of(resnet18(), tuple(only.split("/")))] == paths


def test_widths_may_differ_by_the_kind_of_layer(x: Tensor) -> None:
    spec = "gact:L1.1,only=LayerNorm/GELU+gact:L1,only=Linear"
    setup = schemes.build(spec).apply(TrainingSetup(model(), lambda module, batch: module(batch["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": x.clone().requires_grad_()})

    bits = {entry.module: int(entry.bits) for entry in ledger.entries if entry.packed}
    assert {bits[f"{block}.2"] for block in range(12)} == {8}
    assert {bits[f"{block}.0"] for block in range(12)} == {9}  # with a word for each row of 32
    assert {bits[f"{block}.{index}"] for block in range(12) for index in (1, 3)} == {4}


def test_frozen_norms_are_packed_and_frozen_linear_layers_are_skipped(x: Tensor) -> None:
    frozen = model()
    for layer in frozen.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.requires_grad_(False)
    frozen[11][1].requires_grad_(False)
    spec = "gact:L1.1,only=LayerNorm/11.1"
    setup = schemes.build(spec).apply(TrainingSetup(frozen, lambda module, batch: module(batch["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": x.clone().requires_grad_()})

    assert {entry.module for entry in ledger.entries if entry.packed} == {f"{block}.0" for block in range(12)}


def test_a_range_is_of_numbers_and_not_of_digits() -> None:
    found = schemes.build("fewbit:3,only=[9-11]").apply(TrainingSetup(model()))

    assert [site.path for site in found.sites] == ["9.2", "10.2", "11.2"]


@pytest.mark.parametrize(
    "spec", ["fewbit:3", "checkpoint,blocks=Sequential", "invact", "dropit", "gact:L1,stochastic=false"]
)
def test_all_parts_together_give_the_gradient_of_the_whole(spec: str, x: Tensor) -> None:
    exact = model()
    together = "+".join(f"{spec},only=[{first}-{first + 3}]" for first in (0, 4, 8))
    whole = gradient(converted(f"{spec},only=[0-11]", exact), x)

    assert torch.equal(gradient(converted(together, exact), x), whole)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "spec",
    [
        "randomized:0.5,only=[0-5]",
        "actnn:L2,bits=4,only=[2-9]",
        "gact:L1,only=[0-3]+actnn:L2,bits=8,only=[4-7]",
    ],
)
def test_the_mean_gradient_is_right(spec: str, x: Tensor) -> None:
    """Along the exact gradient; what the noise of one draw adds there is what several draws tell."""
    exact = model()
    truth, limited = gradient(exact, x), converted(spec, exact)

    along = torch.stack([gradient(limited, x) @ truth / truth.square().sum() for _ in range(100)])

    assert along.std() > 0
    assert abs(along.mean() - 1) < 4 * along.std() / 10 + 0.01  # a norm's input gradient is a little too small


def test_a_part_that_a_step_calls_from_inside_is_packed(x: Tensor) -> None:
    exact = nn.Sequential(model(), nn.Linear(8, 8))
    limited = converted("gact:L1,only=0", exact)

    limited[0][3](x).sum().backward()
    one = limited[0][3][1].weight.grad
    copy.deepcopy(exact)[0][3](x).sum().backward()

    assert one is not None
    exact[0][3](x).sum().backward()
    assert not torch.equal(one, exact[0][3][1].weight.grad)
    assert torch.nn.functional.cosine_similarity(one.flatten(), exact[0][3][1].weight.grad.flatten(), dim=0) > 0.9


def test_a_part_that_stands_in_two_places_is_replaced_in_both() -> None:
    shared = nn.GELU()
    module = nn.ModuleDict({"one": nn.Sequential(shared), "other": nn.Sequential(shared)})

    new = converted("fewbit:3,only=one.0", module)

    assert new["one"][0] is new["other"][0]
    assert type(new["one"][0]) is not nn.GELU


def test_a_list_of_modules_is_each_of_them(x: Tensor) -> None:
    """A list is never called, so that what stands around its forward would not run."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.c, self.head = nn.ModuleList(block() for _ in range(3)), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            for each in self.c:
                x = each(x)
            result: Tensor = self.head(x)
            return result

    limited = schemes.build("dropit,only=head+gact:L1,only=c").apply(TrainingSetup(Listed()))

    assert [site.path for site in limited.sites] == ["head", "c.0", "c.1", "c.2"]
    assert not torch.equal(gradient(limited.module, x), gradient(Listed(), x))


def test_a_module_that_has_two_names_is_found_by_each() -> None:
    shared = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    module = nn.ModuleDict({"query": shared, "key": shared, "head": nn.GELU()})

    for only, paths in (("key", ["key.1"]), ("query", ["query.1"]), ("query/key/head", ["query.1", "head"])):
        found = schemes.build(f"fewbit:3,only={only}").apply(TrainingSetup(copy.deepcopy(module)))
        assert [site.path for site in found.sites] == paths


def test_the_batch_of_a_part_at_the_beginning_stays_as_it_is() -> None:
    exact = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(16, 32)
    exact(x).sum().backward()
    limited = converted("gact:L1,only=0", exact)
    limited(x).sum().backward()

    assert torch.equal(limited[0].weight.grad, exact[0].weight.grad)


def test_a_controller_shares_out_bits_by_ones_own_loss_in_each_part(x: Tensor) -> None:
    module = model()
    calls: list[Tensor] = []
    with Controller(module, "gact:L2,only=[0-1]") as controller:
        controller.iterate(lambda: calls.append(loss := module(x).square().mean()) or loss)  # type: ignore[func-returns-value]

    assert len(calls) == 2


def test_parts_without_anything_to_convert_are_passed_over() -> None:
    found = schemes.build("fewbit:3,only=[10-12]").apply(TrainingSetup(model()))

    assert [site.path for site in found.sites] == ["10.2", "11.2"]
    with pytest.raises(NothingToConvertError, match="only=12: none of"):
        schemes.build("fewbit:3,only=12").apply(TrainingSetup(model()))


def test_a_name_that_is_of_no_module_is_an_error_with_the_closest() -> None:
    with pytest.raises(
        NothingToConvertError, match="only=layr1 names no module of ResNet; some of its modules: layer1,"
    ):
        schemes.build("fewbit:3,only=layr1").apply(TrainingSetup(resnet18()))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fewbit,only=[3-1]", "must be a range"),
        ("fewbit,only=h[", "is no path of a module"),
        ("fewbit,only=a..b", "is no path of a module"),
        ("smaq,only=h", "this scheme changes optimizer"),
        ("adam8bit,only=h", "this scheme changes optimizer"),
        ("exact,only=h", "this scheme changes nothing"),
        ("fewbit:3,only=h.0+fewbit:2", "fewbit is given twice; .*only="),
        ("fewbit:3,only=h.0+regelu2", "both replace activation layers"),
        ("gact,only=h.0+offload", "both pack or move saved tensors"),
    ],
)
def test_what_cannot_be_limited_or_overlaps_is_refused_before_there_is_a_model(text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        schemes.build(text)


@pytest.mark.parametrize(
    "text",
    ["fewbit:3,only=[0-3]+fewbit:2,only=3.2", "fewbit:3,only=0.2+regelu2,only=0", "gact,only=[0-3]+offload,only=3"],
)
def test_two_claims_on_one_module_are_refused(text: str) -> None:
    first, second = text.split("+")

    with pytest.raises(ConversionError, match=r"are both for [03]"):
        conversion.convert(model(), text)
    assert {first, second} <= {part.spec for part in schemes.build(text).parts} | {"gact,only=[0-3]"}


def test_the_specification_is_kept() -> None:
    scheme = schemes.build("fewbit:3,functions=gelu,only=encoder.layer.[0-5]/head")

    assert scheme.only == ("encoder.layer.[0-5]", "head")
    assert schemes.build(scheme.spec) == scheme


def test_a_part_that_saves_nothing_is_no_error_where_others_of_the_scheme_act(x: Tensor) -> None:
    frozen = model()
    for layer in frozen[:2]:
        layer.requires_grad_(False)
    setup = schemes.build("gact:L1.1,only=LayerNorm").apply(
        TrainingSetup(frozen, lambda module, batch: module(batch["x"]).sum())
    )
    ledger = inspection.itemize(setup, lambda: {"x": x.clone()})

    packed = {entry.module for entry in ledger.entries if entry.packed}
    assert "0.0" not in packed
    assert "11.0" in packed
    seen = inspection.trace(setup, lambda: {"x": x.clone()})
    assert inspection.inspect(seen, seen, setup)[0]


def test_neighbouring_stars_are_one() -> None:
    assert compiled("*" * 40 + "x") == compiled("*x")
    assert compiled("*" * 1000) == compiled("*")


def test_the_stars_of_a_pattern_are_matched_without_going_back() -> None:
    """Going back over each of 40 stars would never end."""
    pattern = compiled("*a" * 40 + "b.x")

    assert not pattern.fullmatch("a" * 200 + ".x")
    assert pattern.fullmatch("a" * 200 + "b.x")


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*1*", "layer1", True),
        ("*[1-12]*x", "layer12x", True),
        ("*[10-12].*.q*", "layer11.attention.query", True),
        ("*[10-12].*.q*", "layer1.attention.query", False),
        ("a*b*c", "abxbc", True),
        ("a*b*c", "ab.bc", False),
        ("*.*", "a.b.c", False),
    ],
)
def test_stars_match_any_text_in_one_name(pattern: str, path: str, matches: bool) -> None:
    assert bool(compiled(pattern).fullmatch(path)) is matches


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*a" * 51, "at most 50 stars and ranges, and this one 51"),
        ("[0-9999]" * 2, "at most 10000 numbers in all, and these 20000"),
        ("layer.[3-1]", "from a smaller to a larger number"),
    ],
)
def test_a_pattern_has_no_more_than_any_path_needs(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compiled(pattern)
    with pytest.raises(SpecError, match="only"):
        schemes.build(f"fewbit:3,only={pattern}")


def test_patterns_are_bounded() -> None:
    with pytest.raises(SpecError, match="has 2001 patterns and may have 2000"):
        schemes.build(f"fewbit:3,only={'/'.join(['a'] * 2001)}")
