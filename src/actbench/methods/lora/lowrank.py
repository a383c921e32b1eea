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
from actbench.methods.lora.adapter import Adapter, AdapterType
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.packing.refusals import check_module, is_compiled
from actbench.packing.replacement import census, is_conv1d, is_linear
from actbench.units import counted

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
        saved: The paths of all modules that are trained as a whole, the head's among them.
        passed_by: The paths of linear layers at which an adapter would do nothing.
        stacks: The modules that hold stacks of matrices, (n, d_out, d_in) or (n, d_in, d_out), by path: experts.
    """

    layers: Mapping[str, nn.Module]
    adapted: tuple[str, ...]
    head: str | None
    saved: tuple[str, ...]
    passed_by: tuple[str, ...]
    stacks: Mapping[str, nn.Module]


def find(
    module: nn.Module, names: tuple[str, ...], saved: tuple[str, ...], scheme: str, *, whole_model: bool
) -> Targets:
    """Find the linear layers of a model that get adapters, as peft's ``all-linear`` does.

    The layer that makes the logits of a language model is left out, and so is a classifier.

    Args:
        module: The model, or a part of one.
        names: Paths of the layers to adapt, or ends of paths; none for all.
        saved: Ends of paths of modules that are trained whole, as peft matches ``modules_to_save``.
        scheme: Name of the scheme, for messages.
        whole_model: Whether the module is a whole model, which has a head.

    Raises:
        NothingToConvertError: No such layer is found.
        ConversionError: The model is compiled, or has adapters.
    """
    kind = type(module).__name__
    if any(map(is_compiled, module.modules())):
        raise ConversionError(f"{scheme}: this {kind} is compiled; convert first, and compile then")
    if any(kind.__module__.startswith("peft.") for part in module.modules() for kind in type(part).__mro__):
        raise ConversionError(f"{scheme}: this {kind} holds adapters of peft already; convert the original model")
    head = _head(module) if whole_model else None
    logits = _logits(module) if whole_model else None
    whole = _trained_whole(module, saved, head, scheme)
    inside = {part for each in module.modules() if isinstance(each, _READ_DIRECTLY) for part in each.modules()}
    layers, passed_by = dict[str, nn.Module](), list[str]()
    for path, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) and not is_conv1d(type(layer)):
            continue
        if layer in inside:
            passed_by.append(path)
        elif is_linear(layer):
            within = any(path == each or path.startswith(f"{each}.") for each in whole)
            if not within and (layer is not logits or _named(path, names)):
                layers[path] = layer
    adapted = tuple(path for path in layers if not names or _named(path, names))
    unknown = [name for name in names if not any(_named(path, (name,)) for path in layers)]
    if not adapted or unknown:
        raise NothingToConvertError(_nothing(scheme, module, layers, unknown, head, passed_by))
    stacks = {path: part for path, part in module.named_modules() if any(stacked(part))}
    return Targets(layers, adapted, head, whole, tuple(passed_by), stacks)


def _trained_whole(module: nn.Module, names: tuple[str, ...], head: str | None, scheme: str) -> tuple[str, ...]:
    """Return the paths of the head and of all modules whose path ends in a name, but for those nested in another such module."""
    paths = [path for path, _ in module.named_modules() if path]
    for name in names:
        if not any(path.endswith(name) for path in paths):
            kind = type(module).__name__
            raise NothingToConvertError(f"{scheme}: modules_to_save={name} names no module of {kind}")
    found = [path for path in paths if path == head or any(path.endswith(name) for name in names)]
    return tuple(path for path in found if not any(path.startswith(f"{other}.") for other in found))


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
    if inside:
        readers = [each.__name__ for each in _READ_DIRECTLY if any(isinstance(part, each) for part in module.modules())]
        these = f"{counted(len(inside), 'linear layer')} directly ({inside[0]}{', …' if len(inside) > 1 else ''})"
        return (
            f"{scheme}: no linear layer of {kind} can have an adapter{f', except its head, {head}' if head else ''}: "
            f"nn.{' and nn.'.join(readers)} {'reads' if len(readers) == 1 else 'read'} the weights of {these} and "
            "do not call the layers, so an adapter would do nothing; write these modules with linear layers that are "
            f"called, or train the model without {scheme}"
        )
    but = f" except its head, {head}" if head else ""
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


def adapt(module: nn.Module, targets: Targets, scheme: str, adapter: Adapter, dtype: AdapterType) -> nn.Module:
    """Freeze a model, and put adapters on its linear layers, in place; its class and its call stay the same.

    Adapters are on the weights' device, and fake if the weights are.

    Args:
        module: The model.
        targets: Its layers.
        scheme: Name of the scheme, for messages.
        adapter: What is put beside a layer.
        dtype: ``float32`` makes adapters of half weights float32, as ``peft.get_peft_model`` does; ``model`` gives
            them the type of the weights, as other weights have in any case.

    Returns:
        The model, or the replacement of a model that is itself a linear layer.

    Raises:
        MeasurementError: peft is not installed.
        ConversionError: peft has no such adapter for a layer.
    """
    peft = _peft(scheme)
    whole = "" not in targets.adapted
    held = module if whole else nn.Sequential(module)
    paths = targets.adapted if whole else ("0",)
    fake = next((p.fake_mode for p in module.parameters() if isinstance(p, FakeTensor)), None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft then corrects it
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # peft copies the head
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # docs say so
        warnings.filterwarnings("ignore", message="Specified to not save vera_A")  # a seed restores them
        # transformers tells peft of patterns for experts, which get no adapters here
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        experts = any(True for part in module.modules() for _ in stacked(part))
        adapter.inject(peft, held, paths, targets.saved, meta=fake is not None, experts=experts)
    for path, layer in targets.layers.items():
        if path in targets.adapted:
            _settle(held.get_submodule(path or "0"), layer, dtype, fake)
    for path in targets.saved:
        held.get_submodule(path).train(held.get_submodule(f"{path}.original_module").training)
    adapter.freeze(held)
    if not whole:
        return held[0]  # type: ignore[index, no-any-return]
    if hasattr(type(module), "_hf_peft_config_loaded"):  # like add_adapter, so that save_pretrained writes adapters
        vars(module)["_hf_peft_config_loaded"] = True
    return module


def _settle(adapted: nn.Module, layer: nn.Module, dtype: AdapterType, fake: Any) -> None:
    """Set an adapter's train/eval flag and type by its layer; parameters on the meta device become fake."""
    adapted.train(layer.training)
    weight: Any = layer.weight
    half = weight.dtype in (torch.float16, torch.bfloat16)
    wanted = torch.float32 if half and dtype == "float32" else weight.dtype
    inside = set(adapted.base_layer.modules())  # type: ignore[union-attr]
    for owner in (part for part in adapted.modules() if part not in inside):
        for name, values in owner.named_parameters(recurse=False):
            changed = _like(values, wanted, weight.device, fake)
            owner.register_parameter(name, nn.Parameter(changed, requires_grad=values.requires_grad))
        for name, buffer in owner.named_buffers(recurse=False):  # VeRA's matrices, which all layers share
            owner._buffers[name] = _like(buffer, wanted, weight.device, fake)


