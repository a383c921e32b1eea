"""Converting a model for one's own training loop, and the mark that a converted model carries."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from actbench import schemes
from actbench.conversion.changes import noting
from actbench.errors import ConversionError
from actbench.measuring.inspection import inspect, trace
from actbench.results.records import Data, Site, Unreached
from actbench.schemes import Scheme
from actbench.setup import Batch, TrainingSetup

_MARK = "actbench_conversion"
_EXAMPLE = "example"


class Conversion(Data):
    """What was done to a model: the mark that :func:`convert` leaves on it."""

    scheme: str
    version: str
    sites: tuple[Site, ...]
    unreached: tuple[Unreached, ...] = ()


def convert(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    example_batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> nn.Module:
    """Make a model keep less for backward, for use in one's own training loop or with a trainer.

    The model is changed in place and keeps its Parameter objects and state_dict keys (but for a scheme of parameters),
    hooks, flags and devices. When anything is refused, it is left as it was. A UserWarning says what the scheme works
    on outside of the model: the state of the optimizer under ``smaq``, until :func:`actbench.optim.packed` wraps it. ::

        model = actbench.convert(model, "fewbit:3+randomized:0.2")

    Args:
        model: The model, not converted before.
        scheme: A specification such as ``fewbit:3``, or a scheme.
        example_batch: What the model is called with: keyword arguments as a mapping, positional ones as a tuple, or
            one tensor. With it, one training forward on fake tensors (no memory, no random numbers, no values) tells
            what each site keeps before and after, and which sites never run; without it, both stay unknown.
        loss: From the model and ``example_batch`` to a scalar; by default the model's own loss, or the sum of what
            it returns.

    Returns:
        The converted model: ``model`` itself, unless the scheme replaces the whole of it.

    Raises:
        TypeError: There is no model, or no scheme.
        SpecError: The specification is wrong.
        ConversionError: The model was converted before, nothing in it can be converted, or the scheme changes more
            than a model can carry.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module and changes it, found {model!r:.60}")
    if not isinstance(scheme, str | Scheme):
        raise TypeError(f"the scheme must be a specification such as 'fewbit:3', or a Scheme, found {scheme!r:.60}")
    scheme = schemes.build(scheme) if isinstance(scheme, str) else scheme
    converted = _converted(model, scheme, example_batch, loss)
    found = conversion_of(converted)
    for left in () if found is None else found.unreached:
        if not left.path:
            warnings.warn(f"{scheme.spec}: {left.kind} stays as it is: {left.reason}", stacklevel=2)
    return converted


def _converted(
    model: nn.Module, scheme: Scheme, example_batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None
) -> nn.Module:
    refuse_converted(model, scheme)
    setup = TrainingSetup(model, loss=_example_loss(loss))
    if example_batch is None:
        with noting(model):
            return mark(apply_to_model(scheme, setup), scheme)
    before = trace(setup, lambda: {_EXAMPLE: shaped_like(example_batch)})
    with noting(model):
        converted = apply_to_model(scheme, setup)
        after = trace(converted, lambda: {_EXAMPLE: shaped_like(example_batch)})
        sites, unreached = inspect(before, after, converted)
        return mark(TrainingSetup(converted.module, sites=sites, unreached=unreached), scheme)


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the mark that :func:`convert` left on a model or on a module inside it; None for an unconverted one."""
    marks = (vars(module).get(_MARK) for module in model.modules())
    return next((found for found in marks if found is not None), None)


def mark(setup: TrainingSetup, scheme: Scheme) -> nn.Module:
    """Leave the mark on a converted model and return it; a ConversionError if nothing was converted."""
    if not setup.sites:
        if scheme.spec == "exact":
            raise ConversionError("'exact' is the unconverted model: leave the conversion out")
        outside = "; ".join(left.reason for left in setup.unreached if not left.path)
        if outside:
            raise ConversionError(
                f"scheme {scheme.spec!r} changes nothing of a model itself: {outside}, or apply it to the whole "
                "step with actbench.apply"
            )
        raise ConversionError(f"scheme {scheme.spec!r} converts nothing in this model; see 'actbench schemes'")
    vars(setup.module)[_MARK] = Conversion(
        scheme=scheme.spec,
        version=importlib.metadata.version("actbench"),
        sites=setup.sites,
        unreached=setup.unreached,
    )
    return setup.module


def unmark(model: nn.Module) -> None:
    """Take the mark off a model that is as it was before."""
    vars(model).pop(_MARK, None)


def refuse_converted(model: nn.Module, scheme: Scheme) -> None:
    """Raise a ConversionError if a model, or a model inside it, was converted before."""
    found = conversion_of(model)
    if found is not None:
        raise ConversionError(
            f"this model was already converted with {found.scheme!r} ({len(found.sites)} sites); take the unconverted "
            f"model and convert it once, with schemes composed by +, such as {found.scheme}+{scheme.spec}"
        )


def apply_to_model(scheme: Scheme, setup: TrainingSetup) -> TrainingSetup:
    """Apply a scheme to a setup of which only the model will be kept.

    Raises:
        ConversionError: The scheme changes the optimizer, the loss, autocast, or what a step does with its batch.
    """
    applied = scheme.apply(setup)
    changed = [
        what
        for what, differs in (
            ("the optimizer", applied.make_optimizer is not setup.make_optimizer),
            ("the loss", applied.loss is not setup.loss),
            ("autocast", applied.autocast_dtype is not setup.autocast_dtype),
            ("the type of inputs", applied.input_dtype is not setup.input_dtype),
            ("how a batch is fed", applied.micro_batches != setup.micro_batches),
        )
        if differs
    ]
    if changed:
        raise ConversionError(
            f"scheme {scheme.spec!r} also changes {' and '.join(changed)}, which a converted model cannot carry; "
            "measure it with 'actbench measure', apply it to the whole step with actbench.apply, or give what a model "
            "can carry, such as smaq,on=activations, and make the optimizer with actbench.optim.packed"
        )
    return applied


def _example_loss(loss: Callable[[nn.Module, Any], Tensor] | None) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: (loss or _own_loss)(model, batch[_EXAMPLE])


def _own_loss(model: nn.Module, example: Any) -> Tensor:
    output = _call(model, example)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not results:
        raise ConversionError(
            f"the model returns a {type(output).__name__} without a loss or a floating-point tensor; give convert a "
            "loss=, a function from the model and the example batch to a scalar"
        )
    return torch.stack([result.float().sum() for result in results]).sum()


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple | list):
        return model(*example)
    return model(example)


def shaped_like(example: Any) -> Any:
    """Return an example batch with empty CPU tensors of the same layout, fake where a fake tensor mode is active."""
    if isinstance(example, Mapping):
        example = dict(example)  # a tokenizer's mapping is no dict
    return tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
        ),
        example,
    )
