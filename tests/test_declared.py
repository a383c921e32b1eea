"""Schemes are refused before torch is imported, with the words of building them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import scheme_parameters

from actbench import plugins, scheme as schemes, workload as workloads
from actbench.cli import described
from actbench.errors import ModelError, SpecError, UsageError
from actbench.model import declared
from actbench.model.declared.schemes import FILE, compilable, declarations
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.workload import names

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from actbench.cli import main; main()"


def message(error: type[Exception], refuse: Callable[[str], object], text: str) -> str:
    with pytest.raises(error) as refused:
        refuse(text)
    return str(refused.value)


def test_what_is_declared_is_what_there_is() -> None:
    assert FILE.read_text() == scheme_parameters.text(), "make parameters writes it anew"
    assert described.FILE.read_text() == scheme_parameters.words(), "make parameters writes it anew"
    known = schemes.find_schemes()
    assert [*declarations()] == [*known]
    for name, each in declarations().items():
        assert [*each["parameters"]] == [*known[name].model_fields]


@pytest.mark.parametrize("changes", [("saved tensors",), ("optimizer", "gradients"), ("precision",), ("batch",)])
def test_examples_of_messages_are_those_of_the_classes(changes: tuple[str, ...]) -> None:
    expected = [
        name
        for name, scheme in schemes.find_schemes().items()
        if scheme.card.is_example and not set(changes).isdisjoint(scheme.model_construct().changes)
    ]
    assert schemes.examples(changes) == expected
    assert compilable() == [name for name, scheme in schemes.find_schemes().items() if scheme.card.compiles]


CHECKS = """
import sys
from actbench.model.declared import check_scheme, spelled
check_scheme('fewbit:3+randomized:0.2+adam8bit:bitsandbytes')
assert spelled('autocast:bf16') == ('autocast:bfloat16',) or spelled('autocast:bf16') == ('autocast',)
entered = [name for name in sys.modules if name.startswith('actbench.methods')]
print(*sorted(name for name in entered if name.count('.') > 2))
assert 'torch' not in sys.modules
"""


def test_a_check_imports_the_torch_free_types_of_the_named_schemes_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["actbench.methods.fewbit.params", "actbench.methods.lowbit.params"]


def test_schemes_are_found_without_torchs_compiler() -> None:
    """It takes seconds to import, which what plans or converts nothing yet does without."""
    found = "import sys; from actbench import scheme; scheme.find_schemes(); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", found], check=True)


def test_a_scheme_of_another_package_is_checked_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger(schemes.Scheme):
        name = "stranger"
        positional = "width"
        width: int = 3

    entry = EntryPoint("stranger", f"{__name__}:Stranger", "actbench.schemes")
    plugin = plugins.Plugin("stranger", entry)
    monkeypatch.setattr(plugins.Plugin, "is_ours", property(lambda each: each.name != "stranger"))
    monkeypatch.setattr(plugins.Plugin, "load", lambda each: Stranger if each.name == "stranger" else each.entry.load())
    found = {**plugins.installed("schemes"), "stranger": plugin}
    monkeypatch.setattr(plugins, "installed", lambda group: found)
    declared.check_scheme("stranger:4+fewbit:3")
    with pytest.raises(SpecError, match="width=wide"):
        declared.check_scheme("stranger:wide")


def test_what_a_scheme_takes_by_default_or_as_a_variant_is_right() -> None:
    for name, scheme in schemes.find_schemes().items():
        for variant in ("", *scheme.card.variants_for(4)):
            try:
                built = schemes.build(name + variant)
            except SpecError:  # encode has no default
                continue
            declared.check_scheme(built.spec)


@pytest.mark.parametrize(
    "text",
    [
        *("fewbot", "fewbit:9", "fewbit:three", "fewbit:3,foo=1", "fewbit:3+actnn:L9", "checkpoint:2", "lora:0", "+"),
        *("gact:L2,bits=9", "adam8bit:adam", "randomized:2", "randomized:1e-99", "compile,budget=2", "resilu2,bits=1"),
        *("dropit:0.1,share=0.2", "autocast:float8", "qlora,dropout=1", "selective,every=0", "fewbit:"),
        *("checkpoint+checkpoint", "fewbit:3+fewbit:2,only=0", "exact+checkpoint", "offload+exact+fewbit:3"),
    ],
)
def test_wrong_specifications_have_the_message_of_building(text: str) -> None:
    assert message(SpecError, declared.check_scheme, text) == message(SpecError, schemes.build, text)


@pytest.mark.parametrize("text", ["adam8bit:bnb", "adam8bit:bitsandbytes", "adam8bit,library=bitsandbytes"])
def test_both_names_of_bitsandbytes_are_taken(text: str) -> None:
    declared.check_scheme(text)
    assert schemes.build(text).spec == "adam8bit:bnb"


def test_every_model_and_device_is_known() -> None:
    for model in workloads.available():
        declared.check_model(model.spec)
    for preset in names.presets().values():
        for name in (*preset.also, *preset.hub, f"{preset.name}@num_hidden_layers=2"):
            declared.check_model(name)
    for name in (*profiles.profile_names(), "mine.toml"):
        assert declared.device_named(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(
            ("h100", "h100-80gb"),
            ("a100", "a100-80gb"),
            ("v100", "v100-16gb"),
            ("colab", "t4"),
            ("T4", "t4"),
            ("L4", "l4"),
        ),
        *(
            ("4090", "rtx-4090"),
            ("RTX 4090", "rtx-4090"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("rtx4090", "rtx-4090"),
        ),
        *(("Tesla V100", "v100-16gb"), ("3060", "rtx-3060-12gb"), ("RTX 4070 Ti SUPER", "rtx-4070-ti-super")),
    ],
)
def test_devices_are_named_as_they_are_spoken_of(text: str, name: str) -> None:
    assert declared.device_named(text) == name
    assert profiles.get(text).name == name


def test_no_two_devices_have_one_name() -> None:
    names = [each for name in profiles.shipped() for each in (name, *profiles.shipped()[name].also)]
    assert [declared.device_named(each) for each in names if each in profiles.shipped()] == list(profiles.shipped())
    assert len({declared.device_named(each) for each in names}) == len(profiles.shipped())


@pytest.mark.parametrize("name", ["resnet19", "roberta-bas", "gpt", "keypointrcnn_resnet50_fpn", "gcm@hidden_size=4"])
def test_wrong_models_have_the_message_of_building(name: str) -> None:
    assert message(ModelError, declared.check_model, name) == message(ModelError, names.parse_model_name, name)


OWN = "import torch\n\nif torch:\n    def build():\n        pass\n\nother = build\n"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("onw.py:build", "there is no file {place}/onw.py; did you mean own.py?"),
        ("own.py:biuld", "own.py has no function 'biuld'"),
        ("mine.py:biuld", "mine.py has no function 'biuld'; did you mean build?"),
        ("nothere/m.py:build", "there is no file {place}/nothere/m.py"),
    ],
)
def test_a_missing_function_has_the_message_of_loading_it_and_a_near_name(
    tmp_path: Path, model: str, words: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mine.py").write_text("def build():\n    pass\n")
    case = Case(model=f"{tmp_path}/{model}", batch_size=1)
    checked = message(ModelError, declared.check_model, case.model)
    assert checked.endswith(words.format(place=tmp_path))
    assert checked == message(ModelError, workloads.load_workload, case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        OWN,
        "from torch import manual_seed as build\n",
        "from torch.nn import *\n",
        "globals()['build'] = print\n",
        "import sys\nsys.modules[__name__].build = print\n",
        "def __getattr__(name):\n    return print\n",
        "def build(:\n",
        "try:\n    (build := print)\nfinally:\n    pass\n",
    ],
)
def test_a_file_that_may_have_the_function_is_left_to_running_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(text)
    declared.check_model(f"{tmp_path}/own.py:build")


def test_an_absolute_path_may_be_one_of_another_machine() -> None:
    declared.check_model("/nothere/own.py:build", elsewhere=True)
    with pytest.raises(ModelError, match="there is no file"):
        declared.check_model("nothere/own.py:build", elsewhere=True)


def test_a_wrong_device_is_refused_with_near_names() -> None:
    assert "rtx-4090" in message(UsageError, declared.device_named, "rtx-4900")
    assert "known: cpu, " in message(UsageError, profiles.get, "z")


COMMANDS: dict[str, Any] = {
    "measure resnet18 -s fewbot:3": "--scheme: scheme 'fewbot:3': there is no scheme 'fewbot'; did you mean 'fewbit'?",
    "measure resnet18 --gelu-bits 9": "--gelu-bits: scheme 'fewbit:9,functions=gelu': bits=9: must be a whole number",
    "measure resnet18 --meter cudda": "--meter: 'cudda' is not one of 'simulated', 'cpu' or 'cuda'",
    "convert resnet18 -s fewbit:9": "--scheme: scheme 'fewbit:9': bits=9: must be a whole number from 1 to 8",
    "sweep -s exact -s lora:0": "--scheme: scheme 'lora:0': r=0 must be greater than 0",
    "fit resnet18 --device-profile t4 -s gact:L9": "--scheme: scheme 'gact:L9': level=L9 must be 'L0'",
    "fit resnet19 --device-profile t4": "there is no model 'resnet19'; did you mean resnet18 or ",
    "fit resnet18 --device-profile h100": "--device-profile 'h100': there is no such device profile; did you mean",
    "measure resnet19": "there is no model 'resnet19'; did you mean resnet18 or ",
    "measure resnet18 --device-profile t5": "--device-profile 't5': there is no such device profile; did you mean t4?",
    "measure nothere.py:build": "model 'nothere.py:build': there is no file nothere.py",
    "fit nothere.py:build --device-profile t4": "actbench: model 'nothere.py:build': there is no file nothere.py",
    "sweep nothere.py:build": "model 'nothere.py:build': there is no file nothere.py",
    "convert resnet19 -s fewbit:3": "there is no model 'resnet19'; did you mean resnet18 or ",
    "sweep quickstar": "or did you mean the recipe 'quickstart'?",
    "train -s checkpoint,foo=1": "--scheme: scheme 'checkpoint,foo=1': checkpoint has no key 'foo'; its keys: only",
}


@pytest.mark.sampled(fast=3, slow=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_is_refused_where_torch_cannot_be_imported(command: str) -> None:
    run = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert COMMANDS[command] in ended.stderr
