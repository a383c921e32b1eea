"""Layers and losses of language models, as the benchmarks of Liger Kernel run what they compare its kernels with.

A name is that of a layer and the size that the benchmark varies: ``layers.py:swiglu_4096``; ``forward`` in it runs no
backward pass. Each benchmark makes its tensors, and takes the peak of ten runs of forward and backward pass, between
which gradients are not zeroed; where it says so, the graph stays until the pass ends. Two such runs, which the loss
makes by itself, have the same peak. Tensors of layers that multiply nothing have no two dimensions, by which a model is
known that does. Where the benchmark reads values (experts of tokens), they are spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

HALF = torch.bfloat16
WIDTH, WORDS = 4096, 128256
RUNS = 2

Script = Callable[["Held"], Callable[[], None]]


class Held(nn.Module):
    """What a benchmark makes: layers, tensors with gradients, and others."""

    def __init__(self, script: Script, layers: Mapping[str, nn.Module] | None = None, **tensors: Tensor) -> None:
        super().__init__()
        self.script = script
        self.anchor = nn.Parameter(torch.zeros(1))
        for name, layer in (layers or {}).items():
            self.add_module(name, layer)
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self.register_parameter(name, nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(name, tensor)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that gets gradients."""
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def runs(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run the script of a benchmark, and return a loss that trains nothing."""
    assert isinstance(module, Held)
    run = module.script(module)
    for _ in range(RUNS):
        run()
    return module.anchor.sum() * batch["nothing"].sum()


def built(made: Callable[[], Held]) -> Any:
    """Return a model of what a benchmark makes, an empty batch, and the loss that runs it."""
    return (
        made(),
        lambda samples: {"nothing": torch.zeros(samples)},
        runs,
        lambda module: torch.optim.SGD([module.anchor], lr=0.1),
    )


def backward(found: Callable[[], Tensor], given: Tensor | None = None, *, keep: bool = True) -> Callable[[], None]:
    """Return a run with a gradient that was made before, or is made for each."""

    def run() -> None:
        out = found()
        out.backward(torch.randn_like(out) if given is None else given, retain_graph=keep)

    return run


def forward(found: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a run without a backward pass."""

    def run() -> None:
        found()

    return run


def cross_entropy(words: int) -> Held:
    """Return float32 logits of 8 x 2048 tokens."""

    def script(held: Any) -> Callable[[], None]:
        return lambda: F.cross_entropy(held.x.squeeze(0), held.target).backward()

    return Held(script, x=leaf(1, 16384, words), target=torch.randint(words, (16384,)))


def mlp(
    length: int, *, samples: int, width: int, inner: int, act: str, only: bool = False, tiles: int | None = None
) -> Held:
    """Return Llama's MLP in 16 bits, with hidden states that get gradients; ``tiles`` recomputes it by parts."""
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, hidden_act=act)

    def script(held: Any) -> Callable[[], None]:
        def found() -> Tensor:
            return held.mlp(held.x) if tiles is None else Tiled.apply(held.mlp, held.x, tiles)

        return forward(found) if only else backward(found)

    return Held(script, {"mlp": LlamaMLP(config).to(HALF)}, x=leaf(samples, length, width, dtype=HALF))


class Tiled(torch.autograd.Function):
    """DeepSpeed's tiled MLP: parts without a graph, which the backward pass makes again one after the other."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, tiles: int) -> Tensor:
        """Return the output, put together of parts."""
        ctx.layer, ctx.tiles = layer, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = [layer(part) for part in x.chunk(tiles, dim=-2)]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Write the gradient of each part into that of the whole."""
        (x,) = ctx.saved_tensors
        flat, incoming = x.detach().view(-1, x.shape[-1]), gradient.view(-1, x.shape[-1])
        whole = torch.zeros_like(flat)
        for part, into, given in zip(*(each.chunk(ctx.tiles) for each in (flat, whole, incoming)), strict=True):
            part.requires_grad_()
            part.grad = into
            with torch.enable_grad():
                out = ctx.layer(part)
            torch.autograd.backward(out, given)
        return None, whole.view_as(x), None


