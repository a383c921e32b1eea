"""Custom operators (``torch.library.custom_op``): what they allocate inside.

For fake tensors torch runs the fake form of such an operator, which makes its results alone. Its real form is Python:
on the card's fake tensors it makes, and frees, what it would make on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

_OF_TORCH = frozenset(("aten", "prim", "prims", "c10d", "_c10d_functional", "actbench"))

Form = Callable[..., Any]


class RealForms:
    """The real forms of custom operators on the card.

    Args:
        note: Told of an operator whose real form cannot run without memory.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._without: set[str] = set()
        self._usual = torch._C._dispatch_tls_local_exclude_set()

    def of(self, func: Any) -> Form | None:
        """Return the real form of an operator for the card; None if it has none in Python that can run here."""
        if func.namespace in _OF_TORCH or (name := func._schema.name) in self._without:
            return None
        own = OPDEFS.get(name)
        if own is None:
            return None
        form = own._backend_fns.get("cuda") or own._backend_fns.get(None)
        return form and self._tried(func, form)

    def _tried(self, func: Any, form: Form) -> Form:
        def run(*args: Any, **kwargs: Any) -> Any:
            # below autograd, where an operator runs, a compiler's tensors would be made on the card, which is not there
            included = torch._C._dispatch_tls_local_include_set()
            try:
                with torch.no_grad(), torch._C._ForceDispatchKeyGuard(included, self._usual):
                    return form(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # it may do anything: read values, or call a library with addresses
                self._without.add(func._schema.name)
                self._note(
                    f"{func._schema.name} cannot run without memory ({type(error).__name__}): its results are counted, "
                    "and what it holds while it runs is not."
                )
                return func(*args, **kwargs)

        return run
