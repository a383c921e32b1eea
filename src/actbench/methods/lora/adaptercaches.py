"""Importing this fills a cache that peft reads when it first adapts a model; filling it takes a tenth of a second."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")  # type: ignore[no-untyped-call]
