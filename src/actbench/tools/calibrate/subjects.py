"""What a calibration runs: operators of several sizes, and steps of small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench import scheme as schemes, workload as workloads
from actbench.model.records import Case
from actbench.ops import hostmemory
from actbench.scheme.setup import TrainStep
from actbench.workload.base import moved


class Subject(NamedTuple):
    """Something to run at several sizes, from small to large.

    Attributes:
        is_step: Whether it is the step of a model under a scheme, of which a device may lack operators.
    """

    name: str
    run: Callable[..., object]
    sizes: Sequence[tuple[int, ...]]
    is_step: bool = False


_ELEMENTS = ((2**12,), (2**15,), (2**18,), (2**20,), (2**23,))
_PRODUCTS = (
    *((size, size, size) for size in (32, 64, 128, 256, 512, 1024)),
    *((2048, 192, 768), (2048, 768, 192), (512, 768, 3072), (2048, 256, 8), (2048, 8, 256), (512, 8, 768)),
)
"""Rows, inner, columns."""
_ATTENTIONS = ((2, 4, 32, 32), (8, 4, 128, 32), (4, 12, 256, 64), (2, 16, 1024, 64))
"""Samples, heads, rows, width."""
_CONVOLUTIONS = (
    *((32, 16, 32, 16, 3, 1, 1), (32, 32, 16, 64, 3, 2, 1), (2, 64, 56, 64, 3, 1, 1), (4, 64, 56, 256, 1, 1, 1)),
    *((4, 256, 14, 1024, 1, 1, 1), (4, 256, 14, 256, 3, 1, 1), (4, 512, 7, 512, 3, 1, 1), (2, 3, 224, 64, 7, 2, 1)),
    *((2, 64, 56, 64, 3, 1, 64), (4, 256, 14, 256, 3, 1, 256), (2, 128, 28, 128, 3, 1, 32), (4, 512, 7, 512, 3, 1, 32)),
)
"""Samples, input channels, side in pixels, output channels, kernel, stride, groups."""
_CUDA_PRODUCTS = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
_CUDA_CONVOLUTIONS = ((64, 3, 224, 64, 7, 2, 1), (64, 64, 56, 256, 1, 1, 1), (64, 256, 14, 256, 3, 1, 1))
PACKING = ("fewbit:3", "actnn:L2", "gact:L1", "randomized:0.2", "smaq", "adam8bit", "coat", "backrazor:0.25", "qlora:8")
"""Schemes whose operators are measured in steps of a small model."""
_WIDE = "tiny-roberta@num_hidden_layers=1,hidden_size=192,num_attention_heads=3,intermediate_size=768"

_NETWORKS = tuple(("resnet-cifar@depth=8,width=24", spec, ((4,), (24,))) for spec in ("exact", "actnn"))
"""Networks whose tensors stay in the caches where batches are small; single layers are measured without."""


def subjects(device: torch.device, schemes: Sequence[str]) -> Iterator[Subject]:
    """Yield all that is run, the most important first; half types may take minutes on a processor."""
    halves = _single(device, torch.bfloat16)
    yield from _single(device, torch.float32)
    if device.type == "cuda":
        yield from halves
    for model, spec, sizes in (*_NETWORKS, *((_WIDE, spec, ((1,), (20,))) for spec in schemes)):
        name = f"{spec} on {model.partition('@')[0]}"
        yield Subject(name, partial(_step, device, spec, model), sizes, is_step=True)
    yield from halves  # none are left on CUDA


def _step(device: torch.device, spec: str, model: str, batch_size: int) -> None:
    step_of(device, spec, batch_size, model=model)()


def _single(device: torch.device, dtype: torch.dtype) -> Iterator[Subject]:
    on_cuda = device.type == "cuda"
    make = partial(torch.randn, device=device, dtype=dtype)

    def copies(elements: int) -> None:
        torch.empty_like(x := make(elements)).copy_(x)
        hostmemory.from_host(hostmemory.to_host(x), device)

    def products(rows: int, inner: int, columns: int) -> None:
        x, weight, bias = make(rows, inner), make(columns, inner), make(columns)
        _both_ways(lambda x: x @ weight.t(), x)
        _both_ways(F.linear, x, weight, bias)
        _both_ways(lambda left, right: left @ right, x.view(4, -1, inner), make(4, inner, columns))

    def convolutions(layout: torch.memory_format, n: int, channels: int, side: int, out: int, *how: int) -> None:
        kernel, stride, groups = how
        x, weight = make(n, channels, side, side), make(out, channels // groups, kernel, kernel)
        leaves = (leaf.contiguous(memory_format=layout) for leaf in (x, weight))
        _both_ways(lambda x, weight: F.conv2d(x, weight, None, stride, kernel // 2, 1, groups), *leaves)

    def attention(*shape: int) -> None:
        _both_ways(partial(F.scaled_dot_product_attention, is_causal=True), *(make(*shape) for _ in range(3)))

    def layers(elements: int) -> None:
        rows = make(elements // 64, 64)
        _both_ways(_layers, rows, torch.rand_like(rows[0]), torch.rand_like(rows[1]))

    def optimizers(elements: int) -> None:
        weight = make(elements)
        weight.grad = make(elements)
        torch.optim.AdamW([weight]).step()
        torch.optim.SGD([weight], momentum=0.9, weight_decay=0.1).step()

    yield Subject("copies", copies, (*_ELEMENTS, *(((2**26,),) if on_cuda else ())))
    yield Subject("products of matrices", products, (*_PRODUCTS, *(_CUDA_PRODUCTS if on_cuda else ())))
    if on_cuda or dtype == torch.float32:  # bfloat16 takes minutes on processors without its instructions
        sizes = (*_CONVOLUTIONS, *(_CUDA_CONVOLUTIONS if on_cuda else ()))
        yield Subject("convolutions", partial(convolutions, torch.contiguous_format), sizes)
        yield Subject("convolutions with channels last", partial(convolutions, torch.channels_last), sizes)
    yield Subject("attention", attention, _ATTENTIONS)
    yield Subject("elementwise operators and reductions", layers, _ELEMENTS)
    yield Subject("optimizers", optimizers, _ELEMENTS)


def step_of(device: torch.device, spec: str, batch_size: int, *, model: str = "tiny-roberta") -> TrainStep:
    """Return the training step of a model under a scheme; an ActbenchError if they do not go together."""
    meter = "cuda" if device.type == "cuda" else "cpu"
    length = 96 if model.startswith("tiny-roberta") else None
    case = Case(model=model, scheme=spec, batch_size=batch_size, sequence_length=length, meter=meter)
    workload = workloads.load_workload(case)
    exact = workload.setup(materialize=True, seed=0)
    exact.module.to(device)
    return TrainStep(schemes.build(spec).apply(exact), moved(workload.batch(batch_size, seed=0), device))


def _both_ways(compute: Callable[..., Tensor], *leaves: Tensor) -> None:
    output = compute(*(leaf.detach().requires_grad_() for leaf in leaves))
    output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]


def _layers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what elementwise operators, reductions, normalizations and look-ups make of rows of 64 elements."""
    y = F.layer_norm(F.gelu(x) + x, (64,), weight, bias)
    y = F.dropout(F.silu(y), 0.1) * torch.tanh(x)
    y = torch.softmax(y, -1) + F.log_softmax(x, -1) + x.square().mean(-1, keepdim=True).rsqrt()
    y = F.embedding(torch.arange(len(y), device=y.device), y)
    images = F.batch_norm(y.view(-1, 64, 8, 8), None, None, weight, bias, training=True)
    images = F.max_pool2d(F.relu(F.relu(images, inplace=True) + 1), 3, 2, 1)
    return torch.cat(images.chunk(2), 1).transpose(0, 1).contiguous().mean((2, 3)) / 2
