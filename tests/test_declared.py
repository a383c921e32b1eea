"""Schemes are refused before torch is imported, with the words of building them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ModelError, SpecError, UsageError
from actbench.model import declared
from actbench.model.declared.schemes import _schemes
from actbench.simulator import profiles
from actbench.workload import names

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from actbench.cli import main; main()"


def message(error: type[Exception], refuse: Callable[[str], object], text: str) -> str:
    with pytest.raises(error) as refused:
        refuse(text)
    return str(refused.value)


def test_what_is_declared_is_what_there_is() -> None:
    found, known = _schemes(), schemes.find_schemes()
    assert {name: each.positional for name, each in found.items()} == {
        name: each.positional for name, each in known.items()
    }
    fields = {name: list(each.model.model_fields) for name, each in found.items() if each.model is not None}
    assert fields == {name: list(known[name].model_fields) for name in known}


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
        declared.check_device_profile(name)


@pytest.mark.parametrize("name", ["resnet19", "roberta-bas", "gpt", "keypointrcnn_resnet50_fpn", "gcm@hidden_size=4"])
def test_wrong_models_have_the_message_of_building(name: str) -> None:
    assert message(ModelError, declared.check_model, name) == message(ModelError, names.parse_model_name, name)


def test_a_wrong_device_has_the_message_of_reading_it() -> None:
    checked = message(UsageError, declared.check_device_profile, "rtx4090")
    assert checked == message(UsageError, profiles.get, "rtx4090")


COMMANDS: dict[str, Any] = {
    "measure resnet18 -s fewbot:3": "--scheme: scheme 'fewbot:3': there is no scheme 'fewbot'; did you mean 'fewbit'?",
    "measure resnet18 --gelu-bits 9": "--gelu-bits: scheme 'fewbit:9,functions=gelu': bits=9: must be a whole number",
    "measure resnet18 --meter cudda": "--meter: 'cudda' is not one of 'simulated', 'cpu' or 'cuda'",
    "convert resnet18 -s fewbit:9": "--scheme: scheme 'fewbit:9': bits=9: must be a whole number from 1 to 8",
    "sweep -s exact -s lora:0": "--scheme: scheme 'lora:0': r=0: input should be greater than 0",
    "fit resnet18 --device-profile t4 -s gact:L9": "--scheme: scheme 'gact:L9': level=L9: input should be 'L0'",
    "fit resnet19 --device-profile t4": "there is no model 'resnet19'; did you mean resnet18 or ",
    "fit resnet18 --device-profile h100": "--device-profile 'h100': there is no such device profile; did you mean",
    "measure resnet19": "there is no model 'resnet19'; did you mean resnet18 or ",
    "measure resnet18 --device-profile t5": "--device-profile 't5': there is no such device profile; did you mean t4?",
    "convert resnet19 -s fewbit:3": "there is no model 'resnet19'; did you mean resnet18 or ",
    "sweep quickstar": "or did you mean the recipe 'quickstart'?",
    "train -s checkpoint,foo=1": "--scheme: scheme 'checkpoint,foo=1': checkpoint has no key 'foo'; its keys: only",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_flag_is_refused_where_torch_cannot_be_imported(command: str) -> None:
    run = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert COMMANDS[command] in ended.stderr
