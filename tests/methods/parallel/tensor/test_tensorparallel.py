"""Bytes of the first of several processes that share layers, in closed form, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ActbenchError, ConversionError, NothingToConvertError, SpecError, UsageError
from actbench.measuring import bench
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.facets import Spread
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert import model as conversion

FLOAT = 4
HEADS, WIDTH, INNER, WORDS, LAYERS, ROWS = 64, 256, 512, 1024, 2, 2
WIDE = (
    f"tiny-llama@num_attention_heads={HEADS},num_key_value_heads={HEADS},hidden_size={WIDTH},"
    f"intermediate_size={INNER},vocab_size={WORDS}"
)


def case(spec: str, model: str = WIDE, tokens: int = 64) -> Case:
    return Case(
        model=model, scheme=spec, batch_size=ROWS, sequence_length=tokens, meter="simulated", gradient_quality=False
    )


def measured(spec: str, model: str = WIDE, tokens: int = 64) -> Measurement:
    return bench.measure(case(spec, model, tokens))


def applied(spec: str, model: str) -> TrainingSetup:
    """Return a setup on real tensors of the first of several processes, of which the others do not exist."""
    session = bench.Session(case("tp:2", "tiny-llama"))
    setup = workloads.load_workload(case(spec, model)).setup(materialize=True, seed=0)
    return schemes.build(spec).apply(replace(setup, processes=session.setup.processes))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("ranks", "sequence"), [(2, ",sequence=true"), (8, ""), (64, ",sequence=true")])
def test_parts_are_weights_gradients_and_state_to_the_byte(ranks: int, sequence: str) -> None:
    cut = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + 2 * WORDS * WIDTH
    whole = (2 * LAYERS + 1) * WIDTH  # norms
    frequencies = 2 * FLOAT * (WIDTH // HEADS // 2)  # of rotary embeddings, twice, which nobody trains
    mine = FLOAT * (cut // ranks + whole)

    reading = measured(f"tp:{ranks}{sequence}")

    assert reading.gradients_bytes == mine
    assert reading.weights_bytes == mine + frequencies
    assert reading.optimizer_bytes is not None
    assert 2 * mine <= reading.optimizer_bytes <= 2 * mine + FLOAT * (9 * LAYERS + 3)  # and a counter a parameter


@pytest.mark.exhaustive
def test_what_attention_and_mlp_save_is_cut_and_what_is_around_them_is_not() -> None:
    tokens = 256  # whose parts are whole blocks of the allocator

    def of_a_layer(spec: str) -> int:
        models = (f"{WIDE},num_hidden_layers={layers}" for layers in (2, 1))
        more, fewer = (measured(spec, model, tokens).activation_bytes for model in models)
        assert more is not None
        assert fewer is not None
        return more - fewer

    exact, by_2, by_4 = of_a_layer("exact"), of_a_layer("tp:2"), of_a_layer("tp:4")
    tokens_by_2, tokens_by_4 = of_a_layer("tp:2,sequence=true"), of_a_layer("tp:4,sequence=true")
    hidden = FLOAT * ROWS * tokens * WIDTH

    assert exact - by_2 == 2 * (by_2 - by_4)  # as whole + cut / ranks
    whole, uncut = 2 * by_4 - by_2, 2 * tokens_by_4 - tokens_by_2
    assert 6 * hidden <= whole <= 6.1 * hidden
    assert 2 * hidden <= uncut <= 2.1 * hidden  # the inputs of attention and MLP, which are gathered


def test_a_bias_that_is_added_to_a_sum_is_with_the_first_process() -> None:
    model = applied("tp:2", "tiny-gpt2").module
    names = {name for name, _ in model.named_parameters()}

    assert "transformer.h.0.attn.c_proj.bias" in names


def test_parameters_ties_and_keys_stay() -> None:
    setup = workloads.load_workload(case("tp:2", "tiny-gpt2")).setup(materialize=True, seed=0)
    before, keys = dict(setup.module.named_parameters()), list(setup.module.state_dict())
    session = bench.Session(case("tp:2", "tiny-llama"))

    changed = schemes.build("tp:2").apply(replace(setup, processes=session.setup.processes))

    model = changed.module
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert list(model.state_dict()) == keys
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {site.path for site in changed.sites} >= {"transformer.wte", "lm_head", "transformer.h.1.mlp.c_fc"}


def test_words_that_do_not_divide_stay_and_it_is_said() -> None:
    setup = applied("tp:2", "tiny-gpt2@vocab_size=511,bos_token_id=1,eos_token_id=1")

    assert setup.module.get_input_embeddings().weight.shape[0] == 511
    assert {left.path for left in setup.unreached} == {"transformer.wte", "lm_head"}
    assert "511 rows do not divide among 2" in setup.unreached[0].reason


@pytest.mark.sampled(fast=3, slow=2)
@pytest.mark.parametrize(
    ("spec", "model", "reason"),
    [
        ("tp:3", "tiny-llama", r"q_proj has 2 attention heads, which do not divide among 3 .* take one of tp:2$"),
        ("tp:2", "tiny-llama@num_key_value_heads=1", r"k_proj has 1 attention heads, .* tp:\(none\)"),
        ("tp:2", "tiny-gpt2@n_inner=255", "mlp.c_fc has 255 outputs"),
        ("tp:2", "tiny-t5", "no base_model_tp_plan, and actbench has plans of its own for bert, roberta"),
        pytest.param(
            *("tp:2", "mixtral-8x7b@num_hidden_layers=1,hidden_size=64,intermediate_size=64,vocab_size=64", "fsdp"),
            marks=pytest.mark.newer_torch("fakes multiply groups in bfloat16 only"),
        ),
        ("qlora+tp:2", "tiny-llama", "is a FrozenLinear"),
        ("tp:2+compile:0.5", "tiny-llama", "cannot be compiled|not simulated"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(spec: str, model: str, reason: str) -> None:
    with pytest.raises(ActbenchError, match=reason):
        bench.Session(case(spec, model))


def test_a_model_of_nobody_is_refused() -> None:
    session = bench.Session(case("tp:2", "tiny-llama"))
    with pytest.raises(NothingToConvertError, match="no base_model_tp_plan"):
        schemes.build("tp:2").apply(TrainingSetup(torch.nn.Linear(2, 2), processes=session.setup.processes))


def test_a_model_alone_is_not_converted() -> None:
    model = workloads.load_workload(case("tp:2", "tiny-llama")).setup(materialize=True, seed=0).module

    with pytest.raises(ConversionError, match="tp:2 spreads a model over 2"):
        conversion.convert(model, "tp:2")
    with pytest.raises(
        ConversionError, match="tp:2 spreads the model over 2 processes, and this process belongs to no"
    ):
        schemes.build("tp:2").apply(TrainingSetup(model))


def test_a_mesh_of_other_processes_is_refused() -> None:
    session = bench.Session(case("tp:2", "tiny-llama"))
    with pytest.raises(ConversionError, match="tp:4 needs 4 processes along the mesh's axis 'tp', which has 2"):
        schemes.build("tp:4").apply(session.setup)


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\(2, 17, 64\), .* do not divide among 2 processes"):
        measured("tp:2,sequence=true", "tiny-vit")


@pytest.mark.parametrize("spec", ["tp:1", "tp:x", "tp:2+tp:2", "tp:2,only=h.0"])
def test_wrong_specifications_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        schemes.build(spec)


@pytest.mark.parametrize("spec", ["gact:L2", "gact:L1,auto_prec=true", "actnn:L3", "actnn:L2,per_sample=true"])
def test_bits_by_gradients_that_each_process_has_others_of_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="allocates bits by gradients, and ranks of tp have different ones"):
        schemes.build(f"tp:2+{spec}")


@pytest.mark.parametrize("spec", ["gact:L1", "actnn:L2"])
def test_bits_that_are_fixed_are_not(spec: str) -> None:
    assert schemes.build(f"tp:2+{spec}").facet(Spread) == Spread({"tp": 2}, of_layers=True)


@pytest.mark.slow
def test_a_ledger_beside_another_scheme_is_that_of_one_process() -> None:
    def kept(spec: str) -> int:
        return bench.itemize(case(spec)).total_bytes

    assert kept("tp:8,sequence=true") < 0.5 * kept("exact")
    assert kept("pure:bfloat16+tp:8,sequence=true") < 0.5 * kept("pure:bfloat16")
