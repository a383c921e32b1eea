"""Values and shapes that only a real run could know."""

from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
from torch import Tensor, distributions, nn

import actbench
from actbench.errors import UntraceableError
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation


def simulated() -> Simulation:
    return Simulation(profiles.get("rtx-4090"))


def unknown(*shape: int) -> Tensor:
    """Return a tensor on the card whose values follow from weights."""
    return nn.Linear(512, math.prod(shape)).cuda()(torch.ones(1, 512, device="cuda")).view(shape)


def test_unknown_numbers_are_one() -> None:
    with simulated():
        x = unknown(3, 4)

        assert x.sum().item() == 1.0
        assert float(x.mean().detach()) == 1.0
        assert f"{x.norm():.2f}" == "1.00"
        assert x.detach().cpu().numpy().tolist() == [[1.0] * 4] * 3
        assert x.argmax().item() == 1
        assert torch.allclose(x.softmax(-1).sum(-1), torch.ones(3, device="cuda"), atol=1e-4)


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (lambda x: torch.isnan(x).any(), False),
        (lambda x: torch.isinf(x.sum()), False),
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: ~torch.isfinite(x.norm()), False),
        (lambda x: x.norm() > 1, False),
        (lambda x: x.norm() >= 1, True),
        (lambda x: x.mean() < 2, True),
        (lambda x: (x.max() > 10).cpu(), False),
        (lambda x: torch.logical_or(x.sum().isnan(), x.sum().isinf()), False),
        (lambda x: torch.stack([x.sum().isnan(), x.sum().isinf()]).any(), False),
    ],
)
def test_predicates_are_what_they_are_for_ones(predicate, expected: bool) -> None:  # type: ignore[no-untyped-def]
    with simulated():
        assert bool(predicate(unknown(3, 4))) is expected


@pytest.mark.slow
def test_values_that_follow_from_no_weight_are_known() -> None:
    with simulated():
        labels = torch.tensor([3, 1, 2, 1]).cuda()
        boxes = torch.tensor([[0.0, 1.0, 2.0, 3.5]]).cuda()

        assert (labels == 1).sum().item() == 2
        assert labels.max().item() == 3
        assert (labels == 1).nonzero().flatten().tolist() == [1, 3]
        assert labels.bincount().tolist() == [0, 2, 1, 1]
        assert (boxes[:, 2:] - boxes[:, :2]).tolist() == [[2.0, 2.5]]
        assert unknown(4, 8)[labels == 1].shape == (2, 8)


@pytest.mark.slow
def test_shapes_that_nobody_knows_are_the_largest_and_said_to_be() -> None:
    with simulated() as card:
        x = unknown(6, 2)
        kept = x[x[:, 0] > 0]

        assert kept.shape == (6, 2)
        assert (x > 0).nonzero().shape == (12, 2)
        assert torch.masked_select(x, x > 0).shape == (12,)
        assert x.flatten().unique().shape == (12,)

    assert any("test_values.py" in text for text in card.bounds.most)


def test_a_shape_without_a_bound_is_refused() -> None:
    with simulated(), pytest.raises(UntraceableError, match=r"aten::bincount.*--meter cuda"):
        unknown(6, 2).flatten().long().bincount()


def test_a_scaler_finds_no_infinite_gradient() -> None:
    """Else it would leave out each step, and the optimizer's state would never be made."""
    with simulated() as card:
        module = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(9):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = module(torch.randn(8, 512, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert card.measurement.optimizer_bytes == 2 * card.measurement.weights_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checks_of_distributions_pass(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else scripts of reinforcement learning and of variational models end at their first distribution."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)  # some libraries switch checks off
    with simulated():
        scores = unknown(6, 4).to(dtype)
        choice = distributions.Categorical(probs=scores.softmax(-1))
        action = choice.sample()
        covariance = scores.T @ scores + torch.eye(4, dtype=dtype, device="cuda")
        normal = distributions.MultivariateNormal(torch.zeros(4, dtype=dtype, device="cuda"), covariance)
        spread = distributions.TransformedDistribution(
            distributions.Normal(scores, scores.exp()), [distributions.TanhTransform(cache_size=1)]
        )

        assert choice.log_prob(action).shape == (6,)
        assert normal.log_prob(normal.rsample((3,))).shape == (3,)
        assert spread.log_prob(spread.rsample()).shape == (6, 4)
        assert distributions.Laplace(scores, scores.exp()).rsample().is_cuda
        assert distributions.Dirichlet(scores.exp()).rsample().shape == (6, 4)


def test_a_value_out_of_range_that_is_known_is_refused_as_on_a_card() -> None:
    with simulated(), pytest.raises(ValueError, match="found invalid values"):
        distributions.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]), validate_args=True)


