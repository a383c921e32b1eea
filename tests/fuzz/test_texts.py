from __future__ import annotations

import pytest

from actbench import scheme as schemes
from actbench.errors import ActbenchError
from actbench.methods.formats import encodings
from actbench.run.recipes import parse_batch_range
from actbench.units import parse_bytes
from actbench.workload import names

SPECS = [
    "fewbit:3,functions=gelu/silu,scale=2.5",
    "randomized:0.2,sketch=dct",
    "actnn:L3,bits=1.9,per_sample=false",
    "gact:L2,bits=2.5",
    "smaq:4,on=activations/gradients,outliers=0.5",
    "encode:int:4,on=optimizer",
    "checkpoint:2,blocks=Block/Head",
]


def read(reader, text):
    """Return what is read, or None where it is refused as it should be."""
    try:
        return reader(text)
    except ActbenchError:
        return None


def test_specifications_of_schemes(fuzz, sentences):
    keys = {key for name in schemes.scheme_names() for key in schemes.lookup(name).model_fields}
    words = [*schemes.scheme_names(), *(f",{key}=" for key in sorted(keys)), *SPECS]

    def check(text):
        scheme = read(schemes.build, text)
        assert scheme is None or schemes.build(scheme.spec) == scheme

    fuzz(sentences(*words), check)


def test_specifications_of_encodings(fuzz, sentences):
    words = [*encodings.ENCODINGS, "int:4", "outliers=0.5", "group_size=32", "rounding=nearest"]

    def check(text):
        encoding = read(encodings.build, text)
        assert encoding is None or encodings.build(encoding.spec) == encoding

    fuzz(sentences(*words), check)


def test_amounts_of_memory(fuzz, sentences):
    def check(text):
        amount = read(parse_bytes, text)
        assert amount is None or amount > 0

    fuzz(sentences("GiB", "MiB", "b", "16", "1.5", "T"), check)


def test_ranges_of_batch_sizes(fuzz, sentences):
    def check(text):
        sizes = read(parse_batch_range, text)
        assert sizes is None or (sizes and min(sizes) > 0 and len(set(sizes)) == len(sizes))

    fuzz(sentences("8", "8-32+8", "8-512*2", "1-", "16"), check)


@pytest.mark.usefixtures("empty_folder")
def test_names_of_models(fuzz, sentences):
    words = [
        *list(names.presets())[:5],
        "resnet50",
        "torchvision:",
        "hf:",
        "org/name",
        "resnet-cifar",
        "resnet-cifar",
        "./folder",
    ]
    changes = [
        "@num_hidden_layers=4",
        "hidden_size=128",
        "file.py:build",
        "num_nodes=10",
        "true",
        "null",
        "weights.bin",
    ]

    def check(text):
        name = read(names.parse_model_name, text)
        assert name is None or name.name

    fuzz(sentences(*words, *changes), check)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