_large = partial(mlp, width=WIDTH, inner=11008)
_tiled = partial(mlp, samples=2, width=2048, inner=4096)
geglu = partial(_large, samples=8, act="gelu_pytorch_tanh")
geglu_forward = partial(_large, samples=8, act="gelu_pytorch_tanh", only=True)
swiglu = partial(_large, samples=4, act="silu")
small_geglu = partial(_tiled, act="gelu_pytorch_tanh")
small_geglu_forward = partial(_tiled, act="gelu_pytorch_tanh", only=True)
small_swiglu = partial(_tiled, act="silu")
small_swiglu_forward = partial(_tiled, act="silu", only=True)
tiled_geglu = partial(_tiled, act="gelu_pytorch_tanh", tiles=4)
tiled_geglu_forward = partial(_tiled, act="gelu_pytorch_tanh", tiles=4, only=True)
tiled_swiglu = partial(_tiled, act="silu", tiles=4)
tiled_swiglu_forward = partial(_tiled, act="silu", tiles=4, only=True)


def norm(width: int, *, shape: tuple[int, ...], layer: Callable[[int], nn.Module], dtype: torch.dtype) -> Held:
    """Return a norm of the last of the dimensions, with a gradient made before."""

    def script(held: Any) -> Callable[[], None]:
        return backward(lambda: held.norm(held.x), held.given)

    whole = (*shape, width)
    return Held(script, {"norm": layer(width)}, x=leaf(*whole, dtype=dtype), given=torch.randn(whole, dtype=dtype))


layer_norm = partial(norm, shape=(1, 4096), layer=nn.LayerNorm, dtype=torch.float32)
rms_norm = partial(norm, shape=(1, 2048), layer=LlamaRMSNorm, dtype=HALF)


