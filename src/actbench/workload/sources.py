"""Where the config and the weights of a Hugging Face model come from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actbench.errors import ModelError
from actbench.model.records import Case, Task, WeightsChoice
from actbench.workload import folder
from actbench.workload.names import ModelName, presets


@dataclass(frozen=True)
class Weights:
    """The weights that were found: safetensors files (none for random weights), and their origin."""

    files: tuple[Path, ...] = ()
    origin: str = "random"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A config, and the places where weights for it may be.

    Attributes:
        spec: The model specification, for messages.
        changes: Keys of the config that the specification changes.
        task: The task of ``--task auto``; ``auto`` itself if the config decides.
        folder: The folder that the config was read from, or None.
        hub: Repositories that may hold the weights, the preferred one first.
        local: Whether the folder is the user's own and holds the model's weights.
    """

    spec: str
    config: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    task: Task = "auto"
    folder: Path | None = None
    hub: tuple[str, ...] = ()
    local: bool = False

    @property
    def place(self) -> str:
        """Where the config is, for messages."""
        return str(self.folder / "config.json") if self.folder else f"model {self.spec!r}"

    def renamed_changes(self, config: Any) -> dict[str, Any]:
        """Return the changes under the config's own names of keys (GPT-2's ``n_layer``).

        Raises:
            ModelError: A key does not belong to this kind of config, or a value is negative.
        """
        keys = {*config.to_dict(), *config.attribute_map, "num_labels"}
        for key, value in self.changes.items():
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=3)
                hint = f"did you mean {' or '.join(close)}?" if close else "transformers documents its keys"
                raise ModelError(f"model {self.spec!r}: a {config.model_type} config has no key {key!r}; {hint}")
            if isinstance(value, int) and value < 0:
                raise ModelError(f"model {self.spec!r}: {key}={value} must not be negative")
        return {config.attribute_map.get(key, key): value for key, value in self.changes.items()}

    def weights(self, policy: WeightsChoice) -> Weights:
        """Find weights by the policy of ``--weights``; a ModelError if required weights are missing, or are pickles."""
        files = folder.weight_files(self.folder) if self.local and self.folder else ()  # refuses pickles at any policy
        if policy == "random":
            return Weights()
        if self.local:
            return self._found(files, f"folder:{self.folder}", policy)
        if not self.hub:
            return self._missing("it is a made-up model without published weights", policy, warn=False)
        if self.changes and policy == "auto":
            return self._missing("its config was changed, so published weights need not fit", policy)
        return self._published(policy)

    def _published(self, policy: WeightsChoice) -> Weights:
        try:
            place = folder.cached(self.hub, weights=True) or folder.download(self.hub[0], weights=True)
            return self._found(folder.weight_files(place), f"pretrained:{self.hub[0]}", policy)
        except ModelError as error:
            return self._missing(str(error), policy)

    def _found(self, files: tuple[Path, ...], origin: str, policy: WeightsChoice) -> Weights:
        return Weights(files, origin) if files else self._missing(f"{origin} holds no safetensors", policy)

    def _missing(self, reason: str, policy: WeightsChoice, *, warn: bool = True) -> Weights:
        if policy == "pretrained":
            raise ModelError(f"no pretrained weights for {self.spec}: {reason}; use --weights random for random ones")
        return Weights(warnings=(f"{self.spec}: {reason}; random weights are used",) if warn else ())


def find_source(name: ModelName, case: Case) -> Source:
    """Find the config of a preset, a local folder, or a model in the cache or hub; a ModelError if it is broken."""
    if name.kind == "preset":
        preset = presets()[name.name]
        return Source(case.model, preset.config, name.changes, preset.task, hub=preset.hub)
    if name.kind == "folder":
        place = Path(name.name)
        source = Source(case.model, folder.read_config(place), name.changes, folder=place, local=True)
        folder.weight_files(place)  # refuses a folder of pickles before anything is built
        return source
    place = _hub_folder(name.name, case)
    return Source(case.model, folder.read_config(place), name.changes, folder=place, hub=(name.name,))


def _hub_folder(repository: str, case: Case) -> Path:
    # a config in the cache may have come without its code
    found = None if case.trust_remote_code else folder.cached((repository,), weights=False)
    if found is not None:
        return found
    if case.weights == "random":
        raise ModelError(
            f"model {case.model!r}: {repository} is not in the cache, and --weights random never asks the hub; "
            "use --weights auto, or download it with 'hf download'"
        )
    return folder.download(repository, weights=False, code=case.trust_remote_code)
