"""Sampled products of activations: no bias, bytes, which products stay, and blocks that run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.measuring import inspection
from actbench.methods.randomized.ops.sketch import Sketching
from actbench.methods.randomized.ops.sketch.samples import compress, winner_take_all
from actbench.methods.randomized.products import sampled_product
from actbench.model.records import Case
from actbench.packing import savedtensors
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme

SHAPES = [((2, 3, 17, 8), (2, 3, 8, 21)), ((5, 9, 4), (5, 4, 11)), ((1, 30, 1), (1, 1, 30))]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def product_gradients(a: Tensor, b: Tensor, ratio: float | None) -> tuple[Tensor, ...]:
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    output = torch.matmul(a, b) if ratio is None else sampled_product(Sketching("wta", ratio), torch.matmul, a, b)
    torch.testing.assert_close(output, torch.matmul(a, b), rtol=0, atol=0)
    weights = torch.randn(output.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(output, (a, b), weights)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_the_mean_gradient_of_both_factors_is_the_exact_one(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a = torch.randn(first, dtype=torch.float64) * torch.rand(*first[:-1], 1).double()
    b = torch.randn(second, dtype=torch.float64)
    exact = product_gradients(a, b, None)
    draws = [product_gradients(a, b, 0.4) for _ in range(300)]

    for index, wanted in enumerate(exact):
        found = torch.stack([draw[index] for draw in draws])
        one = float((found - wanted).flatten(1).norm(dim=1).square().mean().sqrt())
        assert one > 0.05 * float(wanted.norm())
        assert float((found.mean(0) - wanted).norm()) < 1.5 * one / 300**0.5


def test_a_matrix_of_a_batch_is_sampled_as_one_alone_and_the_longest_rows_are_whole() -> None:
    x = torch.randn(20, 6)
    x[4], x[11] = 50, -80
    rows, numbers = compress(x, torch.tensor(3), 8, "wta")
    norms = torch.linalg.vector_norm(x, dim=1).double()
    chosen, weights = winner_take_all(torch.stack((norms, norms)), torch.tensor(3), 8)

    assert torch.equal(chosen[0], numbers.long())
    torch.testing.assert_close(rows, x[chosen[0]] * weights[0, :, None].float())
    assert not torch.equal(chosen[0], chosen[1])  # drawn by other numbers
    for found, weight in zip(chosen, weights, strict=True):
        assert found[:2].tolist() == [11, 4]
        assert weight[:2].tolist() == [1, 1]


def test_samples_take_their_bytes_and_an_operand_that_needs_no_gradient_is_not_sampled() -> None:
    a, b = torch.randn(2, 3, 17, 8, requires_grad=True), torch.randn(2, 3, 8, 21)

    before = set(map(id, savedtensors.packed_storages()))  # other tests may have left some

    with savedtensors.observing():
        output = sampled_product(Sketching("wta", 0.4), torch.matmul, a, b)
        packed = [storage for storage in savedtensors.packed_storages() if id(storage) not in before]
        found = {savedtensors.source_of(storage): 0 for storage in packed}
        for storage in packed:
            found[savedtensors.source_of(storage)] += storage.nbytes()

    wanted = 6 * 8 * (8 * 4 + 4)  # six matrices, 8 of 21 columns of 8 floats
    assert [(each.packed_bytes, size) for each, size in found.items() if each is not None] == [(wanted, wanted)]
    (grad,) = torch.autograd.grad(output.sum(), a)
    assert grad.shape == a.shape


@pytest.mark.parametrize(
    ("first", "second"), [((4, 5), (5, 6)), ((3, 4, 5), (5, 6)), ((2, 3, 4, 5), (2, 1, 5, 6)), ((2, 1, 5), (2, 5, 1))]
)
def test_other_products_are_torch_s_own(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    a, b = torch.randn(first), torch.randn(second)

    torch.testing.assert_close(product_gradients(a, b, 0.4), product_gradients(a, b, None))


@pytest.mark.parametrize("product", [torch.bmm, torch.matmul])
def test_factors_by_name_are_sampled_and_results_by_name_are_torch_s_own(product: Callable[..., Tensor]) -> None:
    a, b = torch.randn(2, 9, 8, requires_grad=True), torch.randn(2, 8, 9)
    exact, rule = product(a, b), partial(sampled_product, Sketching("wta", 0.4), product)
    second, wrong = ("mat2", "other") if product is torch.bmm else ("other", "mat2")

    for found in (rule(a, b), rule(a, **{second: b}), rule(input=a, **{second: b})):
        assert torch.equal(found, exact)
        assert found.grad_fn is not None
        assert found.grad_fn.name() == "SampledProductBackward"
    for args, named in (((a,), {wrong: b}), ((a, b), {"input": a}), ((a,), {}), ((), {"input": a})):
        with pytest.raises(TypeError):
            rule(*args, **named)
    with torch.no_grad():
        assert torch.equal(rule(a, b, out=torch.empty(2, 9, 9)), exact)


@pytest.mark.parametrize(
    ("product", "a", "b"),
    [
        (torch.matmul, torch.randn(2, 9, 8), torch.randn(2, 8, 9).double()),
        (torch.matmul, torch.randn(2, 9, 8).bfloat16(), torch.randn(2, 8, 9)),
        (torch.matmul, torch.randn(2, 9, 8), torch.ones(2, 8, 9, dtype=torch.long)),
        (torch.bmm, torch.randn(2, 3, 9, 8), torch.randn(2, 3, 8, 9)),
    ],
)
def test_products_that_torch_refuses_are_refused(product: Callable[..., Tensor], a: Tensor, b: Tensor) -> None:
    with pytest.raises(RuntimeError):
        sampled_product(Sketching("wta", 0.4), product, a.requires_grad_(), b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_have_its_type(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 9, 8, requires_grad=True), torch.randn(2, 8, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        wanted, found = torch.matmul(a, b), sampled_product(Sketching("wta", 0.4), torch.matmul, a, b)
    found.float().sum().backward()

    assert torch.equal(found, wanted)
    assert found.dtype == dtype
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


class Attention(nn.Module):
    """One head of attention, with products and dropout as functions."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.softmax(query @ key.transpose(-2, -1) / 4, -1)
        return torch.matmul(nn.functional.dropout(scores, 0.1, self.training), value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attend(self.query(x), self.key(x), self.value(x)))
        return x + torch.relu(out)


