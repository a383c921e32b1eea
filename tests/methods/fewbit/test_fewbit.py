import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.methods.fewbit.activation import activation
from actbench.methods.fewbit.scheme import FewBit
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.methods.fewbit.tables import table
from actbench.scheme.facets import Packs, RunsFiles
from actbench.scheme.setup import TrainingSetup


def guises():
    from transformers import activations

    return {
        "nn.GELU": (nn.GELU(), "gelu"),
        "nn.GELU tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
        "GELUActivation": (activations.GELUActivation(), "gelu"),
        "GELUActivation in Python": (activations.GELUActivation(use_gelu_python=True), "gelu"),
        "GELUTanh": (activations.GELUTanh(), "gelu_tanh"),
        "GELUTanh in Python": (activations.GELUTanh(use_gelu_tanh_python=True), "gelu_tanh"),
        "NewGELUActivation": (activations.NewGELUActivation(), "gelu_tanh"),
        "FastGELUActivation": (activations.FastGELUActivation(), "gelu_tanh"),
        "AccurateGELUActivation": (activations.AccurateGELUActivation(), "gelu_tanh"),
        "QuickGELUActivation": (activations.QuickGELUActivation(), "quick_gelu"),
    }


def convert(model, spec="fewbit:3"):
    return schemes.build(spec).apply(TrainingSetup(model))


@pytest.mark.parametrize("guise", guises())
@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.sampled(slow=8)), 3])
def test_every_guise_is_exact_forward_and_has_the_table_of_its_own_derivative(guise, bits):
    module, function = guises()[guise]
    model = nn.Sequential(module)
    x = (3 * torch.randn(999)).requires_grad_()
    expected = module(x)
    converted = convert(model, f"fewbit:{bits}").module
    y = converted(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    found = table(function, bits)
    codes = (x.detach()[:, None] > torch.tensor(found.borders)).sum(1)

    assert isinstance(model[0], StepwiseActivation)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, grad * torch.tensor(found.levels)[codes])


def test_the_tables_of_the_guises_differ():
    assert len({table(name, 3).levels for name in ("gelu", "gelu_tanh", "quick_gelu")}) == 3


def test_every_gelu_class_of_transformers_is_converted_or_listed():
    from transformers import activations

    names = [name for name, value in vars(activations).items() if isinstance(value, type) and "GELU" in name.upper()]
    assert len(names) >= 8
    for name in names:
        cls = getattr(activations, name)
        module = cls(-10, 10) if name == "ClippedGELUActivation" else cls()
        setup = convert(nn.Sequential(nn.GELU(), module))
        assert len(setup.sites) + len(setup.unreached) == 2, name


def test_sites_say_what_was_and_what_is():
    from transformers import activations

    model = nn.ModuleDict({"a": nn.GELU(), "b": activations.NewGELUActivation(), "c": nn.Linear(2, 2)})
    sites = convert(model, "fewbit:2").sites
    assert [(site.path, site.was, site.becomes) for site in sites] == [
        ("a", "nn.GELU", "2-bit GELU"),
        ("b", "NewGELUActivation", "2-bit GELU (tanh)"),
    ]


def test_a_gelu_that_is_clipped_or_rebound_is_unreached_and_a_subclass_is_converted():
    from transformers import activations

    class MyGELU(nn.GELU):
        pass

    rebound = nn.GELU()
    rebound.forward = torch.relu
    model = nn.Sequential(nn.GELU(), MyGELU(), activations.ClippedGELUActivation(-10, 10), rebound)
    setup = convert(model)

    assert [(item.path, item.kind) for item in setup.unreached] == [("2", "ClippedGELUActivation"), ("3", "GELU")]
    assert [(site.path, site.was) for site in setup.sites] == [("0", "nn.GELU"), ("1", "call of F.gelu")]


def test_a_shared_module_stays_shared_and_state_dict_keys_stay():
    shared = nn.GELU()
    model = nn.Sequential(nn.Linear(2, 3), shared, nn.Linear(3, 2), shared)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    setup = convert(model)

    assert setup.module is model
    assert model[1] is model[3]
    assert len(setup.sites) == 1
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_model_that_is_itself_a_gelu():
    setup = convert(nn.GELU())
    assert isinstance(setup.module, StepwiseActivation)
    assert [site.path for site in setup.sites] == [""]


def test_functions_narrow_what_is_converted():
    model = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"))
    setup = convert(model, "fewbit:3,functions=gelu_tanh")
    assert [site.path for site in setup.sites] == ["1"]
    both = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"))
    assert len(convert(both, "fewbit:3,functions=gelu").sites) == 2


def test_weight_and_scale_choose_the_table():
    model = nn.Sequential(nn.GELU())
    convert(model, "fewbit:3,weight=normal,scale=2")
    assert model[0].steps.levels == table("gelu", 3, "normal", 2.0).levels


