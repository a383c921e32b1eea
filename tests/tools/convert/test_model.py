from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import actbench
from actbench.errors import ConversionError, ModelError, SpecError
from actbench.model.records import Site
from actbench.scheme import Scheme
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of, convert

WIDTH, TOKENS, SAMPLES = 32, 16, 4
SPEC = "fewbit:3+randomized:0.5"
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 4 * WIDTH,
    "vocab_size": 99,
}


def roberta() -> nn.Module:
    torch.manual_seed(0)
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES, num_labels=2))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(3, 99, (SAMPLES, TOKENS), generator=generator),
        "attention_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.long),
    }


def labelled() -> dict[str, Tensor]:
    return {**tokens(), "labels": torch.tensor([0, 1, 0, 1])}


def logits(model: nn.Module) -> Tensor:
    torch.manual_seed(2)
    return model(**tokens()).logits


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 2))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", ["fewbit:3", "randomized:0.5", "checkpoint", "fewbit:3+randomized:0.5+checkpoint"])
def test_the_output_is_equal_bit_for_bit(spec: str, training: bool):
    model = roberta().train(training)
    expected = logits(model)
    assert torch.equal(logits(convert(model, spec)), expected)


@pytest.mark.parametrize("spec", ["fewbit:3", "randomized:0.5", "checkpoint", SPEC])
def test_parameters_are_the_same_objects_under_the_same_keys(spec: str):
    model = roberta()
    state = model.state_dict(keep_vars=True)
    after = convert(model, spec).state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[key] is state[key] for key in state)


def test_a_head_tied_to_the_embedding_stays_tied():
    model = convert(gpt2(), SPEC)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_frozen_weights_hooks_and_flags_survive():
    model = roberta()
    layer = model.roberta.encoder.layer[0]
    layer.intermediate.dense.weight.requires_grad_(False)
    layer.intermediate.intermediate_act_fn.eval()
    seen: list[str] = []
    layer.intermediate.dense.register_forward_hook(lambda *_: seen.append("dense"))
    layer.intermediate.intermediate_act_fn.register_forward_pre_hook(lambda *_: seen.append("act"))

    layer = convert(model, SPEC).roberta.encoder.layer[0]
    logits(model)

    assert seen == ["dense", "act"]
    assert not layer.intermediate.dense.weight.requires_grad
    assert not layer.intermediate.intermediate_act_fn.training
    assert layer.intermediate.dense.training


def test_the_mark_says_what_was_done_survives_a_copy_and_is_in_no_state():
    model = convert(roberta(), SPEC)
    found = conversion_of(copy.deepcopy(model))
    assert found == conversion_of(model)
    assert found is not None
    assert set(found.scheme.split("+")) == set(SPEC.split("+"))
    assert "roberta.encoder.layer.1.intermediate.intermediate_act_fn" in {site.path for site in found.sites}
    assert found.version == actbench.__version__
    assert not any("conversion" in key for key in model.state_dict())


def test_an_unconverted_model_has_no_mark_and_a_wrapper_shows_that_of_the_model_inside():
    assert conversion_of(roberta()) is None
    assert conversion_of(nn.Sequential(convert(roberta(), "fewbit:3"))) is not None


def test_an_example_batch_tells_what_each_site_keeps():
    found = conversion_of(convert(roberta(), "fewbit:3", example_batch=labelled()))
    assert found is not None
    elements = SAMPLES * TOKENS * SIZES["intermediate_size"]
    act = next(site for site in found.sites if site.path.endswith("layer.0.intermediate.intermediate_act_fn"))
    assert (act.bytes_before, act.bytes_after, act.calls) == (elements * 4, elements * 3 // 8, 1)


@pytest.mark.parametrize("example", [torch.zeros(8, WIDTH), (torch.zeros(8, WIDTH),), {"input": torch.zeros(8, WIDTH)}])
def test_an_example_batch_is_a_tensor_a_tuple_or_a_mapping(example: Any):
    found = conversion_of(convert(perceptron(), "fewbit:2", example_batch=example))
    assert found is not None
    assert found.sites[0].bytes_after == 8 * 4 * WIDTH * 2 // 8


def test_a_loss_of_ones_own_gets_the_example_batch():
    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    example = (torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.long))
    found = conversion_of(convert(perceptron(), "fewbit:2", example_batch=example, loss=loss))
    assert found is not None
    assert found.sites[0].calls == 1


