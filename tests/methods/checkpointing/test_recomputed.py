import copy
import importlib
import weakref

import pytest
import torch
import torchvision
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from actbench.errors import ConversionError
from actbench.methods.checkpointing import recomputed
from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.packing.blocks import TORCHVISION_BLOCKS, blocks

FAMILIES = [
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "resnet18",
    "resnet50",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "swin_v2_t",
    "vit_b_16",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4))

    def forward(self, x, scale=None):
        return x + self.inner(x) * (1 if scale is None else scale)


def stack(momentum=0.1):
    model = nn.Sequential(Block(), Block())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = momentum
    return model


def recompute(model, names=("Block",)):
    for _, block in blocks(model, names):
        RecomputedForward(block).bind()
    return model


def step(model, x):
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_results_and_running_statistics_are_those_of_the_exact_model(momentum, synchronized):
    exact = stack(momentum)
    if synchronized:
        exact = nn.SyncBatchNorm.convert_sync_batchnorm(exact)
    model = recompute(copy.deepcopy(exact))
    for _ in range(3):
        x = torch.randn(10, 4)
        assert equal(step(exact, x), step(model, x))

    assert exact.state_dict().keys() == model.state_dict().keys()
    assert equal(exact.state_dict().values(), model.state_dict().values())
    assert model[0].inner[1].momentum == momentum


def test_statistics_are_given_back_when_the_recomputation_fails():
    model = recompute(stack())
    loss = model(torch.randn(10, 4)).sum()
    model[1].inner[4].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()

    assert [module.momentum for module in model.modules() if isinstance(module, nn.BatchNorm1d)] == [0.1, 0.1]
    assert model[1].inner[1].num_batches_tracked == 1


def test_blocks_keep_their_inputs_only():
    model = recompute(stack())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(10, 4))

    assert sum(t.numel() for t in kept if t.is_floating_point()) == 2 * 10 * 4


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_recomputed_outside_of_training(grad, monkeypatch):
    monkeypatch.setattr(recomputed, "checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    model = recompute(stack())
    with torch.set_grad_enabled(grad):
        model.eval()(torch.randn(10, 4))
    with torch.no_grad():
        model.train()(torch.randn(10, 4))


def test_keyword_arguments_and_inputs_without_gradient():
    exact = Block()
    model = copy.deepcopy(exact)
    RecomputedForward(model).bind()
    x, scale = torch.randn(10, 4), torch.randn(10, 4, requires_grad=True)
    results = []
    for each in (exact, model):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(each(x, scale=scale).sum(), [scale, *each.parameters()]))

    assert equal(*results)


def test_a_copy_recomputes_its_own_blocks():
    model = recompute(stack())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))

    assert all(torch.isfinite(found).all() for found in step(twin, torch.randn(10, 4)))
    assert all(p.grad is None for p in model.parameters())


def test_a_block_in_two_places_or_in_another_block_is_found_once():
    shared = Block()
    shared.inner.append(Block())
    model = nn.Sequential(shared, nn.Sequential(shared))

    assert [path for path, _ in blocks(model, ("Block",))] == ["0"]
    assert blocks(model) == []


def test_every_class_of_the_table_is_in_torchvision():
    for file, names in TORCHVISION_BLOCKS.items():
        module = importlib.import_module(f"torchvision.models.{file}")
        assert all(issubclass(getattr(module, name), nn.Module) for name in names)


@pytest.mark.sampled(fast=5, slow=4)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_torchvision_has_blocks(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(
            name, weights=None, **({"init_weights": False} if "ception" in name else {})
        )

    assert len(blocks(model)) > 1


def test_a_growing_list_of_inputs_is_seen_as_it_was():
    """DenseNet's layers are given one list, to which their caller appends."""
    exact = torchvision.models.DenseNet(4, (2, 2), 8, num_classes=3)
    model = recompute(copy.deepcopy(exact), ())
    x = torch.randn(2, 3, 32, 32)

    assert len(blocks(model)) == 4
    assert equal(step(exact, x), step(model, x))


SMALL = {"vocab_size": 50}
TRANSFORMERS = {
    "bert": lambda: BertModel(
        BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, **SMALL)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, bos_token_id=0, eos_token_id=0, **SMALL)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(num_layers=2, d_model=16, d_kv=8, d_ff=16, num_heads=2, decoder_start_token_id=0, **SMALL)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_blocks_of_transformers_with_their_caches(name):
    """These models fill a cache of keys and values unless told not to."""
    exact = TRANSFORMERS[name]()
    model = recompute(copy.deepcopy(exact), ())
    ids = torch.randint(0, 50, (2, 8))
    results = []
    for each in (exact, model):
        torch.manual_seed(0)
        arguments = {"input_ids": ids} | ({"labels": ids} if name == "t5" else {})
        out = each.train()(**arguments)
        (out.last_hidden_state if name == "bert" else out.logits).square().mean().backward()
        results.append([p.grad for p in each.parameters() if p.grad is not None])

    assert len(blocks(model)) == (4 if name == "t5" else 2)
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("every", [1, 2])
def test_a_filled_cache_is_read_by_both_runs_and_stays_as_it_was_given(every):
    """As in prefix tuning, where the keys and values are what is trained."""
    exact = TRANSFORMERS["gpt2"]()
    model = copy.deepcopy(exact)
    for _, block in blocks(model)[::every]:
        RecomputedForward(block).bind()
    prefix = [tuple(torch.randn(2, 2, 3, 8, requires_grad=True) for _ in range(2)) for _ in range(2)]
    trained = [tensor for pair in prefix for tensor in pair]
    ids, results = torch.randint(0, 50, (2, 8)), []
    for each in (exact, model):
        torch.manual_seed(0)
        cache = DynamicCache(prefix)
        loss = each.train()(input_ids=ids, labels=ids, past_key_values=cache).loss
        results.append(torch.autograd.grad(loss, [*trained, *each.parameters()]))

    assert all(tensor.abs().sum() > 0 for tensor in results[0][: len(trained)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)
    assert cache.get_seq_length(0) == 3


def test_a_filled_cache_that_is_written_into_is_refused():
    model = TRANSFORMERS["gpt2"]()
    cache = StaticCache(model.config, max_cache_len=16)
    ids = torch.randint(0, 50, (2, 4))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)

    with pytest.raises(ConversionError, match=r"filled StaticCache .* give a DynamicCache"):
        recompute(model, ()).train()(input_ids=ids, past_key_values=cache)


def test_a_graph_holds_the_blocks_that_it_will_run_again():
    model = recompute(stack())
    weak, loss = weakref.ref(model[0].inner[0].weight), model(torch.randn(10, 4)).sum()
    del model
    loss.backward()

    trained = weak().grad is not None  # an assert would hold the weight
    del loss

    assert trained
    assert weak() is None


@pytest.mark.slow
def test_a_compiled_model_recomputes():
    exact = stack()
    model = recompute(copy.deepcopy(exact))
    for each in (exact, model):
        for module in each.modules():
            module.p = 0.0  # dropout of a compiled model draws other masks
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(10, 4)

    for first, second in zip(step(exact, x), step(compiled, x), strict=True):
        torch.testing.assert_close(first, second)
