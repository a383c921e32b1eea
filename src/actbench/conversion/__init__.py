"""Converting a model, for one's own training loop or into a folder."""

from __future__ import annotations

from actbench.conversion.model import Conversion, apply_to_model, conversion_of, convert, mark, refuse_converted

__all__ = ["Conversion", "apply_to_model", "conversion_of", "convert", "mark", "refuse_converted"]
