"""The loss of a Hugging Face model, and fake answers where a loss looks at the values of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from actbench.errors import ModelError
from actbench.model.records import Task
from actbench.scheme.microbatches import Batch, MicroBatching, Share, label_share, rows_of
from actbench.scheme.setup import Loss
from actbench.simulator.fake import shapes_only
from actbench.simulator.overrides import chances, deterministic, full_rows, known_scalars, no_layerdrop_draws
from actbench.workload.pictures import AMONG_TOKENS


class ForDetection(TorchFunctionMode):
    """Let the losses of detection run on fake tensors.

    These losses check that boxes do not end before they begin, and match boxes with predictions by cost. Our boxes are
    valid, and the number of matches is fixed: no number of bytes depends on the values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__bool__ and args[0].dtype == torch.bool:
                return True
            if func is Tensor.__array__:
                return numpy.zeros(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


TARGET = "target_masks"
"""A key of batches that no model reads: the mask of the object at a point; transformers has no loss for it."""
# The only depth models of transformers that compute a loss.
_WITH_DEPTH_LOSS = ("glpn",)


def loss_of(module: nn.Module, task: Task, spec: str, tasks: Iterable[Task]) -> tuple[Loss, tuple[str, ...]]:
    """Return the loss of a model, without the key-value cache of generation, and warnings about it.

    LayerDrop and SpecAugment are switched off: they skip something else in each step. ``tasks`` are all that the model
    can be trained for.
    """
    options = _options(module)
    config: Any = module.config
    own_loss = task == "depth-estimation" and config.model_type not in _WITH_DEPTH_LOSS
    left_out = chances(module)
    described = f"{spec}: {type(module).__name__}"

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(full_rows(batch))
            stack.enter_context(known_scalars(module))
            if left_out:
                stack.enter_context(deterministic(module))
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(dict(batch))):
                stack.enter_context(_without_values(described, task, tasks))
            if task == "mask-generation":
                return _mask_loss(module, batch)
            return _depth_error(module, batch) if own_loss else _own_loss(module, batch, options, described)

    warnings = []
    if left_out:
        warnings.append(f"{described} is trained without {' and '.join(left_out)}, so that all steps are equal")
    if own_loss:
        warnings.append(f"{described} computes no loss: it is the mean absolute error of the predicted depth")
    return loss, tuple(warnings)


_SHIFTED: tuple[Task, ...] = ("causal-lm", "image-text-to-text")
_UNCUTTABLE: dict[Task, str] = {
    "image-text-contrastive": "the loss compares the rows of a batch with each other, here only those of a micro-batch",
    "pretraining": "the loss adds means over labels to means over rows, here both weighted by labels",
}


def in_parts(module: nn.Module, task: Task | None = None) -> MicroBatching:
    """Return how the losses of micro-batches add up."""
    shifted = task in _SHIFTED or getattr(module, "loss_type", None) == "ForCausalLM"
    share: Share | None = partial(label_share, first=1) if shifted else None
    if task == "ctc":  # a mean is over rows, each divided by its number of labels
        share = _of_a_sum if getattr(module.config, "ctc_loss_reduction", None) == "sum" else _of_rows
    return MicroBatching(share=share, uncuttable="" if task is None else _UNCUTTABLE.get(task, ""))


def _of_a_sum(part: Batch, batch: Batch) -> float:
    return 1.0


def _of_rows(part: Batch, batch: Batch) -> float:
    return (rows_of(part) or 1) / (rows_of(batch) or 1)


def _options(module: nn.Module) -> dict[str, bool]:
    known = {"use_cache": False, "return_loss": True}
    taken = inspect.signature(module.forward).parameters
    among = getattr(module.config, "model_type", None) in AMONG_TOKENS  # some pass it on to their decoder
    return {name: value for name, value in known.items() if name in taken or (among and name == "use_cache")}


@contextmanager
def _without_values(described: str, task: Task, tasks: Iterable[Task]) -> Iterator[None]:
    others = ", ".join(other for other in tasks if other != task)
    remedy = "measure it with --meter cpu or --meter cuda"
    if others:
        remedy += f", or for another --task of this model, which may not look ({others})"
    with shapes_only(f"{described} for {task}", remedy), no_layerdrop_draws(), ExitStack() as stack:
        if task == "object-detection":
            stack.enter_context(ForDetection())
        yield


def _own_loss(module: nn.Module, batch: Batch, options: dict[str, bool], described: str) -> Tensor:
    try:
        output = module(**batch, **options)
    except NotImplementedError as error:
        raise ModelError(f"{described} cannot be trained: transformers says {error}") from error
    loss: Tensor | None = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    if loss is None:
        raise ModelError(f"{described} computes no loss from {', '.join(batch)}, so it cannot be trained")
    return loss


def _depth_error(module: nn.Module, batch: Batch) -> Tensor:
    """Return the mean absolute error of depths ``(batch, height, width)``; labels are resized to this shape."""
    output: Any = module(pixel_values=batch["pixel_values"])
    depths: Tensor = output[0] if isinstance(output, tuple) else output.predicted_depth
    labels = F.interpolate(batch["labels"][:, None], size=depths.shape[-2:])[:, 0]
    return F.l1_loss(depths, labels)


def _mask_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of Segment Anything (Kirillov et al. 2023, arXiv 2304.02643, section 3 and appendix A).

    Of the three masks of a point the best counts, by focal loss times 20 plus dice loss; the predicted IoU of each mask
    is compared with its own. ``TARGET`` is ``(batch, height, width)``.
    """
    output: Any = module(**{name: value for name, value in batch.items() if name != TARGET})
    masks: Tensor = output.pred_masks[:, 0].flatten(2)
    target = batch[TARGET].flatten(1)[:, None].expand_as(masks)
    chance = masks.sigmoid()
    missed = F.binary_cross_entropy_with_logits(masks, target, reduction="none")
    focal = ((1 - chance * target - (1 - chance) * (1 - target)) ** 2 * missed).mean(-1)
    both, all_of = (chance * target).sum(-1), (chance + target).sum(-1)
    found = 20 * focal + 1 - (2 * both + 1) / (all_of + 1)
    with torch.no_grad():
        overlap = ((masks > 0) * target).sum(-1)
        iou = overlap / ((masks > 0).sum(-1) + target.sum(-1) - overlap).clamp(min=1)
    best: Tensor = found.min(-1).values.mean()
    return best + F.mse_loss(output.iou_scores[:, 0], iou.to(masks.dtype))