def group_norm(channels: int) -> Held:
    """Return torch's norm of groups of four channels."""

    def script(held: Any) -> Callable[[], None]:
        return backward(lambda: held.norm(held.x), held.given)

    shape = (128, channels, 512)
    return Held(script, {"norm": nn.GroupNorm(channels // 4, channels)}, x=leaf(*shape), given=torch.randn(shape))


def torch_rms_norm(width: int) -> Held:
    """Return torch's own norm of 4096 tokens, of which the sum is differentiated."""

    def script(held: Any) -> Callable[[], None]:
        def run() -> None:
            out = held.norm(held.x)
            out.sum().backward()

        return run

    return Held(script, {"norm": nn.RMSNorm(width).to(HALF)}, x=leaf(4096, 1, width, dtype=HALF))


def added_rms_norm(width: int) -> Held:
    """Return a residual and the norm of a sum with it, in float32; weights of two other implementations are held."""

    def script(held: Any) -> Callable[[], None]:
        def run() -> None:
            total = held.x.to(torch.float32) + held.residual.to(torch.float32)
            scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
            out = held.weight * (total * scale)
            torch.autograd.backward((out, total), (held.given, held.given_too))

        return run

    shape = (1, 2048, width)
    return Held(
        script,
        x=leaf(*shape),
        residual=leaf(*shape),
        given=torch.randn(shape),
        given_too=torch.randn(shape),
        weight=leaf(width),
        others=torch.randn(3 * width),
    )


def rope(length: int, width: int) -> Held:
    """Return queries of 32 heads and keys of 8 in 16 bits, turned by their places."""
    head = width // 32

    def script(held: Any) -> Callable[[], None]:
        query, key = held.query.transpose(1, 2), held.key.transpose(1, 2)
        places = torch.arange(length, device=held.query.device).float()[None, None, :]
        angles = (held.inverse[None, :, None].float() @ places).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cosine, sine = both.cos().to(HALF), both.sin().to(HALF)
        del angles, both

        def run() -> None:
            outputs = apply_rotary_pos_emb(query, key, cosine, sine)
            torch.autograd.grad(outputs, (query, key), (held.to_query, held.to_key), retain_graph=True)

        return run

    shapes = ((1, 32, length, head), (1, 8, length, head))
    return Held(
        script,
        query=leaf(1, length, 32, head, dtype=HALF),
        key=leaf(1, length, 8, head, dtype=HALF),
        to_query=torch.randn(shapes[0], dtype=HALF),
        to_key=torch.randn(shapes[1], dtype=HALF),
        inverse=torch.randn(head // 2),
    )


rope_length = partial(rope, width=8192)
rope_width = partial(rope, 2048)


def complex_rope(length: int, width: int) -> Held:
    """Return queries of 32 heads and keys of 8, turned as complex numbers, as in Llama 4."""
    head = width // 32

    def script(held: Any) -> Callable[[], None]:
        places = torch.arange(length, device=held.query.device).float()[None, None, :]
        angles = (held.inverse[None, :, None].float() @ places).transpose(1, 2)
        turns = torch.polar(torch.ones_like(angles), angles)
        del angles

        def run() -> None:
            outputs = _both(held.query, held.key, turns)
            torch.autograd.grad(outputs, (held.query, held.key), (held.to_query, held.to_key), retain_graph=True)

        return run

    shapes = ((1, length, 32, head), (1, length, 8, head))
    return Held(
        script,
        query=leaf(*shapes[0], dtype=HALF),
        key=leaf(*shapes[1], dtype=HALF),
        to_query=torch.randn(shapes[0], dtype=HALF),
        to_key=torch.randn(shapes[1], dtype=HALF),
        inverse=torch.randn(head // 2),
    )


def _both(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
    """Return both turned, where the complex forms of both live until both are."""
    pairs = [torch.view_as_complex(each.float().reshape(*each.shape[:-1], -1, 2)) for each in (query, key)]
    wide = turns[:, :, None, :]
    outputs = [torch.view_as_real(pair * wide).flatten(3) for pair in pairs]
    return tuple(out.type_as(each) for out, each in zip(outputs, (query, key), strict=True))


llama4_rope_length = partial(complex_rope, width=8192)
llama4_rope_width = partial(complex_rope, 2048)


def divergence(tokens: int, words: int, loss: Callable[[Tensor, Tensor], Tensor], made: Callable[..., Tensor]) -> Held:
    """Return a loss between two distributions; the first one's logits get the gradients."""

    def script(held: Any) -> Callable[[], None]:
        given = made(held.x, dim=-1)

        def run() -> None:
            loss(given, held.target).backward(retain_graph=True)

        return run

    return Held(script, x=leaf(1, tokens, words), target=torch.rand(1, tokens, words))


def total_variation(given: Tensor, target: Tensor) -> Tensor:
    """Return half the sum of differences for each token."""
    return torch.sum(torch.abs(given - target) / 2.0) / given.shape[-2]


def jensen_shannon(given: Tensor, target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the Jensen-Shannon divergence of two distributions of logarithms."""
    target, given = target.to(torch.float32), given.to(torch.float32)
    middle = torch.lerp(torch.exp(given), torch.exp(target), 0.5)
    apart = partial(F.kl_div, reduction="none", log_target=True)
    loss = 0.5 * apart(torch.log(middle), target).sum(-1) + 0.5 * apart(torch.log(middle), given).sum(-1)
    return (loss / given.shape[-2]).sum().to(dtype)


def kl_div(words: int) -> Held:
    """Return torch's KL divergence of 8 x 2048 tokens."""
    loss = partial(F.kl_div, reduction="batchmean")
    return divergence(16384, words, loss, F.log_softmax)


def jsd(words: int) -> Held:
    """Return the Jensen-Shannon divergence of 4 x 2048 tokens."""
    return divergence(8192, words, jensen_shannon, F.log_softmax)


def jsd_tokens(tokens: int) -> Held:
    """Return the Jensen-Shannon divergence of so many tokens of Llama 3's words."""
    return divergence(tokens, WORDS, jensen_shannon, F.log_softmax)


def tvd(words: int) -> Held:
    """Return the total variation distance of 8 x 2048 tokens."""
    return divergence(16384, words, total_variation, F.softmax)


def linear_jsd(tokens: int) -> Held:
    """Return heads of student and teacher, and the Jensen-Shannon divergence of their words."""

    def script(held: Any) -> Callable[[], None]:
        def run() -> None:
            student, teacher = held.student @ held.weight.t(), held.teacher @ held.weight_too.t()
            found = [torch.log_softmax(logits / 1.0, dim=-1) for logits in (student, teacher)]
            jensen_shannon(*found, HALF).backward()

        return run

    return Held(
        script,
        student=leaf(tokens, WIDTH, dtype=HALF),
        teacher=torch.randn(tokens, WIDTH, dtype=HALF),
        weight=leaf(WORDS, WIDTH, dtype=HALF),
        weight_too=leaf(WORDS, WIDTH, dtype=HALF),
    )


def sparsemax(width: int) -> Held:
    """Return sparsemax by sorting, of 4 x 512 rows."""

    def found(x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        summed = torch.cumsum(ordered, dim=-1)
        places = torch.arange(1, width + 1, dtype=x.dtype, device=x.device)[None, None, :]
        support = 1 + places * ordered > summed
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        threshold = ((ordered * support).sum(dim=-1, keepdim=True) - 1) / count
        return torch.clamp(x - threshold, min=0)

    def script(held: Any) -> Callable[[], None]:
        return backward(lambda: found(held.x), held.given)

    return Held(script, x=leaf(1, 2048, width), given=torch.randn(1, 2048, width))


def neighborhood(length: int, *, samples: int, width: int, heads: int) -> Held:
    """Return attention to neighbours by a mask, in float32; the layers of the other implementation are held too."""
    head = width // heads

    def layers() -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def script(held: Any) -> Callable[[], None]:
        def found() -> Tensor:
            query, key, value = (
                layer(held.x).view(samples, length, heads, head).transpose(1, 2) for layer in held.own[:3]
            )
            scores = torch.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(head))
            mask = torch.zeros(length, length, dtype=torch.bool, device=held.x.device)
            scores = scores.masked_fill(~mask, float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            output = torch.matmul(weights, value).transpose(1, 2).contiguous().view(samples, length, width)
            done: Tensor = held.own[3](output)
            return done

        return backward(found, held.given)

    shape = (samples, length, width)
    return Held(script, {"own": layers(), "other": layers()}, x=leaf(*shape), given=torch.randn(shape))


neighborhood_512 = partial(neighborhood, samples=2, width=512, heads=8)
neighborhood_768 = partial(neighborhood, samples=4, width=768, heads=12)
neighborhood_1024 = partial(neighborhood, samples=2, width=1024, heads=16)


def experts(tokens: int, count: int, *, only: bool = False) -> Held:
    """Return Qwen3's experts (width 2048, inner 768, eight a token), run one by one as in transformers."""
    width, inner, chosen = 2048, 768, 8

    def script(held: Any) -> Callable[[], None]:
        into, out = held.into * 0.02, held.out * 0.02

        def found() -> Tensor:
            final = torch.zeros_like(held.x)
            with torch.no_grad():
                mask = F.one_hot(held.index.long(), num_classes=count).permute(2, 1, 0)
            for place in range(count):
                rows = torch.arange(tokens * chosen // count, device=held.x.device)
                which, token = rows % chosen, rows % tokens
                current = held.x[token]
                gate, up = F.linear(current, into[place]).chunk(2, dim=-1)
                current = F.silu(gate) * up
                current = F.linear(current, out[place])
                current = current * held.shares[token, which, None]
                final.index_add_(0, token, current.to(final.dtype))
            del mask
            return final

        return forward(found) if only else backward(found)

    return Held(
        script,
        x=leaf(tokens, width, dtype=HALF),
        into=leaf(count, 2 * inner, width, dtype=HALF),
        out=leaf(count, width, inner, dtype=HALF),
        index=torch.randint(count, (tokens, chosen), dtype=torch.int32),
        shares=leaf(tokens, chosen, dtype=HALF),
    )


experts_tokens = partial(experts, count=128)
experts_tokens_forward = partial(experts, count=128, only=True)
experts_count = partial(experts, 8192)
experts_count_forward = partial(experts, 8192, only=True)


def gated(width: int) -> Held:
    """Return the gated half of 2048 x 4 rows in 16 bits, whose gradient is dropped before each run."""

    def script(held: Any) -> Callable[[], None]:
        def run() -> None:
            held.x.grad = None
            first, second = torch.chunk(held.x, 2, -1)
            out = F.silu(first) * second
            out.sum().backward()

        return run

    return Held(script, x=leaf(2048, 4, 2 * width, dtype=HALF))


def preference(samples: int, length: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Held:
    """Return pairs of answers and a head; that of the other implementation is held too."""

    def script(held: Any) -> Callable[[], None]:
        half = samples // 2

        def found() -> Tensor:
            outputs = held.x @ held.weight.t()
            logits = outputs.float()
            of_chosen = F.cross_entropy(logits[:half].view(-1, WORDS), held.target[:half].view(-1))
            counted = held.target != -100
            labels = torch.where(held.target == -100, 0, held.target)
            each = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
            means = (each * counted).sum(-1) / counted.sum(-1)
            del outputs
            told = loss(means[:half], means[half:])
            return of_chosen - told.mean()

        return lambda: found().backward()

    return Held(
        script,
        x=leaf(samples, length, WIDTH, dtype=HALF),
        weight=leaf(WORDS, WIDTH, dtype=HALF),
        weight_of_other=torch.randn(WORDS, WIDTH, dtype=HALF),
        target=torch.randint(WORDS, (samples, length)),
    )


def odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the logarithms of odds ratios."""
    ratio = chosen - rejected - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * F.logsigmoid(ratio)


def contrast(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the logarithms of preferences."""
    return F.logsigmoid(0.1 * (chosen - rejected))


orpo = partial(preference, length=1024, loss=odds)
orpo_long = partial(preference, length=4096, loss=odds)
cpo = partial(preference, length=1024, loss=contrast)


def distilled(tokens: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Held:
    """Return heads of a student of half the width and of a teacher without gradients, and both losses."""

    def script(held: Any) -> Callable[[], None]:
        def found() -> Tensor:
            given = held.student @ held.weight.t()
            with torch.no_grad():
                target = held.teacher @ held.weight_too.t()
            given, target = given.view(tokens, -1).float(), target.view(tokens, -1).float()
            hard = F.cross_entropy(given, held.target)
            return 0.5 * hard + 0.5 * loss(given, target)

        return lambda: found().backward()

    return Held(
        script,
        student=leaf(tokens, WIDTH // 2, dtype=HALF),
        others=torch.randn(2, tokens, WIDTH // 2, dtype=HALF),
        teacher=torch.randn(tokens, WIDTH, dtype=HALF),
        weight=leaf(WORDS, WIDTH // 2, dtype=HALF),
        weight_too=torch.randn(WORDS, WIDTH, dtype=HALF),
        weights_of_other=torch.randn(WORDS, WIDTH // 2 + WIDTH, dtype=HALF),
        target=torch.randint(WORDS, (tokens,)),
    )


def apart(given: Tensor, target: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of logits, by the mean over tokens."""
    first, second = F.log_softmax(given, dim=-1), F.log_softmax(target, dim=-1)
    middle = (0.5 * first.exp() + 0.5 * second.exp()).log()
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)
    to_first = kl(middle, first)
    to_second = kl(middle, second)
    return 0.5 * to_second + 0.5 * to_first


def angle(given: Tensor, target: Tensor) -> Tensor:
    """Return one less the cosine between logits."""
    first, second = F.normalize(given, p=2, dim=-1), F.normalize(target, p=2, dim=-1)
    return (1 - F.cosine_similarity(first, second, dim=-1)).mean()


distilled_jsd = partial(distilled, loss=apart)
distilled_cosine = partial(distilled, loss=angle)


def rewarded(samples: int) -> Held:
    """Return GRPO's loss of 1024 tokens each, with a model of reference; two heads."""

    def script(held: Any) -> Callable[[], None]:
        def found() -> Tensor:
            logits = held.x @ held.weight.t()
            every = F.log_softmax(logits.float(), dim=-1)
            policy = every.gather(-1, held.tokens.unsqueeze(-1)).squeeze(-1)
            with torch.no_grad():
                logits_too = held.reference @ held.weight_too.t()
                every_too = F.log_softmax(logits_too.float(), dim=-1)
                before = every_too.gather(-1, held.tokens.unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(policy - policy.detach())
            gain = held.gains.unsqueeze(1)
            loss = -torch.min(ratio * gain, torch.clamp(ratio, 0.8, 1.2) * gain)
            loss = loss + 0.1 * (torch.exp(before - policy) - (before - policy) - 1.0)
            return (loss * held.mask).sum() / torch.clamp(held.mask.sum(), min=1.0)

        return lambda: found().backward()

    shape = (samples, 1024)
    return Held(
        script,
        x=leaf(*shape, WIDTH, dtype=HALF),
        reference=torch.randn(*shape, WIDTH, dtype=HALF),
        weight=leaf(WORDS, WIDTH, dtype=HALF),
        weight_too=torch.randn(WORDS, WIDTH, dtype=HALF),
        tokens=torch.randint(WORDS, shape),
        gains=torch.randn(samples, dtype=HALF),
        mask=torch.ones(shape),
    )


def __getattr__(name: str) -> Any:
    """Return what builds a layer of a size: ``NAME_SIZE``."""
    layer, _, size = name.rpartition("_")
    made = globals().get(layer)
    if made is None or not size.isdecimal():
        raise AttributeError(name)
    return lambda: built(partial(made, int(size)))