def test_the_bytes_of_attention_are_those_of_its_samples_and_masks() -> None:
    exact = nn.Sequential(Doubled(), Attention())
    setup = schemes.build("wtacrs:0.25").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))
    entries = inspection.itemize(setup, lambda: {"x": torch.randn(2, 40, 16, requires_grad=True)}).entries
    packed = sorted(entry.kept_bytes for entry in entries if entry.packed)

    sketch = 20 * (16 * 4 + 4)  # 20 of 80 rows, once for query, key and value, and once for the last layer
    tokens, columns = 2 * 10 * (16 * 4 + 4), 2 * 4 * (40 * 4 + 4)  # queries and keys; columns of values
    probabilities = 2 * 10 * (40 * 4 + 4)
    assert sum(packed) == 2 * sketch + 2 * tokens + columns + probabilities + 2 * 40 * 40 // 8 + 2 * 40 * 16 // 8
    softmax = [entry for entry in entries if not entry.packed and math.prod(entry.shape) == 2 * 40 * 40]
    assert len(softmax) == 1


class Around(nn.Module):
    """A block that runs again in the backward pass, by a module or by a function of its own."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.inside, self.by_function = Attention(), by_function

    def forward(self, x: Tensor) -> Tensor:
        of = self._again if self.by_function else self.inside
        result: Tensor = checkpoint(of, x, use_reentrant=False)
        return result

    def _again(self, x: Tensor) -> Tensor:
        return self.inside.attend(x, 0.5 * x, x) + self.inside(x)


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Doubled(), Attention(), Attention()),
        lambda: nn.Sequential(Doubled(), Around(by_function=False)),
        lambda: nn.Sequential(Doubled(), Around(by_function=True)),
    ],
    ids=["plain", "a module again", "a function again"],
)
@pytest.mark.parametrize("more", ["", "+checkpoint,blocks=Attention,every=1"])
def test_the_mean_gradient_of_attention_is_the_exact_one(make: Callable[[], nn.Module], more: str) -> None:
    exact, x = make().eval(), torch.randn(2, 12, 16)
    wanted = torch.cat([grad.flatten() for grad in gradients(exact, x)])
    model = converted(exact, f"wtacrs:0.5{more}")
    draws = torch.stack([torch.cat([grad.flatten() for grad in gradients(model, x)]) for _ in range(80)])

    one = float((draws - wanted).norm(dim=1).square().mean().sqrt())
    assert one > 0.05 * float(wanted.norm())
    assert float((draws.mean(0) - wanted).norm()) < 1.5 * one / 80**0.5


@pytest.mark.slow
def test_t5_saves_what_each_part_of_the_paper_saves() -> None:
    """Linear layers, then products and masks, then norms; the forward pass is exact throughout."""
    model = "t5-small@num_layers=2,vocab_size=100"
    case = Case(model=model, batch_size=8, sequence_length=64, attention="eager", target_length=3)
    workload = workloads.load_workload(case)
    batch = workload.batch(8, seed=0)

    def kept(spec: str) -> int:
        setup = schemes.build(spec).apply(workload.setup(materialize=False, seed=0))
        return inspection.trace(setup, lambda: batch).total_bytes

    exact, linear, products, whole = map(kept, ("exact", "randomized:0.3,sketch=wta", "wtacrs:0.3", "wtacrs:0.3+msln"))
    assert exact > linear > products > whole
    assert products < 0.45 * linear
    assert whole < 0.3 * exact


def test_wrong_models_and_values_are_refused() -> None:
    with pytest.raises(NothingToConvertError, match=r"wtacrs: Sequential has no nn.Linear"):
        converted(nn.Sequential(nn.LayerNorm(8)), "wtacrs")
    with pytest.raises(ConversionError, match="wtacrs: the model holds sketched layers already"):
        converted(converted(nn.Sequential(nn.Linear(8, 8)), "wtacrs"), "wtacrs")
    with pytest.raises(ConversionError, match="products of activations are sampled cannot be"):
        converted(nn.Sequential(torch.compile(nn.Linear(8, 8))), "wtacrs")  # type: ignore[arg-type]
    for spec in ("wtacrs:0", "wtacrs:1"):
        with pytest.raises(SpecError):
            schemes.build(spec)


@pytest.mark.exhaustive
def test_the_contract_of_schemes_holds() -> None:
    check_scheme("wtacrs:0.5")
    check_scheme("wtacrs:0.3+msln", on="t5-small@num_layers=2", parts=("mean gradient", "simulation", "packed bytes"))


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "model",
    [
        "tiny-gpt2@resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
        "tiny-roberta@hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
        pytest.param("t5-small@num_layers=2,vocab_size=100,dropout_rate=0.0", marks=pytest.mark.exhaustive),
        "resnet-cifar",
    ],
)
def test_the_mean_gradient_of_a_whole_model_is_the_exact_one(model: str) -> None:
    attention = {} if model == "resnet-cifar" else {"attention": "eager", "sequence_length": 16}
    workload = workloads.load_workload(Case(model=model, batch_size=2, **attention))  # type: ignore[arg-type]
    batch = workload.batch(2, seed=0)

    def gradient(setup: TrainingSetup) -> Tensor:
        setup.module.zero_grad()
        setup.forward(batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in setup.module.parameters() if p.grad is not None]).double()

    wanted = gradient(workload.setup(materialize=True, seed=0))
    setup = schemes.build("wtacrs:0.5").apply(workload.setup(materialize=True, seed=0))
    draws = [gradient(setup) for _ in range(40)]

    one = float(torch.stack([(draw - wanted).norm().square() for draw in draws]).mean().sqrt())
    assert one > 0.01 * float(wanted.norm())
    assert float((sum(draws) / 40 - wanted).norm()) < 1.5 * one / 40**0.5  # type: ignore[union-attr]
