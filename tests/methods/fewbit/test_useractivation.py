"""Activation functions of a user's own: ``file.py:name``."""

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, ModelError, SpecError, UsageError
from actbench.methods.fewbit.activation import own_activation
from actbench.methods.fewbit.tables import table
from actbench.scheme.facets import RunsFiles
from actbench.scheme.setup import TrainingSetup
from actbench.tools import convert as conversion

SOURCE = """
import torch
from torch import nn

class Bump(nn.Module):
    def __init__(self, width=1.0):
        super().__init__()
        self.width = width
    def forward(self, x):
        return x * torch.sigmoid(self.width * x)

class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return self.slope * torch.tanh(x)

def swish(x):
    return x * torch.sigmoid(x)

def ramp(x):
    return (x + x.abs()) / 2

def mean(x):
    return x - x.mean() ** 2

def step(x):
    return torch.where(x > 0.25, 2 * x, torch.tanh(x))

def fails(x):
    raise ValueError("no")

def detached(x):
    return x.detach()

def total(x):
    return x.sum()

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some where" / "acts.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def loaded(file, name):
    found = {}
    exec(compile(file.read_text(), str(file), "exec"), found)  # as another run of the same file
    return found[name]


def convert(model, spec):
    return schemes.build(spec).apply(TrainingSetup(model))


def expected_gradient(x, found):
    codes = (x.detach()[:, None] > torch.tensor(found.borders)).sum(1)
    return torch.tensor(found.levels)[codes]


def test_layers_of_a_class_each_have_the_table_of_their_own_attributes(file):
    bump = loaded(file, "Bump")
    model = nn.ModuleList([bump(), bump(2.0), nn.SiLU(), bump()])
    setup = convert(model, f"fewbit:3,functions={file}:Bump")

    assert [(site.path, site.was, site.becomes) for site in setup.sites] == [
        (path, "Bump", "3-bit Bump") for path in ("0", "1", "3")
    ]
    assert model[0].steps == model[3].steps
    x = torch.randn(500, requires_grad=True)
    for layer, width in ((model[0], 1.0), (model[1], 2.0)):
        best = table(own_activation("it", lambda t, w=width: t * torch.sigmoid(w * t)), 3)
        y = layer(x)
        assert torch.equal(y, bump(width)(x))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, best))


def test_a_function_stands_for_every_layer_that_computes_it(file):
    model = nn.Sequential(nn.SiLU(), nn.GELU(), nn.Linear(2, 2), nn.Dropout(0.5), nn.Flatten(), nn.Sigmoid())
    state = torch.get_rng_state()
    setup = convert(model, f"fewbit:2,functions={file}:swish")
    assert [site.path for site in setup.sites] == ["0"]
    assert model[0].steps.levels == pytest.approx(table("silu", 2).levels, abs=1e-9)
    assert torch.equal(torch.get_rng_state(), state)


def test_known_functions_stand_beside_ones_own_and_the_specification_builds_it_again(file):
    scheme = schemes.build(f"fewbit:2,functions=gelu/{file}:swish/tanh")
    assert scheme.functions == ("gelu", f"{file}:swish", "tanh")
    assert schemes.build(scheme.spec) == scheme
    setup = scheme.apply(TrainingSetup(nn.Sequential(nn.SiLU(), nn.GELU(), nn.Tanh(), nn.Mish())))
    assert [site.path for site in setup.sites] == ["0", "1", "2"]


def test_a_layer_may_give_another_result_for_what_is_not_finite(file):
    assert [site.path for site in convert(nn.Sequential(nn.ReLU()), f"fewbit:2,functions={file}:ramp").sites] == ["0"]


def test_a_jump_is_found():
    found = own_activation("step", lambda x: torch.where(x > 0.25, 2 * x, torch.tanh(x)))
    assert found.kinks == pytest.approx((0.25,), abs=1e-9)
    assert 0.25 in table(found, 2).borders


def test_an_even_derivative_is_seen():
    assert own_activation("tanh", torch.tanh).even
    assert not own_activation("silu", nn.functional.silu).even


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "not elementwise"),
        ("fails", "ValueError: no"),
        ("detached", "cannot be differentiated"),
        ("total", "one value for each"),
    ],
)
def test_a_function_without_a_table_is_refused(file, name, message):
    with pytest.raises(UsageError, match=message):
        own_activation(name, loaded(file, name))


def test_weights_to_train_are_refused(file):
    with pytest.raises(ConversionError, match="weights to train"):
        convert(nn.Sequential(loaded(file, "Learned")()), f"fewbit:2,functions={file}:Learned")


def test_what_is_no_function_is_refused_when_the_file_is_run(file):
    with pytest.raises(UsageError, match="neither a function"):
        convert(nn.Sequential(nn.ReLU()), f"fewbit:2,functions={file}:number")


def test_a_wrong_name_is_refused_before_the_file_is_run(file):
    file.write_text("raise SystemExit\n" + SOURCE)
    with pytest.raises(SpecError, match="did you mean 'swish'"):
        schemes.build(f"fewbit:2,functions={file}:swich")
    assert schemes.build(f"fewbit:2,functions={file}:swish").facet(RunsFiles) == RunsFiles((f"{file}:swish",))


def test_no_layer_of_it_is_an_error(file):
    with pytest.raises(ConversionError, match=r"swish to convert; Sequential holds 1 nn\.ReLU"):
        convert(nn.Sequential(nn.ReLU()), f"fewbit:2,functions={file}:swish")


def test_a_saved_model_runs_the_file_only_when_that_is_allowed(file, tmp_path):
    from actbench.tools.convert.folders import load_converted, save_converted

    model = conversion.convert(nn.Sequential(nn.Linear(2, 2), nn.SiLU()), f"fewbit:2,functions={file}:swish")
    folder = save_converted(model, tmp_path / "saved")
    plain = nn.Sequential(nn.Linear(2, 2), nn.SiLU())
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_converted(folder, model=plain)
    assert load_converted(folder, model=plain, trust_remote_code=True) is plain
