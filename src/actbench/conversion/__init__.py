"""Converting a model, for the user's own training loop or into a folder."""

from __future__ import annotations

from actbench.conversion.model import Conversion, conversion_of, convert

__all__ = ["Conversion", "conversion_of", "convert"]
