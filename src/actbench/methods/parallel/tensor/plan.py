"""Which layers of a model are cut, and how: by the plan that its config brings, or by one of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import nn

from actbench.errors import ConversionError, NothingToConvertError

Cut = Literal["columns", "rows"]
"""Whether processes share the outputs of a layer (``columns`` of Megatron-LM's matrices) or its inputs (``rows``)."""

# names of transformers (integrations/tensor_parallel.py), but for colwise_of_3, which is ours
_CUTS: Final[Mapping[str, Cut]] = {"colwise": "columns", "colwise_of_3": "columns", "rowwise": "rows"}
_UNCUT: Final = "replicated_with_grad_allreduce"

_BERT: Final = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_PLANS: Final[Mapping[str, Mapping[str, str]]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": {
        "transformer.layer.*.attention.q_lin": "colwise",
        "transformer.layer.*.attention.k_lin": "colwise",
        "transformer.layer.*.attention.v_lin": "colwise",
        "transformer.layer.*.attention.out_lin": "rowwise",
        "transformer.layer.*.ffn.lin1": "colwise",
        "transformer.layer.*.ffn.lin2": "rowwise",
    },
    "gpt2": {
        "h.*.attn.c_attn": "colwise_of_3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "vit": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}
"""Plans of models whose configs bring none, by ``model_type``; paths are those in the base model."""


@dataclass(frozen=True)
class Place:
    """A linear layer that is cut.

    Attributes:
        path: Path of the layer in the model.
        cut: The side along which it is cut.
        blocks: How many layers it is in one: 3 where it makes queries, keys and values.
        unit: Outputs that stay together: those of one attention head, or 1.
    """

    path: str
    cut: Cut
    blocks: int = 1
    unit: int = 1


@dataclass(frozen=True)
class Plan:
    """How the layers of a model are cut.

    Attributes:
        places: The layers, in the order of the model.
        entries: Paths of the modules whose inputs all processes have, and inside of which each has a part.
        blocks: Path of the list of the model's blocks.
    """

    places: tuple[Place, ...]
    entries: tuple[str, ...]
    blocks: str


def plan_of(model: nn.Module, scheme: str) -> Plan:
    """Return how the layers of a model of transformers are cut; ``scheme`` is for messages.

    Raises:
        NothingToConvertError: Nobody says how its layers are to be cut.
        ConversionError: Its plan asks for a cut that actbench does not make.
    """
    styles = _styles(model, scheme)
    parts = dict(model.named_modules())
    entries = tuple(dict.fromkeys(_parent(path) for path, style in styles.items() if _CUTS.get(style) == "columns"))
    for entry in entries:
        _check_entry(entry, parts[entry], styles, scheme)
    places = tuple(
        Place(path, _CUTS[style], 3 if style == "colwise_of_3" else 1, _unit(_parent(path), parts, style, scheme))
        for path, style in styles.items()
        if style in _CUTS
    )
    # plans name modules inside of blocks, and a block is one of a numbered list
    first = next(path for path in styles if re.search(r"\.\d+\.", path))
    return Plan(places, entries, re.split(r"\.\d+\.", first)[0])


def _styles(model: nn.Module, scheme: str) -> dict[str, str]:
    """Return what the plan says of each module that it names, in the order of the model."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None) or _PLANS.get(getattr(config, "model_type", ""))
    if not plan:
        raise NothingToConvertError(
            f"{scheme}: the config of this {kind} has no base_model_tp_plan, and actbench has plans of its own for "
            f"{', '.join(_PLANS)} only; take fsdp, which shards any model"
        )
    prefix = getattr(model, "base_model_prefix", "")
    base = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    # re.escape has written each * of the plan as \*
    patterns = {re.compile(re.escape(base + path).replace(r"\*", r"\d+")): style for path, style in plan.items()}
    found: dict[str, str] = {}
    for path, _ in model.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is not None:
            found[path] = style
    other = next(((path, style) for path, style in found.items() if style not in _CUTS and style != _UNCUT), None)
    if other is not None:
        raise ConversionError(
            f"{scheme}: the plan of this {kind} wants {other[0]} cut {other[1]!r}, and actbench cuts layers only "
            "colwise and rowwise; take fsdp, which shards any model"
        )
    if not found:
        raise NothingToConvertError(f"{scheme}: this {kind} has none of the layers that its plan names: {list(plan)}")
    return found


def _check_entry(entry: str, module: nn.Module, styles: Mapping[str, str], scheme: str) -> None:
    """Refuse a module with a trained parameter that the plan does not name: its gradient would be partial."""
    # the prefix makes names those of the whole model, as the plan's paths are
    for name, _ in module.named_parameters(entry):
        if not any(name.startswith(f"{path}.") for path in styles):
            raise ConversionError(
                f"{scheme}: {name} is inside of {entry}, which is cut, and the plan of the model does not say how to "
                f"cut {name}; take fsdp, which shards any model"
            )


def _unit(entry: str, parts: Mapping[str, nn.Module], style: str, scheme: str) -> int:
    """Return how many outputs of a layer stay together."""
    if _CUTS[style] == "rows":
        return 1
    module: Any = parts[entry]
    width = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    if width is None and "Attention" in type(module).__name__:
        raise ConversionError(f"{scheme}: {entry}, a {type(module).__name__}, does not say how wide its heads are")
    return int(width or 1)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
