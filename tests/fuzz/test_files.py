from __future__ import annotations

import json
import math

from hypothesis import strategies as st

from actbench.errors import ActbenchError
from actbench.run import recipes
from actbench.run.recipes import Recipe
from actbench.simulator import profiles
from actbench.tools.convert import savedmodel


def toml(value):
    """Write a value in TOML, tables inline; what TOML does not know is left out of its table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf"}.get(str(value), str(value))
    return "nan" if value is None else json.dumps(value, ensure_ascii=True).replace("\\ud", "\\U0000d")


def write(path, document):
    text = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in document.items())
    path.write_text(text, encoding="utf-8", errors="replace")


RECIPE = {
    "title": "A title",
    "workload": [
        {"model": ["tiny-vit", "resnet-cifar"], "batch_size": "8-32*2", "optimizer": "sgd", "dtype": ["float32"]},
        {"model": "roberta-base", "batch_size": [4], "sequence_length": [64, 128], "meters": ["simulated"]},
    ],
    "measure": {"meters": ["simulated"], "memory_limit": "4GiB", "device_profile": "cpu", "seed": [0, 1]},
    "scheme": [
        {"spec": "fewbit:3", "models": ["tiny-vit"], "label": "a label"},
        {
            "spec": "randomized:0.2",
            "published": [{"quantity": "peak_saving", "value": 0.1, "setting": "s", "source": "x"}],
        },
    ],
}


def test_recipes(fuzz, tmp_path, changed):
    path = tmp_path / "recipe.toml"

    def check(document):
        write(path, document)
        try:
            found = recipes.load(path)
        except ActbenchError:
            return
        assert isinstance(found, Recipe)
        assert found.cases()

    fuzz(changed(RECIPE), check)


def test_recipes_of_broken_text(fuzz, tmp_path):
    path = tmp_path / "recipe.toml"
    sources = [recipes.source(name).encode() for name in recipes.names()]

    def check(example):
        source, start, length, junk = example
        start %= len(source)
        path.write_bytes(source[:start] + junk + source[start + length :])
        try:
            recipes.load(path)
        except ActbenchError:
            return

    parts = st.tuples(st.sampled_from(sources), st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=8))
    fuzz(parts, check)


PROFILE = {
    "gib": 24,
    "compute_capability": [8, 6],
    **dict.fromkeys(("fp32", "half", "bandwidth", "link", "launch", "peer", "network"), 30.5),
    "devices": 4,
    "host": dict.fromkeys(("forward", "backward", "optimizer", "view", "packing", "listed", "bandwidth"), 2.5),
    "efficiencies": {"matmul": {"fp32": 0.5, "memory": 0.5, "ramp": 1}},
    "operators": {"relu": {"fp32": [[8, 1], [16, 2]]}, "mm": {"half": [[8, 1, 2]]}},
}


def test_device_profiles(fuzz, tmp_path, changed):
    path = tmp_path / "mine.toml"

    def check(document):
        write(path, document)
        try:
            found = profiles.get(str(path))
        except ActbenchError:
            return
        rates = found.rates
        assert 0 < found.memory_bytes < 2**60
        assert rates is None or all(
            0 < rate < math.inf for rate in (*rates.flops.values(), rates.bandwidth, rates.link)
        )

    fuzz(changed(PROFILE), check)


SAVED = {
    "schema_version": 1,
    "kind": "huggingface",
    "architecture": "BertModel",
    "model": "tiny-bert",
    "task": "masked-lm",
    "attention": "sdpa",
    "dtype": "float32",
    "sequence_length": 16,
    "image_size": None,
    "scheme": "fewbit:3",
    "weights_origin": "random",
    "sites": [{"path": "a.b", "was": "nn.GELU", "becomes": "3-bit GELU", "bytes_before": 8, "bytes_after": 1}],
    "unreached": [{"path": "c", "kind": "nn.ReLU", "reason": "it is one"}],
    "versions": {"actbench": "0.1", "python": "3.11", "torch": "2.11", "commit": None, "dirty": False},
}


def test_folders_of_converted_models(fuzz, tmp_path, changed):
    path = tmp_path / savedmodel.FILE_NAME

    def check(document):
        path.write_bytes(json.dumps(document).encode(errors="replace"))
        try:
            found = savedmodel.read(tmp_path)
        except ActbenchError:
            return
        assert found.case("resnet50").model == "resnet50"

    fuzz(changed(SAVED), check)
