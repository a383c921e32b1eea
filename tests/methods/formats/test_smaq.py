from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

from actbench import scheme as schemes
from actbench.errors import ConversionError, UsageError
from actbench.measuring import bench, inspection
from actbench.measuring.gradients import gradients_of, relative_error_and_cosine
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.methods.formats.encoded import EncodedOutputs, StepByParameter
from actbench.model.records import Case
from actbench.optim import PackedOptimizer
from actbench.packing.hooked import HookedForward
from actbench.scheme.facets import Diagnosed, LossyForward
from actbench.scheme.setup import TrainingSetup, TrainStep

ALL = "weights/gradients/activations/maps/state"
SMALL = "resnet-cifar@depth=8,width=16"
WIDTH, ROWS = 512, 256
BITS = 6 + 1 / 4 + 64 / 256  # of a code, of an outlier's share of one more, of a block's header


def loss_of(model, batch):
    return model(batch["x"]).square().mean()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def setup_of(model=None, optimizer=lambda p: optim.AdamW(p, lr=1e-3)):
    made = model or network()
    return TrainingSetup(made, loss=loss_of, make_optimizer=lambda module: optimizer(module.parameters()))


def make_batch(rows=ROWS):
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))}


def applied(text, **fields):
    return schemes.build(text).apply(setup_of(**fields))


def reading(text, rows=ROWS):
    setup = setup_of() if text == "exact" else applied(text)
    return CpuMeter().memory(TrainStep(setup, make_batch(rows)))


@pytest.mark.parametrize(
    ("structure", "hooked", "outputs", "stepped", "packed", "rounded"),
    [
        ("activations", True, False, False, False, False),
        ("maps", False, True, False, False, False),
        ("gradients", False, False, True, False, False),
        ("state", False, False, False, True, False),
        ("weights", False, False, False, False, True),
    ],
)
def test_each_structure_is_switched_on_by_itself(structure, hooked, outputs, stepped, packed, rounded):
    setup = applied(f"smaq,on={structure}")
    hooks = [hook for module in setup.module.modules() for hook in module._forward_hooks.values()]
    optimizer = setup.make_optimizer(setup.module)

    assert (HookedForward.of(setup.module) is not None) == hooked
    assert bool(hooks) == outputs
    assert all(isinstance(hook, EncodedOutputs) for hook in hooks)
    assert isinstance(optimizer, StepByParameter) == stepped
    assert isinstance(optimizer, PackedOptimizer) == packed
    assert bool(optimizer._optimizer_step_post_hooks) == rounded
    assert len(setup.sites) == 1


def test_saved_tensors_take_the_bytes_of_the_closed_form_and_the_allocator_confirms_them():
    rows = 2048  # enough that the peak is not in the optimizer's step
    exact, found = reading("exact", rows), reading("smaq,on=activations", rows)
    saved = 2 * rows * WIDTH  # of each tanh, shared with the layer behind it; the batch is somebody else's
    outside = exact.activation_bytes - 4 * saved  # the loss

    assert found.activation_bytes == saved * BITS / 8 + outside
    assert found.peak_bytes < exact.peak_bytes


def test_the_ledger_lists_the_bits_of_the_closed_form():
    packed = [entry for entry in inspection.itemize(applied("smaq"), make_batch).entries if entry.packed]

    assert {(math.prod(entry.shape), entry.bits) for entry in packed} == {(ROWS * WIDTH, BITS)}
    packed = [entry.kept_bytes for entry in packed]  # of what a tanh and the layer behind it save, the second is 0
    assert packed == [ROWS * WIDTH * BITS / 8, 0] * 2


def test_state_takes_the_bytes_of_the_closed_form():
    state = reading("smaq,on=state").optimizer_bytes
    large, small = 2 * WIDTH * WIDTH, 2 * WIDTH + 8 + 8 * WIDTH
    tensors = 6
    packed_small = 8 * WIDTH  # the last weight, of 4096 elements, is packed as well
    whole = (small - packed_small) * 2 * 4 + tensors * 4  # biases, in float32, and counters of steps

    assert state == (large + packed_small) * 2 * BITS / 8 + whole


