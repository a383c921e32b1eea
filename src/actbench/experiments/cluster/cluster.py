"""An existing Ray cluster, and what a case or run takes of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from actbench.errors import UsageError, first_line


@dataclass(frozen=True)
class Cluster:
    """An existing Ray cluster and what a case takes of it.

    Attributes:
        address: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        gpus: Of what runs on a GPU, which may be a part of one.
        resources: Further resources of every case, by Ray's names.
    """

    address: str
    gpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Hold a connection.

        Yields:
            The module ``ray``.

        Raises:
            UsageError: Ray is not installed, or there is no cluster at the address.
        """
        try:
            import ray
        except ImportError:
            raise UsageError("--cluster needs Ray: pip install 'actbench[cluster]'") from None
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            why = first_line(error)
            raise UsageError(
                f"--cluster {self.address}: no Ray cluster is reached ({why}); 'ray start --head' starts one"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()