def test_a_model_that_returns_no_numbers_needs_a_loss():
    class Talking(nn.Sequential):
        def forward(self, x: Tensor) -> str:
            super().forward(x)
            return "done"

    with pytest.raises(ConversionError, match="loss="):
        convert(Talking(*perceptron()), "fewbit:2", example_batch=torch.zeros(8, WIDTH))


def test_converting_twice_says_how_to_compose():
    model = convert(roberta(), "fewbit:3")
    with pytest.raises(ConversionError, match=r"already converted with 'fewbit:3'; .* fewbit:3\+randomized:0.5"):
        convert(model, "randomized:0.5")
    for again in ("fewbit:3", "regelu2"):  # which exclude each other
        with pytest.raises(ConversionError, match=r"convert it once, with the scheme that it is to have$"):
            convert(model, again)


def test_converting_a_model_around_or_inside_a_converted_one_is_converting_twice():
    inside = convert(perceptron(), "fewbit:3")
    with pytest.raises(ConversionError, match="already converted"):
        convert(nn.Sequential(inside, nn.Linear(2, 2)), "randomized:0.5")


@pytest.mark.parametrize(
    ("spec", "message"), [("fewbit:3", "no activation modules"), ("exact", "leave the conversion")]
)
def test_converting_nothing_is_an_error(spec: str, message: str):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with pytest.raises(ConversionError, match=message):
        convert(model, spec)
    assert conversion_of(model) is None


def test_what_is_no_model_or_no_scheme_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, found str, 'resnet18'"):
        convert("resnet18", "fewbit:3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="such as 'fewbit:3', or a Scheme, found NoneType"):
        convert(perceptron(), None)  # type: ignore[arg-type]


def test_a_model_that_waits_for_its_first_batch_is_refused():
    with pytest.raises(ModelError, match=r"1\.weight has no shape, as LazyConv2d waits"):
        convert(nn.Sequential(nn.GELU(), nn.LazyConv2d(4, 3)), "fewbit:3")
    with pytest.raises(ModelError, match=r"1\.running_mean has no shape, as LazyBatchNorm2d waits"):
        convert(nn.Sequential(nn.GELU(), nn.LazyBatchNorm2d(affine=False)), "fewbit:3")


def test_a_wrong_specification_is_refused_before_anything_changes():
    model = perceptron()
    with pytest.raises(SpecError):
        convert(model, "fewbit:9")
    assert type(model[1]) is nn.GELU


class Failing(Scheme):
    """Changes the model as a scheme does, and then finds that it cannot go on."""

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        setup.module[1] = nn.ReLU()
        setup.module[0].register_forward_hook(lambda *_: None)
        setup.module[2].forward = lambda x: x
        raise ConversionError("it cannot go on")


def test_a_refused_model_is_left_as_it_was():
    model = perceptron()
    children = list(model)
    with pytest.raises(ConversionError, match="cannot go on"):
        convert(model, Failing())
    assert list(model) == children
    assert not model[0]._forward_hooks
    assert "forward" not in vars(model[2])


class WithOptimizer(Scheme):
    """Wraps the optimizer besides changing the model."""

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        setup.module[1] = nn.GELU("tanh")
        site = Site(path="1", was="nn.GELU", becomes="other")
        return TrainingSetup(
            setup.module, loss=setup.loss, make_optimizer=lambda m: torch.optim.SGD(m.parameters()), sites=(site,)
        )


def test_a_scheme_that_wraps_the_optimizer_is_refused_on_a_bare_model():
    model = perceptron()
    before = model[1]
    with pytest.raises(ConversionError, match="the optimizer"):
        convert(model, WithOptimizer())
    assert model[1] is before


def test_one_loop_of_ones_own_trains():
    model = convert(perceptron(), SPEC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(64, WIDTH), torch.randint(0, 2, (64,))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_the_trainer_of_transformers_trains_it_unchanged(tmp_path):
    model = convert(roberta(), SPEC)
    rows = [{key: value[row] for key, value in labelled().items()} for row in range(SAMPLES)]
    before = model.roberta.encoder.layer[0].intermediate.dense.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    result = transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert result.global_step == 2
    assert not torch.equal(model.roberta.encoder.layer[0].intermediate.dense.weight, before)