def test_waiting_gradients_take_the_bytes_of_the_closed_form():
    exact, found = reading("exact"), reading("smaq,on=gradients")
    weights, biases = 2 * WIDTH * WIDTH + 8 * WIDTH, 2 * WIDTH + 8
    eight = 4 * 8  # a bias that is too small to pack

    assert exact.gradients_bytes == 4 * (weights + biases)
    assert found.gradients_bytes == (weights + 2 * WIDTH) * BITS / 8 + eight
    assert found.peak_bytes < exact.peak_bytes


@pytest.mark.parametrize("text", ["smaq,on=gradients", "smaq", f"smaq,on={ALL}", "smaq,on=activations,forward=lossy"])
def test_the_gradient_has_an_error_that_is_not_zero_and_small(text):
    setup, exact = applied(text), setup_of()
    batch = make_batch()
    reference = gradients_of(exact, batch, 0)
    twins = dict(zip(exact.module.parameters(), setup.module.parameters(), strict=True))
    wanted = {twins[parameter]: gradient for parameter, gradient in reference.items()}
    error, cosine = relative_error_and_cosine(gradients_of(setup, batch, 0), wanted)

    assert 0 < error < 0.1
    assert cosine > 0.99
    assert all(parameter.grad is None for parameter in setup.module.parameters())


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "text", ["smaq", f"smaq,on={ALL}", "encode:int:6,on=activations/gradients", f"encode:bf16,on={ALL}"]
)
def test_training_learns(text):
    step = TrainStep(applied(text), make_batch(32))
    losses = [step().item() for _ in range(12)]

    assert losses[-1] < 0.5 * losses[0]


def test_lossy_is_said_where_it_is():
    assert schemes.build("smaq,forward=lossy").facet(LossyForward)
    assert not schemes.build("smaq").facet(LossyForward)
    setup, exact = applied("smaq,forward=lossy"), setup_of()
    batch = make_batch()

    assert setup.forward(batch) != exact.forward(batch)
    assert setup.sites[0].becomes == "smaq, 6.5 bits; outputs of modules are lossy"


def test_sites_say_what_is_simulated_and_what_is_stored():
    setup = applied(f"smaq,on={ALL}")
    text = {site.path: site.becomes for site in setup.sites}
    before, after = inspection.trace(setup_of(), make_batch), inspection.trace(setup, make_batch)
    sites, _ = inspection.inspect(before, after, setup)
    warnings = schemes.build(f"smaq,on={ALL},forward=lossy").apply(setup_of()).warnings
    read = {site.path: (site.bytes_before, site.bytes_after) for site in sites}
    weights, biases = 2 * WIDTH * WIDTH + 8 * WIDTH, 2 * WIDTH

    assert text == {
        "": "smaq, 6.5 bits",
        "(weights)": "simulated: values of smaq",
        "(gradient maps)": "simulated: values of smaq",
        "(weight gradients)": "smaq, 6.5 bits",
        "(optimizer state)": "smaq, 6.5 bits",
    }
    assert setup_of().warnings == applied("smaq").warnings == ()
    assert warnings[0].endswith("weights, gradient maps are simulated: their values are rounded, no byte is saved")
    assert "the forward pass is lossy" in warnings[1]
    assert read["(weight gradients)"] == (4 * (weights + biases + 8), (weights + biases) * BITS / 8 + 4 * 8)
    assert read["(optimizer state)"] == (None, None)
    assert read[""][1] < read[""][0]


def test_the_variance_of_rounding_is_told_where_activations_alone_make_it():
    diagnosed = schemes.build("smaq,on=activations").facet(Diagnosed)
    assert diagnosed is not None
    found = diagnosed.of(applied("smaq,on=activations"), make_batch(32), 0)

    assert 0 < next(each.value for each in found if each.name == "quantization_variance_observed") < 0.01
    assert schemes.build("smaq,on=maps").facet(Diagnosed) is None


