"""The blocks of a model: the parts that it repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import nn

TORCHVISION_BLOCKS = {
    "convnext": ("CNBlock",),
    "densenet": ("_DenseLayer",),
    "efficientnet": ("MBConv", "FusedMBConv"),
    "googlenet": ("Inception",),
    "inception": ("InceptionA", "InceptionB", "InceptionC", "InceptionD", "InceptionE"),
    "maxvit": ("MaxVitLayer",),
    "mnasnet": ("_InvertedResidual",),
    "mobilenetv2": ("InvertedResidual",),
    "mobilenetv3": ("InvertedResidual",),
    "regnet": ("ResBottleneckBlock",),
    "resnet": ("BasicBlock", "Bottleneck"),
    "shufflenetv2": ("InvertedResidual",),
    "squeezenet": ("Fire",),
    "swin_transformer": ("SwinTransformerBlock", "SwinTransformerBlockV2"),
    "vision_transformer": ("EncoderBlock",),
}
"""Classes of blocks, by file of ``torchvision.models``."""

_KNOWN = {f"torchvision.models.{file}.{name}" for file, names in TORCHVISION_BLOCKS.items() for name in names}
_HUGGING_FACE_BLOCK = "GradientCheckpointingLayer"  # the class from which transformers derives every block


def is_block(module: nn.Module, names: Collection[str] = ()) -> bool:
    """Return whether a module is a block: its class has one of these names or, without names, is known here.

    A class of another package says so by ``is_block = True``.
    """
    if names:
        return type(module).__name__ in names
    if getattr(type(module), "is_block", False) is True:
        return True
    bases = type(module).__mro__
    return any(cls.__name__ == _HUGGING_FACE_BLOCK or f"{cls.__module__}.{cls.__qualname__}" in _KNOWN for cls in bases)


def blocks(model: nn.Module, names: Collection[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return path and module of each block of a model; blocks inside a block are part of it."""
    return list(_outermost(model, "", lambda module: is_block(module, names), set()))


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of what looks like the blocks of an unknown model.

    These are modules of one class, each with several layers and parameters, side by side in a container. If no
    container has such modules, they are those of a class that the model holds more than once. Of nested ones the outer
    is the block.
    """
    families = [_family(module.children()) for module in model.modules() if isinstance(module, _CONTAINERS)]
    classes = set().union(*families) or _family(module for module in model.modules() if module is not model)
    return list(_outermost(model, "", lambda module: module is not model and type(module) in classes, set()))


def _family(modules: Iterable[nn.Module]) -> set[type[nn.Module]]:
    """Return the classes that several of these modules have, if they look like blocks."""
    counts = Counter(type(module) for module in modules if _is_composite(module))
    return {cls for cls, count in counts.items() if count > 1}


def _is_composite(module: nn.Module) -> bool:
    layers = [part for part in module.modules() if not any(part.children())]
    return type(module) not in _CONTAINERS and len(layers) > 1 and any(True for _ in module.parameters())


def _outermost(
    module: nn.Module, path: str, is_one: Callable[[nn.Module], bool], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    if is_one(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name, is_one, seen)
