"""Importing this fills a cache of transformers that peft reads when it first adapts a model, in a tenth of a second."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")  # type: ignore[no-untyped-call]