def test_a_measurement_warns_of_what_is_simulated():
    case = Case(model=SMALL, batch_size=2, scheme="smaq,on=maps", gradient_quality=False)

    assert any("gradient maps are simulated" in text for text in bench.measure(case).warnings)


def test_a_model_alone_packs_its_activations_and_says_what_is_left():
    setup = schemes.build("smaq").apply(TrainingSetup(network()))

    assert [site.was for site in setup.sites] == ["activations"]
    assert [place.kind for place in setup.unreached] == ["optimizer state"]
    assert 'actbench.optim.packed(optimizer, encoding="smaq")' in setup.unreached[0].reason


def test_only_what_can_be_packed_is_said_to_be():
    setup = schemes.build("encode:smaq_simulated").apply(TrainingSetup(network()))

    assert "apply the scheme to a TrainingSetup with make_optimizer" in setup.unreached[0].reason
    assert "packed" not in setup.unreached[0].reason


@pytest.mark.parametrize("text", ["smaq,on=state", "smaq,on=gradients/activations", "smaq,on=weights"])
def test_a_model_alone_is_refused_what_needs_its_optimizer(text):
    with pytest.raises(ConversionError, match="need the optimizer, which a model alone does not bring"):
        schemes.build(text).apply(TrainingSetup(network()))


def test_a_frozen_model_or_one_of_another_type_is_refused():
    with pytest.raises(ConversionError, match="Sequential has no parameter to train"):
        applied("smaq,on=gradients", model=network().requires_grad_(False))
    with pytest.raises(ConversionError, match=r"parameters of torch.complex64, which fp8:e4m3 does not take"):
        applied("encode:fp8:e4m3", model=nn.Linear(4, 4, dtype=torch.complex64))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_keeps_its_weights_and_packs_its_activations():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ConversionError, match="FSDP does not go with weights"):
        applied("smaq,on=weights/activations", model=model)
    loss_of(applied("smaq,on=activations", model=model).module, make_batch()).backward()

    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("gact:L1", "smaq", "packs or moves its saved tensors already"),
        ("offload", "smaq,on=activations", "packs or moves its saved tensors already"),
        ("smaq", "gact:L1", "packs or moves its saved tensors already"),
        ("smaq,on=state", "encode:int:6,on=state", "another scheme stores optimizer state in a format"),
        ("smaq,on=maps", "encode:int:6,on=maps", "another scheme stores gradient maps in a format"),
    ],
)
def test_two_schemes_for_one_structure_are_refused(first, second, why):
    with pytest.raises(ConversionError, match=why):
        schemes.build(second).apply(applied(first))


def test_two_formats_for_two_structures_go_together():
    setup = applied("smaq,on=activations+encode:bf16,on=state/maps")
    step = TrainStep(setup, make_batch(32))
    losses = [step().item() for _ in range(4)]

    assert losses[-1] < losses[0]
    assert {site.becomes for site in setup.sites} == {"smaq, 6.5 bits", "bf16, 16 bits", "simulated: values of bf16"}


def test_an_optimizer_without_a_packed_twin_is_refused():
    setup = applied("smaq", optimizer=lambda p: optim.RMSprop(p))
    with pytest.raises(UsageError, match="RMSprop"):
        setup.make_optimizer(setup.module)


@pytest.mark.parametrize(
    "text",
    [
        f"smaq,on={ALL}",
        *(
            pytest.param(text, marks=pytest.mark.sampled(slow=2))
            for text in ("smaq", "encode:fp8:e4m3", "encode:s2fp8", "encode:smaq_simulated")
        ),
    ],
)
def test_a_simulated_device_runs_it(text, read):
    exact, found = read(SMALL, "exact"), read(SMALL, text)

    if text != "encode:smaq_simulated":
        assert found.activation_bytes < 0.4 * exact.activation_bytes
        assert found.optimizer_bytes < 0.35 * exact.optimizer_bytes
    if "gradients" in text:
        assert found.gradients_bytes < 0.25 * exact.gradients_bytes
    assert found.weights_bytes == exact.weights_bytes
