"""The cache that peft reads when it adapts a model is filled by an import."""

from __future__ import annotations

import importlib

import pytest
from transformers import conversion_mapping


def test_importing_fills_what_the_first_adapted_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)

    importlib.reload(importlib.import_module("actbench.methods.lora.adaptercaches"))

    assert conversion_mapping._checkpoint_conversion_mapping_cache
