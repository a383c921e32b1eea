"""Models to train: how each is found and built, its batches, and its loss.

torchvision and transformers are imported only when one of their models is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from actbench import plugins
from actbench.errors import ModelError, boundary
from actbench.model.records import Case, Task
from actbench.workload import names
from actbench.workload.base import Workload


class Available(NamedTuple):
    """A model with its own name."""

    spec: str
    source: str
    task: Task
    note: str


@runtime_checkable
class Network(Protocol):
    """A model that a plug-in brings by an entry point of the group ``actbench.workloads``, whose name is the model's.

    Attributes:
        task: What it is trained to do.
        note: One line for ``actbench models``.

    One that needs an extra of its package has an attribute ``extras``: the name of each, with what it is for.
    """

    task: Task
    note: str

    def __call__(self, changes: Mapping[str, Any], case: Case) -> Workload:
        """Return the workload of a case; ``changes`` follow the ``@`` of its model.

        Raises:
            ModelError: A change is impossible, or the model is unfit for the case.
        """
        ...


_SEES = "does not read one text and write another"
_WITHOUT_DECODER = {"torchvision": _SEES, "smallnet": _SEES, "function": "makes batches of its own lengths"}
"""Why models that are not from Hugging Face have no target length, by their kind; a plug-in has its own reason."""


def load_workload(case: Case) -> Workload:
    """Find the model of a case; a ModelError if it is unknown, broken, or unfit for the task."""
    with boundary(f"model {case.model!r} cannot be read", ModelError):
        name = names.parse_model_name(case.model)
        if case.target_length is not None and name.kind in _WITHOUT_DECODER:
            raise ModelError(f"--target-length: {case.model} {_WITHOUT_DECODER[name.kind]}; leave it out")
        if case.packed is not None and name.kind in (*_WITHOUT_DECODER, "plugin"):
            raise ModelError(f"--packed: {case.model} is not a causal language model of Hugging Face; leave it out")
        if case.generate is not None and name.kind in (*_WITHOUT_DECODER, "plugin"):
            raise ModelError(f"--generate: {case.model} is not a causal language model of Hugging Face; leave it out")
        if name.kind == "torchvision":
            from actbench.workload import densevision, torchvision

            without = str(name.changes[names.WITHOUT]).split("/") if name.changes else ()
            return densevision.BY_TASK[torchvision.tasks()[name.name]](name.name, case, tuple(without))
        if name.kind == "plugin":
            network = plugins.find_plugin("workloads", name.name, Network)  # type: ignore[type-abstract]
            if network is None:
                raise ModelError(f"model {case.model!r}: the package that brings it cannot be used")
            return network(name.changes, case)
        if name.kind == "function":
            from actbench.workload.function import FunctionWorkload

            return FunctionWorkload(name.name, case)
        if name.kind == "smallnet":
            from actbench.workload.smallnets import SmallNetWorkload

            return SmallNetWorkload(name.name, name.changes, case)
        from actbench.workload.huggingface import HuggingFaceWorkload

        return HuggingFaceWorkload(name, case)


def from_folder(folder: Path, case: Case) -> Workload:
    """Find the model in a folder of any name; a ModelError if it holds none, or a broken one."""
    from actbench.workload.huggingface import HuggingFaceWorkload

    with boundary(f"{folder} cannot be read", ModelError):
        return HuggingFaceWorkload(names.ModelName("folder", str(folder)), case)


def available() -> list[Available]:
    """Return the shipped presets and torchvision's models."""
    from actbench.workload import torchvision

    shipped = [Available(preset.name, "preset", preset.task, preset.note) for preset in names.presets().values()]
    shipped += [Available(name, "preset", "image-classification", "for pictures of 32 px") for name in names.SMALL_NETS]
    networks: dict[str, Network] = plugins.loaded("workloads", partial(plugins.fault, of=Network))
    shipped += [Available(name, "preset", network.task, network.note) for name, network in networks.items()]
    shipped += [
        Available(name, "torchvision", "image-classification", f"{torchvision.image_size(name)} px")
        for name in torchvision.torchvision_names()
    ]
    dense = {name: task for name, task in torchvision.tasks().items() if task != "image-classification"}
    notes = {"semantic-segmentation": "480 px", "object-detection": "480 x 640 px, not simulated"}
    return shipped + [Available(name, "torchvision", task, notes[task]) for name, task in dense.items()]
