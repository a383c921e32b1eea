"""What the callbacks of all trainers have in common."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from actbench import schemes
from actbench.errors import UsageError
from actbench.integrations.session import MEASURE_EVERY, Session
from actbench.nn.keeping.history import samples
from actbench.schemes import Scheme


class SchemeCallback:
    """Holds the session of the training run that is under way, if there is one.

    Args:
        scheme: A specification such as ``gact:L2``, or a scheme.
        measure_every: Forward passes in training from one that is measured to the next.

    Attributes:
        scheme: The scheme.
        session: The session; None outside of training.

    Raises:
        SpecError: The specification is wrong.
        UsageError: ``measure_every`` is below 1.
    """

    def __init__(self, scheme: str | Scheme, *, measure_every: int = MEASURE_EVERY) -> None:
        if measure_every < 1:
            raise UsageError(f"measure_every={measure_every}: passes from one that is measured to the next, 1 or more")
        self.scheme = schemes.build(scheme) if isinstance(scheme, str) else scheme
        self.session: Session | None = None
        self._measure_every = measure_every
        self._named = ExitStack()

    def begin(self, model: nn.Module, autocast_dtype: torch.dtype | None = None) -> Session:
        """Put the scheme on a model, after it was taken off the model of a run that was not finished.

        Raises:
            ConversionError: The scheme cannot be applied, or not be taken off.
        """
        self.close()
        self.session = Session(model, self.scheme, measure_every=self._measure_every, autocast_dtype=autocast_dtype)
        self._finalizer = weakref.finalize(self, self.session.close)  # where nobody closes this: with the trainer
        self._finalizer.atexit = False
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self.session

    def close(self) -> None:
        """Take the scheme off the model: no layer, forward, hook or mark of it stays. Nothing where it is off already.

        Raises:
            ConversionError: Another forward was bound in front of one of the scheme's since. All the others are off
                then; take that one off, and close again.
        """
        self._named.close()
        if self.session is not None:
            self.session.close()
            self._finalizer.detach()
            self.session = None

    def numbers(self) -> dict[str, int]:
        """Return what is to be logged: the last measured pass, and torch's peak on CUDA; none before the first."""
        if self.session is None or self.session.watch.last is None:
            return {}
        found = self.session.watch.last.logged()
        if torch.cuda.is_available():
            found["actbench/peak_bytes"] = torch.cuda.max_memory_allocated()
        return found

    def name_samples(self, batch: Any, key: str | int) -> None:
        """Tell the schemes which samples of the data set a batch holds, until the next; see :func:`actbench.samples`.

        Args:
            batch: A mapping or a sequence with the indices under ``key``, integers (N,). From another device than the
                CPU they are copied to the host, which waits for the device.
            key: Name or position.

        Raises:
            UsageError: The batch has no such entry.
        """
        try:
            ids = batch[key]
        except (KeyError, IndexError, TypeError):
            held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(
                f"sample_ids={key!r}: the batch has no such entry ({held}); let the data set give the index of each "
                "sample under it, and the trainer keep it (transformers: remove_unused_columns=False)"
            ) from None
        self._named.close()
        self._named.enter_context(samples(ids.cpu() if isinstance(ids, Tensor) else ids))