def test_matrices_can_be_factorized() -> None:
    with simulated():
        square = unknown(4, 4)

        assert torch.linalg.cholesky(square @ square.T).shape == (4, 4)
        assert torch.linalg.inv(square).shape == (4, 4)
        assert torch.linalg.cholesky_ex(square).info.item() == 0


def test_integers_are_as_many_as_the_classes_that_they_choose_among() -> None:
    with simulated() as card:
        scores = unknown(50, 7)
        chosen = scores.argmax(-1)

        assert chosen.unique().shape == (7,)
        assert scores.max(-1).indices.view(5, 10)[1:].unique().shape == (7,)
        assert scores.topk(2).indices[:, 0].bincount().shape == (7,)
        assert torch.cat([chosen, scores[:, :3].sort().indices[:, 0]]).unique().shape == (7,)
        assert scores.multinomial(1).flatten().unique(return_counts=True)[1].shape == (7,)
        assert (chosen * 2).unique().shape == (50,)  # other numbers
        assert chosen[:3].unique().shape == (3,)
        assert int(chosen.max()) == 6
        assert (chosen + 5000).max().float().exp().item() == 1.0
        assert unknown(2, 5000).argmax(-1).max().float().exp().item() == 1.0
        assert chosen[:4].max().view(1).bincount().shape == (7,)
        assert scores.sort(dim=0, stable=True).indices.unique().shape == (50,)
        assert scores.argsort(dim=1, stable=True).unique().shape == (7,)
        assert (chosen * 7 + chosen).bincount(minlength=49).shape == (49,)

    assert any("_unique2" in text for text in card.bounds.most)


def test_what_is_written_is_no_longer_taken_for_what_it_was() -> None:
    with simulated():
        scores = unknown(50, 7)
        chosen, shares, is_large = scores.argmax(-1), scores.softmax(-1), scores == 1
        ended = torch.full((3,), True, device="cuda")
        done = ended | (unknown(3, 1)[:, 0] > 2)
        chosen[3:] += 40
        shares.fill_(0.5)
        is_large.fill_(False)
        ended.fill_(False)

        assert chosen.unique().shape == (50,)
        assert shares.max().item() == 1.0
        assert shares[0].tolist() == [1.0] * 7
        assert not is_large.any()
        assert done.all()


def test_a_generation_ends_at_its_longest() -> None:
    """Whether a token ends it is unknown; that it has as many tokens as asked for is not."""
    with simulated():
        ends = unknown(3, 5).argmax(-1) == 2
        is_done = torch.full((3,), True, device="cuda")
        unfinished = torch.ones(3, dtype=torch.long, device="cuda")

        assert (ends | is_done).all().item()
        assert (unfinished & ~(is_done | ends)).max().item() == 0
        assert not (ends | ~is_done).any().item()  # unknown truth values count as those of ones


def test_new_tensors_are_where_the_other_one_is() -> None:
    with simulated():
        x = unknown(2, 3)

        assert x.new(4, 5).is_cuda
        assert x.new(torch.Size([4, 5])).shape == (4, 5)
        assert x.new().numel() == 0
        assert x.new([1, 2]).shape == (2,)
        assert not torch.ones(2).new(3).is_cuda
        assert torch.normal(x, x.exp()).is_cuda
        assert not torch.normal(torch.zeros(3), torch.ones(3)).is_cuda
        assert distributions.Normal(x, x.exp(), validate_args=False).sample().is_cuda


def test_attention_of_plain_operators_is_on_the_card() -> None:
    """Grouped heads in float32 have no fused kernel, and the causal mask is made by torch."""
    with simulated():
        q, k = unknown(2, 4, 6, 8), unknown(2, 2, 6, 8)
        attended = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    assert attended.shape == q.shape


@pytest.mark.parametrize(("profile", "device"), [("rtx-4090", "cuda"), ("cpu", "cpu")])
def test_sparse_tensors_are_refused_in_words(profile: str, device: str) -> None:
    with actbench.simulate(profile):
        table = nn.Embedding(100, 8, sparse=True).to(device)
        found = table(torch.tensor([3, 4], device=device)).sum()
        with pytest.raises(UntraceableError, match=r"sparse=False.*--meter cpu"):
            found.backward()
        with pytest.raises(UntraceableError, match=r"sparse=False.*--meter cpu"):
            torch.rand(2000, 2000, device=device).to_sparse()


