"""Where published weights are: the local cache, the hub, or nowhere within a few seconds."""

from __future__ import annotations

import functools
import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actbench.errors import ModelError
from actbench.records import WeightsChoice

PROBE_SECONDS = 3.0
CONFIG = ("config.json",)
WEIGHTS = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")


def without_values(weights: WeightsChoice) -> str:
    """Return the origin to record for a model that was built for its shapes only."""
    return "random" if weights == "random" else "not loaded (shapes only)"


def is_repository(name: str) -> bool:
    """Return whether the hub may have a repository of a name, by its own rules."""
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(name)  # type: ignore[attr-defined]
    except errors.HFValidationError:
        return False
    return True


def offline() -> bool:
    """Return whether the user forbade the network (``HF_HUB_OFFLINE=1``)."""
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())


@functools.cache
def reachable(url: str) -> bool:
    """Return whether anything answers at an address within :data:`PROBE_SECONDS`, asked once per process.

    The question runs in a thread of its own because looking up a name cannot be given a time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            answered.set()  # a refusal is an answer
        except (OSError, http.client.HTTPException):
            return
        else:
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def cached(repositories: tuple[str, ...], *, weights: bool) -> Path | None:
    """Return the cached snapshot of the first repository that has what is asked, or None.

    Args:
        repositories: Names of one model on the hub, the best first.
        weights: Whether weights are wanted besides ``config.json``.
    """
    from huggingface_hub import try_to_load_from_cache

    wanted = ("model.safetensors", "model.safetensors.index.json") if weights else CONFIG
    for repository in repositories:
        for file in wanted:
            path = try_to_load_from_cache(repository, file)
            if isinstance(path, str):
                return Path(path).parent
    return None


def download(repository: str, *, weights: bool, code: bool = False) -> Path:
    """Download ``config.json``, and weights if wanted, into the cache and return the snapshot's folder.

    Raises:
        ModelError: The hub is switched off, does not answer in time, or does not have the model.
    """
    from huggingface_hub import constants, errors, snapshot_download

    if offline():
        raise ModelError(f"{repository} is not in the cache, and HF_HUB_OFFLINE forbids to look further")
    if not reachable(constants.ENDPOINT):
        raise ModelError(
            f"{repository} is not in the cache, and {constants.ENDPOINT} did not answer within {PROBE_SECONDS:g} s "
            "(a local folder needs no network)"
        )
    patterns = [*(WEIGHTS if weights else CONFIG), *(["*.py"] if code else [])]
    try:
        with _silent():
            folder = snapshot_download(repository, allow_patterns=patterns, etag_timeout=PROBE_SECONDS)
    except errors.GatedRepoError as error:
        raise ModelError(f"{repository} is gated: ask for access on the hub, then run 'hf auth login'") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"the hub has no model {repository!r} (or it is private: run 'hf auth login')") from error
    except Exception as error:  # which network library the hub stands on differs between its versions
        raise ModelError(
            f"{repository} could not be downloaded: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    return Path(folder)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep huggingface_hub from logging and drawing bars: stdout and stderr belong to the command that runs."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = get_verbosity(), not are_progress_bars_disabled()
    set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if bars:
            enable_progress_bars()
