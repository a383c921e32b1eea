"""Low-rank adapters on the linear layers of a frozen model, by peft, an optional package."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd

from actbench.errors import ConversionError, MeasurementError, NothingToConvertError
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.packing.linearkinds import is_conv1d, is_linear
from actbench.packing.refusals import is_compiled
from actbench.packing.replacement import census

_HEADS = ("classifier", "score", "qa_outputs", "heads", "head", "fc")
"""Names in transformers and torchvision of the output layers of models that are no language models."""

_READ_DIRECTLY = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules of torch that outside of training read the weights of their linear layers and do not call these."""


@dataclass(frozen=True)
class Targets:
    """The layers of a model that can get adapters.

    Attributes:
        layers: All linear layers but the head, by path.
        adapted: The paths of those that get adapters.
        head: The path of the classifier that is trained as a whole, or None.
        passed_by: The paths of linear layers at which an adapter would do nothing.
        stacks: The modules that hold stacks of matrices, (n, d_out, d_in) or (n, d_in, d_out), by path: experts.
    """

    layers: Mapping[str, nn.Module]
    adapted: tuple[str, ...]
    head: str | None
    passed_by: tuple[str, ...]
    stacks: Mapping[str, nn.Module]


def find(module: nn.Module, names: tuple[str, ...], scheme: str, *, whole_model: bool) -> Targets:
    """Find the linear layers of a model that get adapters, as peft's ``all-linear`` does.

    The layer that makes the logits of a language model is left out, and so is a classifier.

    Args:
        module: The model, or a part of one.
        names: Paths of the layers to adapt, or ends of paths; none for all.
        scheme: Name of the scheme, for messages.
        whole_model: Whether the module is a whole model, which has a head.

    Raises:
        NothingToConvertError: No such layer is found.
        ConversionError: The model is compiled, or has adapters.
    """
    kind = type(module).__name__
    if any(map(is_compiled, module.modules())):
        raise ConversionError(f"{scheme}: this {kind} is compiled; convert first, and compile then")
    if any(type(part).__module__.startswith("peft.") for part in module.modules()):
        raise ConversionError(f"{scheme}: this {kind} holds adapters of peft already; convert the original model")
    head = _head(module) if whole_model else None
    logits = _logits(module) if whole_model else None
    inside = {part for each in module.modules() if isinstance(each, _READ_DIRECTLY) for part in each.modules()}
    layers, passed_by = dict[str, nn.Module](), list[str]()
    for path, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) and not is_conv1d(type(layer)):
            continue
        if layer in inside:
            passed_by.append(path)
        elif is_linear(layer):
            of_head = head is not None and (path == head or path.startswith(f"{head}."))
            if not of_head and (layer is not logits or _named(path, names)):
                layers[path] = layer
    adapted = tuple(path for path in layers if not names or _named(path, names))
    unknown = [name for name in names if not any(_named(path, (name,)) for path in layers)]
    if not adapted or unknown:
        raise NothingToConvertError(_nothing(scheme, module, layers, unknown, head, passed_by))
    stacks = {path: part for path, part in module.named_modules() if any(stacked(part))}
    return Targets(layers, adapted, head, tuple(passed_by), stacks)