def test_nothing_to_convert_says_what_is_there():
    with pytest.raises(ConversionError, match=r"fewbit:3.*gelu.*Sequential holds 2 nn.ReLU, 1 nn.Tanh"):
        convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Tanh()), "fewbit:3,functions=gelu")
    with pytest.raises(ConversionError, match="no activation modules, only 1 Linear"):
        convert(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fewbit:2.5", "bits=2.5: must be a whole number from 1 to 8"),
        ("fewbit:0", "bits=0: must be"),
        ("fewbit:9", "bits=9: must be"),
        ("fewbit:-1", "bits=-1: must be"),
        ("fewbit:nan", "bits=nan: must be"),
        ("fewbit:three", "bits=three: must be"),
        ("fewbit:3,functions=relu7", "'relu7' is not one of gelu, gelu_tanh, quick_gelu"),
        ("fewbit:3,functions=relu7", "did you mean 'relu'?"),
        ("fewbit:3,functions=nowhere/act.py:f", "nowhere/act.py cannot be read"),
        ("fewbit:3,weight=flat", "'uniform' or 'normal'"),
        ("fewbit:3,scale=2", "scale=2: a uniform weight has no scale"),
        ("fewbit:3,weight=normal,scale=0", "scale=0"),
        ("fewbit:3,weight=normal,scale=nan", "scale=nan"),
        ("fewbit:3,levels=4", "no key 'levels'"),
    ],
)
def test_wrong_specifications(spec, message):
    with pytest.raises(SpecError) as caught:
        schemes.build(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("bits", [True, 2.0, 2.5, None])
def test_bits_are_whole_numbers_in_python_too(bits):
    with pytest.raises(ValueError, match="whole number"):
        FewBit(bits=bits)


def test_spec_and_claim():
    scheme = schemes.build("fewbit:4,functions=gelu")
    assert scheme.spec == "fewbit:4,functions=gelu"
    assert scheme.facet(Packs) == Packs(4)
    assert schemes.build("fewbit").spec == "fewbit:3"


def test_a_folder_called_as_a_function_is_told_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gelu").mkdir()
    (tmp_path / "gelu" / "f.py").write_text("def fn(x):\n    return x\n")
    scheme = FewBit(functions=("silu", "gelu/f.py:fn", "relu"))

    assert scheme.spec == "fewbit:3,functions=silu/./gelu/f.py:fn/relu"
    assert schemes.build(scheme.spec) == scheme
    assert scheme.facet(RunsFiles) == RunsFiles(("./gelu/f.py:fn",))


CONTINUOUS = {
    "celu": (nn.CELU(0.5), {"alpha": 0.5}),
    "elu": (nn.ELU(2.0), {"alpha": 2.0}),
    "hardswish": (nn.Hardswish(), {}),
    "logsigmoid": (nn.LogSigmoid(), {}),
    "mish": (nn.Mish(), {}),
    "selu": (nn.SELU(), {}),
    "sigmoid": (nn.Sigmoid(), {}),
    "silu": (nn.SiLU(), {}),
    "softplus": (nn.Softplus(2.0, 5.0), {"beta": 2.0, "threshold": 5.0}),
    "softsign": (nn.Softsign(), {}),
    "tanh": (nn.Tanh(), {}),
    "tanhshrink": (nn.Tanhshrink(), {}),
}


QUICK = [*((function, 3) for function in CONTINUOUS), *(("tanh", bits) for bits in (1, 8))]  # folded onto |x|


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        pytest.param(function, bits, marks=() if (function, bits) in QUICK else pytest.mark.sampled(slow=24))
        for function in CONTINUOUS
        for bits in range(1, 9)
    ],
)
def test_the_gradient_of_every_function_is_that_of_its_table(function, bits):
    exact, parameters = CONTINUOUS[function]
    found = table(activation(function, **parameters), bits)
    x = torch.cat([3 * torch.randn(999), torch.tensor([0.0, float("inf"), float("-inf")])]).requires_grad_()
    layer = convert(exact, f"fewbit:{bits}").module
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    compared = x.detach().abs() if found.fold else x.detach()
    codes = (compared[:, None] > torch.tensor(found.borders)).sum(1)

    assert torch.equal(y.nan_to_num(7), exact(x).nan_to_num(7))
    assert torch.equal(x.grad, grad * torch.tensor(found.levels)[codes])
    assert layer.state_dict() == {}


@pytest.mark.parametrize(  # on a new machine a table of 256 levels is computed first, in two seconds
    "function", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tanh")) for name in CONTINUOUS]
)
def test_the_gradient_is_near_the_exact_one_at_8_bits(function):
    exact, _ = CONTINUOUS[function]
    x = torch.randn(20000, requires_grad=True)
    (expected,) = torch.autograd.grad(exact(x).sum(), x)
    (found,) = torch.autograd.grad(convert(exact, "fewbit:8").module(x).sum(), x)
    assert ((found - expected).norm() / expected.norm()).item() < 0.006


def test_every_activation_of_transformers_is_converted_or_listed():
    from transformers import activations

    others = {"LinearActivation", "ClassInstantier"}
    for name, value in vars(activations).items():
        if not (isinstance(value, type) and issubclass(value, nn.Module)) or name in others:
            continue
        module = value(-10, 10) if name == "ClippedGELUActivation" else value()
        setup = convert(nn.Sequential(nn.GELU(), module))
        assert len(setup.sites) + len(setup.unreached) == 2, name


def test_what_cannot_be_converted_says_why():
    setup = convert(nn.Sequential(nn.GELU(), nn.PReLU(), nn.CELU(-1.0), nn.RReLU()))
    reasons = {item.kind: item.reason for item in setup.unreached}
    assert "learns its slope" in reasons["PReLU"]
    assert "celu with alpha=-1" in reasons["CELU"]
    assert "at random" in reasons["RReLU"]


@pytest.mark.parametrize(
    ("model", "spec", "count"),
    [
        ("tiny-llama", "fewbit:3,functions=silu", 2),
        ("tiny-t5", "fewbit:3,functions=relu", 4),
        ("tiny-bert", "fewbit:3,functions=gelu/tanh", 3),
        ("resnet18", "fewbit:3,functions=relu", 9),
        ("mobilenet_v3_small", "fewbit:3,functions=hardsigmoid", 9),  # one in each squeeze-and-excitation
    ],
)
def test_models_of_the_libraries(model, spec, count):
    from actbench import workload as workloads
    from actbench.model.records import Case

    workload = workloads.load_workload(Case(model=model, batch_size=1, weights="random"))
    setup = schemes.build(spec).apply(workload.setup(materialize=False, seed=0))
    assert len(setup.sites) == count