def test_shares_of_a_whole_add_up_for_numpy() -> None:
    with simulated():
        scores = unknown(3, 9)
        by_softmax = scores.softmax(-1)[0].squeeze().detach().cpu().numpy()
        by_exponents = scores.log_softmax(0).exp().T.detach().cpu().numpy()

        assert numpy.random.default_rng(0).choice(numpy.arange(9), p=by_softmax) in range(9)
        assert by_exponents.sum(-1) == pytest.approx([1.0] * 9)
        assert scores.softmax(-1).sum().item() == 1.0
        assert scores.softmax(-1).max().item() == 1.0
        assert scores.sigmoid().detach().cpu().numpy().tolist() == [[1.0] * 9] * 3


def test_rows_of_known_integers_keep_their_range() -> None:
    """Which rows are chosen is unknown: the graphs of chosen nodes are numbered as those of all are."""
    with simulated():
        graph = torch.arange(4).repeat_interleave(5).cuda()
        chosen = graph[unknown(20, 1)[:, 0].topk(12).indices]

        assert chosen.unique().shape == (4,)
        assert int(chosen.max()) + 1 == 4
        assert (chosen - 1).unique().shape == (12,)


def test_a_skeleton_of_a_model_leaves_the_card() -> None:
    """Ensembles run a copy without values by the weights of each model (torch.func.stack_module_state)."""
    with simulated():
        model = nn.Linear(512, 512).cuda()
        before = torch.cuda.memory_allocated()
        skeleton = copy.deepcopy(model).to("meta")
        parameters, buffers = torch.func.stack_module_state([model, model])
        run = torch.vmap(lambda p, b, x: torch.func.functional_call(skeleton, (p, b), (x,)), (0, 0, None))

        assert torch.cuda.memory_allocated() - before == 2 * 512 * 513 * 4
        assert run(parameters, buffers, torch.ones(3, 512, device="cuda")).shape == (2, 3, 512)


def test_nested_tensors_are_refused_in_words() -> None:
    with simulated(), pytest.raises(UntraceableError, match=r"nested_tensor: .*--meter cpu"):
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_derivatives_of_derivatives_and_ranks_of_matrices_are_computed_on_the_card() -> None:
    """In both, torch makes small tensors of its own, which stand on no device here."""
    with simulated():
        x, labels = torch.randn(8, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
        weight = unknown(4, 16).detach()

        def loss(w: Tensor) -> Tensor:
            return nn.functional.cross_entropy(x @ w.T, labels) + 0.05 * w.pow(2).sum()

        curved = torch.func.jvp(torch.func.grad(loss), (weight,), (weight,))[1]
        assert torch.func.hessian(loss)(weight).shape == (4, 16, 4, 16)
        assert (curved.shape, curved.is_cuda) == ((4, 16), True)
        assert torch.linalg.matrix_rank(weight).is_cuda


def test_a_batch_that_was_left_in_host_memory_is_refused_as_on_a_card() -> None:
    with simulated():
        model = nn.Linear(512, 4).cuda()
        for batch in (torch.ones(2, 512), torch.tensor([[1.0] * 512]), torch.stack([torch.rand(512)] * 2)):
            with pytest.raises(RuntimeError, match="same device"):
                model(batch)
            with pytest.raises(RuntimeError, match="same device"):
                unknown(1, 512) * batch


def test_a_file_of_a_hundred_million_tokens_is_looked_through() -> None:
    with actbench.simulate("rtx-4090"):
        tokens = torch.zeros(100_000_000, dtype=torch.uint16, pin_memory=True)
        tokens.numpy()[[70_000_000, 90_000_000]] = 50_256
        ends = (tokens == 50_256).nonzero().squeeze(-1)
        assert ends.tolist() == [70_000_000, 90_000_000]
        card = tokens[ends[0] :][:1024].to(device="cuda", dtype=torch.int64, non_blocking=True)
        assert int(card[0]) == 50_256


def test_values_that_the_cpu_computes_from_other_arguments_are_unknown() -> None:
    """On a card, log_sigmoid saves no buffer; the CPU's derivative reads one."""
    with actbench.simulate("rtx-4090", warns=False):
        x = torch.zeros(4, device="cuda", requires_grad=True)
        torch.nn.functional.logsigmoid(x).backward(torch.ones(4, device="cuda"))
        assert x.grad is not None
        assert x.grad.shape == (4,)
