"""How objects of the Python API are shown in a notebook."""

from __future__ import annotations

import importlib


class Displayed:
    """An object that a notebook shows as HTML.

    Who draws it knows the tables of reports, which none of these objects does: it is looked up when it is asked for.
    """

    def _repr_html_(self) -> str:
        """Return a fragment of HTML; Jupyter asks for it by this name."""
        html: str = importlib.import_module("actbench.report.render.notebook").fragment(self)
        return html
