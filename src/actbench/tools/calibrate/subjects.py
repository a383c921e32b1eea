"""What a calibration runs: operators of several sizes, and small models under every scheme."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes, workload as workloads
from actbench.model.records import Case
from actbench.ops import hostmemory
from actbench.scheme.base import Change
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.workload.base import moved

Call = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """Something to run at several sizes, from small to large; ``make`` returns a function that runs it at one."""

    name: str
    make: Callable[[Any], Call]
    sizes: Sequence[Any]


ELEMENTS = (2**12, 2**15, 2**18, 2**20, 2**23)
ELEMENTS_CUDA = (*ELEMENTS, 2**26)

PRODUCTS = (
    *((size, size, size) for size in (32, 64, 128, 256, 512, 1024)),
    *((2048, 64, 64), (2048, 192, 768), (2048, 768, 192), (512, 768, 3072), (512, 3072, 768)),
    *((2048, 256, 8), (2048, 8, 256), (1024, 96, 8), (1024, 8, 96), (512, 768, 8), (512, 8, 768)),
)
PRODUCTS_CUDA = (*PRODUCTS, (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
BATCHES = ((8, 32, 16, 32), (48, 128, 32, 128), (32, 200, 64, 200), (16, 512, 64, 512))
"""Matrices, rows, inner, columns, as in attention without a fused kernel."""
ATTENTIONS = ((2, 4, 32, 32), (8, 4, 128, 32), (4, 12, 256, 64), (2, 16, 1024, 64))
"""Samples, heads, rows, width."""
CONVOLUTIONS = (
    *((8, 16, 32, 16, 3, 1, 1), (32, 16, 32, 16, 3, 1, 1), (32, 32, 16, 32, 3, 1, 1), (32, 32, 16, 64, 3, 2, 1)),
    *((2, 64, 56, 64, 1, 1, 1), (2, 64, 56, 64, 3, 1, 1), (4, 64, 56, 256, 1, 1, 1), (4, 128, 28, 128, 3, 1, 1)),
    *((4, 256, 14, 1024, 1, 1, 1), (4, 256, 14, 256, 3, 1, 1), (4, 512, 7, 512, 3, 1, 1), (2, 3, 224, 64, 7, 2, 1)),
    *((2, 64, 56, 64, 3, 1, 64), (4, 256, 14, 256, 3, 1, 256), (2, 128, 28, 128, 3, 1, 32), (4, 512, 7, 512, 3, 1, 32)),
)
CONVOLUTIONS_CUDA = (
    *CONVOLUTIONS,
    *((64, 3, 224, 64, 7, 2, 1), (64, 64, 56, 64, 3, 1, 1), (64, 64, 56, 256, 1, 1, 1), (64, 128, 28, 128, 3, 1, 1)),
    *(
        (64, 256, 56, 512, 1, 2, 1),
        (64, 256, 14, 256, 3, 1, 1),
        (64, 1024, 14, 256, 1, 1, 1),
        (64, 512, 7, 512, 3, 1, 1),
    ),
)
"""Samples, input channels, side in pixels, output channels, kernel, stride, groups."""

_CACHES = 2**26
"""Bytes, more than the caches of most processors and cards."""

_WIDE = "num_hidden_layers=1,hidden_size=192,num_attention_heads=3,intermediate_size=768"
STEPS: tuple[tuple[dict[str, Any], Sequence[int]], ...] = (
    ({"model": f"tiny-roberta@{_WIDE}", "sequence_length": 96}, (1, 20)),
    ({"model": "resnet18", "image_size": 64, "optimizer": "sgd-momentum"}, (1, 12)),
    ({"model": f"tiny-llama@{_WIDE},num_key_value_heads=3", "sequence_length": 96}, (1, 20)),
)
"""Models, and the batch sizes of their steps."""

SMALL: dict[str, Any] = {"model": "resnet-cifar@depth=8,width=24", "optimizer": "sgd-momentum"}
"""A network whose tensors stay in the caches where batches are small; single layers are measured without."""

WITH_OPERATORS: frozenset[Change] = frozenset(("saved tensors", "optimizer", "gradients", "parameters", "precision"))
"""Kinds of changes for which schemes run operators that the exact model does not have."""

NEEDING = {"encode": ("encode:bf16", "encode:s2fp8", "encode:int:8")}
"""Specifications of schemes that need a value."""


def single(device: torch.device, dtype: torch.dtype) -> Iterator[Subject]:
    """Yield operators by kind, on tensors of one dtype."""
    on_cuda = device.type == "cuda"
    make = partial(torch.randn, device=device, dtype=dtype)
    elements: tuple[int, ...] = ELEMENTS_CUDA if on_cuda else ELEMENTS
    if not on_cuda and dtype != torch.float32:
        elements = elements[:-1]
    yield Subject("products of matrices", partial(_product, make), PRODUCTS_CUDA if on_cuda else PRODUCTS)
    yield Subject("products of batches", partial(_batched, make), BATCHES)
    yield Subject("attention", partial(_attention, make), ATTENTIONS)
    if on_cuda or dtype == torch.float32:  # bfloat16 takes minutes on processors without its instructions
        for layout in (torch.contiguous_format, torch.channels_last):
            last = "" if layout is torch.contiguous_format else " with channels last"
            sizes = CONVOLUTIONS_CUDA if on_cuda else CONVOLUTIONS
            yield Subject(f"convolutions{last}", partial(_convolution, make, layout), sizes)
    if dtype == torch.float32:
        for spec in ("exact", "actnn"):
            yield Subject(f"{spec}: steps of a small network", stepping(device, SMALL, spec), (4, 24))
    yield Subject("elementwise operators and reductions", partial(_rows, make), elements)
    yield Subject("layers of images", partial(_images, make), elements)
    yield Subject("optimizers", partial(_optimizers, make), elements)
    yield Subject("copies", partial(_copies, make), elements)


def steps(device: torch.device, spec: str) -> list[Subject]:
    """Return the steps of small models under a scheme."""
    return [
        Subject(f"{spec} on {settings['model'].partition('@')[0]}", stepping(device, settings, spec), batches)
        for settings, batches in STEPS
    ]


def specs_of_schemes() -> list[str]:
    """Return a specification of every scheme with its own operators; those that change precision come last."""
    specs = [spec for name in schemes.scheme_names() for spec in NEEDING.get(name, (name,))]
    changes = {spec: schemes.build(spec).changes for spec in specs}
    found = [spec for spec in specs if not WITH_OPERATORS.isdisjoint(changes[spec])]
    return sorted(found, key=lambda spec: "precision" in changes[spec])


def stepping(device: torch.device, settings: dict[str, Any], spec: str) -> Callable[[int], TrainStep]:
    """Return a function from a batch size to a training step.

    The first call builds the model, and raises an ActbenchError if the scheme finds nothing in it to work on.
    """
    case = Case(**settings, scheme=spec, batch_size=1, meter="cuda" if device.type == "cuda" else "cpu")
    workload = workloads.load_workload(case)

    @functools.cache
    def setup() -> TrainingSetup:
        exact = workload.setup(materialize=True, seed=0)
        exact.module.to(device)
        return schemes.build(spec).apply(exact)

    return lambda batch_size: TrainStep(setup(), moved(workload.batch(batch_size, seed=0), device))


def _both_ways(compute: Callable[[], Tensor], *leaves: Tensor) -> Call:
    """Return a function that computes a tensor and the gradients of ``leaves``."""
    gradient = torch.ones_like(compute().detach())

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        output = compute()
        _leave_caches(gradient.device)
        output.backward(gradient)  # type: ignore[no-untyped-call]

    return run


def _leave_caches(device: torch.device) -> None:
    """Write so many bytes that earlier data leave the caches, as between the passes of a model."""
    torch.zeros(_CACHES, dtype=torch.uint8, device=device)


def _product(make: Callable[..., Tensor], size: tuple[int, int, int]) -> Call:
    rows, inner, columns = size
    x = make(rows, inner, requires_grad=True)
    weight, bias = make(columns, inner, requires_grad=True), make(columns, requires_grad=True)
    whole, half = _both_ways(lambda: F.linear(x, weight, bias), x, weight, bias), _both_ways(lambda: x @ weight.t(), x)

    def run() -> None:
        whole()
        half()
        bias.detach().expand(rows, columns).clone().addmm_(x.detach(), weight.detach().t())

    return run


def _batched(make: Callable[..., Tensor], size: tuple[int, int, int, int]) -> Call:
    matrices, rows, inner, columns = size
    left, right = make(matrices, rows, inner, requires_grad=True), make(matrices, columns, inner, requires_grad=True)
    return _both_ways(lambda: left @ right.transpose(1, 2), left, right)


def _attention(make: Callable[..., Tensor], size: tuple[int, int, int, int]) -> Call:
    q, k, v = (make(*size, requires_grad=True) for _ in range(3))
    return _both_ways(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)


def _convolution(make: Callable[..., Tensor], layout: torch.memory_format, size: tuple[int, ...]) -> Call:
    samples, channels, side, out, kernel, stride, groups = size
    shapes = (samples, channels, side, side), (out, channels // groups, kernel, kernel)
    x, weight = (make(*shape).contiguous(memory_format=layout).requires_grad_() for shape in shapes)
    return _both_ways(lambda: F.conv2d(x, weight, None, stride, kernel // 2, 1, groups), x, weight)


def _rows(make: Callable[..., Tensor], elements: int) -> Call:
    width = min(elements // 8, 256)
    x = make(elements // width, width, requires_grad=True)
    norm = nn.LayerNorm(width, device=x.device, dtype=x.dtype)

    def compute() -> Tensor:
        y = norm(F.gelu(x) + x)
        y = F.dropout(F.silu(y), 0.1) * torch.tanh(x)
        y = torch.softmax(y, -1) + F.log_softmax(x, -1) + x.square().mean(-1, keepdim=True).rsqrt()
        halves = torch.cat(y.chunk(2, -1)[::-1], -1)
        return halves.view(-1, 2, width).transpose(0, 1).contiguous().sum(-1) / 2

    return _both_ways(compute, x)


def _images(make: Callable[..., Tensor], elements: int) -> Call:
    side = 8 if elements < 2**18 else 32
    x = make(max(1, elements // (16 * side * side)), 16, side, side, requires_grad=True)
    norm = nn.BatchNorm2d(16, device=x.device, dtype=x.dtype)

    def compute() -> Tensor:
        y = F.relu(norm(x), inplace=True) + x
        return F.max_pool2d(F.relu(y), 3, 2, 1).mean((2, 3))

    return _both_ways(compute, x)


def _optimizers(make: Callable[..., Tensor], elements: int) -> Call:
    weight = make(elements, requires_grad=True)
    weight.grad = make(elements)
    each = [torch.optim.AdamW([weight]), torch.optim.SGD([weight], lr=1e-6, momentum=0.9, weight_decay=1e-6)]

    def run() -> None:
        for optimizer in each:
            _leave_caches(weight.device)
            optimizer.step()

    return run


def _copies(make: Callable[..., Tensor], elements: int) -> Call:
    source, target = make(elements), make(elements)

    def run() -> None:
        target.copy_(source)
        host = hostmemory.to_host(source)
        hostmemory.from_host(host, source.device)
        torch.zeros_like(source).fill_(1)

    return run
