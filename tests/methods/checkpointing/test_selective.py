import copy
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.methods.checkpointing.selective import SelectiveForward
from actbench.packing.blocks import blocks

WIDTH, HEADS, TOKENS = 32, 4, 2 * 8


class Block(nn.Module):
    """Attention with dropout, dropout behind it, and a product whose result is changed in place."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(self.relu(self.wide(x))))


class Written(nn.Module):
    """Attention written out, so that every product is one, and a norm that keeps statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.linear(self.norm(x))
        return x + (y @ y.transpose(-1, -2)).softmax(-1) @ y


def pair(kind, policy="compute_intensive", keep=(), **settings):
    exact = nn.Sequential(kind(**settings), kind(**settings), nn.Linear(WIDTH, 4))
    return exact, kept(copy.deepcopy(exact), kind.__name__, policy, keep)


def kept(model, name, policy="compute_intensive", keep=()):
    for path, block in blocks(model, (name,)):
        SelectiveForward(block, path, policy, keep).bind()
    return model


def inputs():
    return torch.randn(2, 8, WIDTH, requires_grad=True)


def gradients(model, x, **settings):
    torch.manual_seed(0)
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], **settings)


def equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("policy", ["compute_intensive", "half"])
@pytest.mark.parametrize("kind", [Block, Written])
def test_gradients_and_buffers_are_exact(kind, policy):
    """Random numbers too: what is drawn behind an attention does not depend on whether it runs again."""
    exact, model = pair(kind, policy)
    x = inputs()

    for _ in range(2):
        assert equal(gradients(model, x), gradients(exact, x))
    assert equal(model.buffers(), exact.buffers())


class Ran(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.convolution(x).tanh())


NAMED = [
    (Block, ("linear",), {"addmm"}),
    (Block, ("attention",), {"_scaled_dot_product_flash_attention_for_cpu"}),
    (Written, ("linear",), {"addmm"}),
    (Written, ("bmm",), {"bmm"}),
    (Written, ("softmax",), {"_softmax"}),
    (Written, ("bmm", "softmax"), {"bmm", "_softmax"}),
    (Convolved, ("convolution",), {"convolution"}),
    (Convolved, ("linear", "convolution"), {"addmm", "convolution"}),
]


@pytest.mark.parametrize(("kind", "keep", "operators"), NAMED)
def test_named_operators_run_once_and_all_others_twice(kind, keep, operators):
    """Their results are of another number in each block: what counts is how often the whole step runs an operator."""
    exact, model = pair(kind, keep=keep, **({"dropout": 0.0} if kind is Block else {}))
    whole, x, ran = copy.deepcopy(exact), inputs(), []
    for _, block in blocks(whole, (kind.__name__,)):
        RecomputedForward(block).bind()
    for each in (exact, model, whole):
        with Ran() as counted:
            gradients(each, x)
        ran.append(counted.names)
    once, ours, twice = ran

    assert equal(gradients(model, x), gradients(exact, x))
    for name in {"addmm", "bmm", "_softmax", "convolution", "native_layer_norm", "tanh"} | operators:
        # a result that is changed in place, that of the layer before the ReLU, is computed again
        again = 2 if (kind, name) == (Block, "addmm") else 0
        assert ours[name] == (once[name] + again if name in operators else twice[name]), name


def test_a_retained_graph_keeps_the_results_and_another_lets_them_go():
    _, model = pair(Block)
    loss = model(inputs()).sum()
    runs = []
    for retain in (True, True, False):
        with FlopCounterMode(display=False) as counted:
            loss.backward(retain_graph=retain)
        runs.append(counted.get_total_flops())

    assert runs[0] == runs[1] == runs[2]


def flops(model, x):
    with FlopCounterMode(display=False) as counted:
        model(x).square().sum().backward()
    return counted.get_total_flops()


def test_products_run_once_and_of_half_every_second_one_again():
    exact, model = pair(Written)
    half, x = kept(copy.deepcopy(exact), "Written", "half"), inputs()
    first = 2 * TOKENS * WIDTH * WIDTH
    scores = 2 * TOKENS * 8 * WIDTH
    whole = copy.deepcopy(exact)
    for _, block in blocks(whole, ("Written",)):
        RecomputedForward(block).bind()

    assert flops(model, x) == flops(exact, x)
    assert flops(half, x) == flops(exact, x) + 2 * scores  # of linear, scores and result the second
    assert flops(whole, x) == flops(exact, x) + 2 * (first + scores)  # nobody needs the last


def test_what_is_changed_in_place_is_computed_again():
    exact, model = pair(Block, dropout=0.0)
    x = inputs()

    assert flops(model, x) == flops(exact, x) + 2 * (2 * TOKENS * WIDTH * 2 * WIDTH)


def test_results_go_where_saved_tensors_go():
    _, model = pair(Block)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda t: t):
        loss = model[0](inputs()).sum()
        loss.backward()

    assert seen.count((TOKENS, 3 * WIDTH)) == 1
    assert seen.count((TOKENS, 2 * WIDTH)) == 0  # changed in place


def test_a_block_that_runs_otherwise_the_second_time_is_an_error():
    class Fickle(nn.Linear):
        turns = 0

        def forward(self, x):
            self.turns += 1
            return super().forward(x).tanh() if self.turns == 1 else (x.unsqueeze(0) @ self.weight).tanh()

    model = kept(nn.Sequential(Fickle(4, 4)), "Fickle")
    loss = model(torch.randn(3, 4)).sum()

    with pytest.raises(RuntimeError, match=r"addmm.* in the forward pass it ran aten.b?mm"):
        loss.backward()


@pytest.mark.parametrize("policy", [pytest.param("compute_intensive", marks=pytest.mark.slow), "half"])
def test_a_compiled_model_keeps_them_too(policy):
    exact, model = pair(Written, policy)
    exact.eval()
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm1d)):
        norm.eval()
    x = inputs()
    again = []

    def backward(graph, _):
        again.append(sum(node.op == "call_function" and "mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(model, fullgraph=True, backend=compiler)

    for one, other in zip(gradients(compiled, x), gradients(exact, x), strict=True):
        torch.testing.assert_close(one, other)
    plain = 2 * 3 * 2 + 2  # of two blocks with three products, and a linear layer: two for each
    assert again == [plain + (2 if policy == "half" else 0)]


def test_what_a_block_returns_may_be_changed_by_its_caller():
    class Both(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.tanh() * x

    def loss(model):
        y, z = model(x)
        return y.mul_(3).sum() + z.sum()

    exact, x = Both(WIDTH, WIDTH), inputs()
    model = kept(nn.Sequential(copy.deepcopy(exact)), "Both")[0]
    found = [torch.autograd.grad(loss(each), [x, *each.parameters()]) for each in (model, exact)]

    assert equal(*found)
