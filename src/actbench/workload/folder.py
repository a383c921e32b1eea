"""Model folders as ``save_pretrained`` writes them, and published weights in the cache and on the hub.

Folders are not trusted: only config.json and safetensors files are read.
"""

from __future__ import annotations

import functools
import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from actbench.errors import ModelError, first_line
from actbench.model.records import WeightsChoice
from actbench.paths import read_bytes
from actbench.units import MIB

PROBE_SECONDS = 3.0
CONFIG = ("config.json",)
WEIGHTS = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")


def without_values(weights: WeightsChoice) -> str:
    """Return the origin of the weights of a model that is built only for its shapes."""
    return "random" if weights == "random" else "not loaded (shapes only)"


def is_repository(name: str) -> bool:
    """Return whether the rules of the hub allow a name for a repository."""
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
    """Return whether an address answers within :data:`PROBE_SECONDS`; asks once per process.

    A separate thread asks, because a name lookup has no time limit.
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
    """Return the cached snapshot of the first repository that has ``config.json``, or weights if wanted, or None."""
    from huggingface_hub import try_to_load_from_cache

    wanted = ("model.safetensors", "model.safetensors.index.json") if weights else CONFIG
    found = (try_to_load_from_cache(repository, file) for repository in repositories for file in wanted)
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def download(repository: str, *, weights: bool, code: bool = False) -> Path:
    """Download ``config.json``, and weights and code if wanted, and return the snapshot's folder.

    Raises:
        ModelError: The hub is switched off, does not answer in time, or does not have the model.
    """
    from huggingface_hub import constants, errors, snapshot_download

    if offline():
        raise ModelError(f"{repository} is not in the cache, and HF_HUB_OFFLINE forbids looking further")
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
    except Exception as error:  # versions of huggingface_hub use different network libraries
        raise ModelError(f"{repository} could not be downloaded: {first_line(error)}") from error
    return Path(folder)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep huggingface_hub from logging and drawing bars."""
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


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; a ModelError if it is missing, unreadable, or no object with a ``model_type``."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder as save_pretrained writes it")
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type: it is not the config of a transformers model")
    if not isinstance(config.get("auto_map", {}), dict):
        raise ModelError(f"{path}: auto_map is not an object")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: architectures is not a list of class names")
    if "quantization_config" in config:
        raise ModelError(f"{path} describes quantized weights (quantization_config), which cannot be trained in full")
    return config


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder, possibly none.

    Raises:
        ModelError: The weights are pickles, or the index is broken or names files outside the folder.
    """
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    pickles = sorted(path for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{pickles[0]} is a pickle, and reading one runs the code in it, so actbench does not. If you trust it, "
            "convert it once: load it with from_pretrained and write it with save_pretrained, which makes safetensors"
        )
    return ()


def read_tensors(files: tuple[Path, ...]) -> dict[str, Tensor]:
    """Read all tensors of safetensors files; a ModelError if one is missing, truncated or broken."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as safetensors (truncated or broken?): {error}") from error
    return tensors


def _indexed_files(folder: Path) -> tuple[Path, ...]:
    path = folder / INDEX
    index = _read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelError(f"{path} has no weight_map from tensors to files")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{path} names {name!r}, which is not a safetensors file of this folder")
    return tuple(folder / name for name in names)


_MOST_BYTES = 64 * MIB  # an index has some 100 bytes a tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bytes(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content