def _like(values: Tensor, dtype: torch.dtype, device: torch.device, fake: Any) -> Tensor:
    """Return values in a type, without a graph; fake where the model is."""
    if fake is None:
        return values.detach().to(dtype)
    if isinstance(values, FakeTensor) and values.device == device and values.dtype == dtype:
        return values.detach()
    with fake:
        return torch.empty(values.shape, dtype=dtype, device=device)


def _peft(scheme: str) -> Any:
    try:
        import peft
    except ImportError as error:
        if error.name != "peft":  # it is there, and lacks something itself
            raise
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
    check_module(model, "base_state_dict")
    found: dict[str, Tensor] = {}
    packed = {path: part for path, part in model.named_modules() if isinstance(part, FrozenLinear)}
    for key, tensor in model.state_dict().items():
        owner, *_ = re.split(r"\.packed_weight[._]\d+$", key)
        if owner in packed:
            found.setdefault(_plain(f"{owner}.weight"), packed[owner].weight)
        elif not re.search(r"\.((lora|vera|lokr)_\w+|modules_to_save)\.", f".{key}"):
            found[_plain(key)] = tensor
    return found


def _plain(key: str) -> str:
    return re.sub(r"(^|\.)(base_layer|original_module)\.", r"\1", key)


def adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model that have adapters."""
    return (part for part in module.modules() if hasattr(part, "base_layer"))


@torch.no_grad()
def renew_magnitudes(adapted: Any) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the weight as it is, in the magnitudes' own type.

    peft took them from the weight before it was packed, and in the weight's type: a layer would not begin as it was.
    """
    magnitudes, layer = adapted.lora_magnitude_vector["default"].weight, adapted.base_layer
    of_outputs = 0 if is_conv1d(type(layer)) or getattr(layer, "transposed", False) else 1
    magnitudes.copy_(torch.linalg.vector_norm(layer.weight.to(magnitudes.dtype), dim=of_outputs))