def stacked(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and value of each parameter of a module that is a stack of matrices, and no kernel or norm's weight.

    Neither a position embedding, (1, n, d), nor a number for each channel or head, (n, 1, 1), is a stack.
    """
    if not isinstance(module, _ConvNd | nn.LayerNorm | nn.RMSNorm):
        for name, value in module.named_parameters(recurse=False):
            if value.ndim == 3 and min(value.shape) > 1:
                yield name, value


def _named(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _nothing(
    scheme: str, module: nn.Module, layers: Mapping[str, Any], unknown: list[str], head: str | None, inside: list[str]
) -> str:
    kind = type(module).__name__
    if layers:
        ends = dict.fromkeys(path.rpartition(".")[2] for path in layers)
        return f"{scheme}: target={unknown[0]} names no linear layer of {kind}; it has {', '.join(ends)}"
    but = f" but its head, {head}" if head else f" but {inside[0]}, whose weight its parent reads" if inside else ""
    return f"{scheme}: {kind} has no nn.Linear{but}, and adapters are for these; it holds {census(module)}"


def _logits(module: nn.Module) -> nn.Module | None:
    """Return the layer that makes the logits of a language model, if the model names it."""
    own: Any = getattr(module, "get_output_embeddings", None)
    found = own() if callable(own) else None
    return found if isinstance(found, nn.Module) else None


def _head(module: nn.Module) -> str | None:
    """Return the name of the classifier; peft matches modules by ends of paths, so no other path may end in it."""
    if _logits(module) is not None:
        return None
    paths = [path for path, _ in module.named_modules()]
    for name in _HEADS:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module) and any(True for _ in found.parameters()):
            return name if sum(path.endswith(name) for path in paths) == 1 else None
    return None


def adapt(module: nn.Module, targets: Targets, scheme: str, *, r: int, alpha: float, dropout: float) -> nn.Module:
    """Freeze a model, and put adapters on its linear layers, in place; its class and its call stay the same.

    Adapters are float32 for weights of a half type, as ``peft.get_peft_model`` makes them, else of the weights' type.
    They are on the weights' device, and fake if the weights are.

    Returns:
        The model, or the replacement of a model that is itself a linear layer.

    Raises:
        MeasurementError: peft is not installed.
    """
    peft = _peft(scheme)
    whole = "" not in targets.adapted
    held = module if whole else nn.Sequential(module)
    paths = targets.adapted if whole else ("0",)
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="|".join(map(re.escape, paths)),
        modules_to_save=[targets.head] if targets.head else None,
    )
    fake = next((p.fake_mode for p in module.parameters() if isinstance(p, FakeTensor)), None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft then corrects it
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # peft copies the head
        peft.inject_adapter_in_model(config, held, low_cpu_mem_usage=fake is not None)
    for path, layer in targets.layers.items():
        if path in targets.adapted:
            _settle(held.get_submodule(path or "0"), layer, fake)
    if targets.head:
        held.get_submodule(targets.head).train(held.get_submodule(f"{targets.head}.original_module").training)
    if not whole:
        return held[0]  # type: ignore[index, no-any-return]
    if hasattr(type(module), "_hf_peft_config_loaded"):  # like add_adapter, so that save_pretrained writes adapters
        vars(module)["_hf_peft_config_loaded"] = True
    return module


def _settle(adapted: nn.Module, layer: nn.Module, fake: Any) -> None:
    """Set an adapter's train/eval flag and type by its layer; parameters on the meta device become fake."""
    adapted.train(layer.training)
    weight: Any = layer.weight
    dtype = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
    for matrix in (adapted.lora_A["default"], adapted.lora_B["default"]):  # type: ignore[index]
        values = matrix.weight  # type: ignore[union-attr]
        if fake is not None:
            with fake:
                made = torch.empty(values.shape, dtype=dtype, device=weight.device)
            matrix.weight = nn.Parameter(made)  # type: ignore[union-attr]
        elif values.dtype != dtype:
            matrix.to(dtype)


def _peft(scheme: str) -> Any:
    try:
        import peft
    except ImportError:
        raise MeasurementError(f'{scheme} needs peft: pip install "actbench[peft]"') from None
    return peft


def refuse_merging(*_: Any, **__: Any) -> None:
    """Raise a ConversionError, in place of ``merge`` of an adapter whose base layer is packed."""
    raise ConversionError(
        "qlora: adapters cannot be merged into weights of 4 bits; save them (save_pretrained), and merge them into the "
        "model in its own type: peft.PeftModel.from_pretrained(model, folder).merge_and_unload()"
    )


def base_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the ``state_dict`` of the model that adapters were put on, under its own keys.

    Weights stored in 4 bits are unpacked to their type, but stay rounded. A trained classifier is returned as it was
    before training.

    Args:
        model: A model that ``lora`` or ``qlora`` converted; for any other, this is its own ``state_dict``.
    """
    found: dict[str, Tensor] = {}
    packed = {path: part for path, part in model.named_modules() if isinstance(part, FrozenLinear)}
    for key, tensor in model.state_dict().items():
        owner, _, _ = key.rpartition(".packed_weight.")
        if owner in packed:
            found.setdefault(_plain(f"{owner}.weight"), packed[owner].weight)
        elif not re.search(r"\.(lora_\w+|modules_to_save)\.", f".{key}"):
            found[_plain(key)] = tensor
    return found


def _plain(key: str) -> str:
    return re.sub(r"(^|\.)(base_layer|original_module)\.", r"\1", key)


def adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model that have adapters."""
    return (part for part in module.modules() if hasattr(part, "lora_A") and hasattr(part, "base_layer"))
