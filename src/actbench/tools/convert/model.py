"""Converting a model for the user's own training loop, and the mark that a converted model carries."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from actbench import scheme as schemes
from actbench.display import Displayed
from actbench.errors import ConversionError, SpecError, check_argument
from actbench.model.records import Site, Unreached
from actbench.packing.forwardwrapper import refuse_data_parallel
from actbench.packing.refusals import check_module, refuse_lazy
from actbench.scheme import Scheme
from actbench.scheme.composed import refuse_spread
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.changes import Changes, noting

if TYPE_CHECKING:
    from actbench.report.tables import Table

_MARK = "actbench_conversion"
_EXAMPLE = "example"


@dataclass(frozen=True, repr=False)
class Conversion(Displayed):
    """The mark that :func:`convert` leaves on a model: what it changed.

    Attributes:
        scheme: Specification of the scheme.
        version: Version of actbench.
        sites: What changed.
        unreached: What a reader may expect to be changed, and is not.
    """

    scheme: str
    version: str
    sites: tuple[Site, ...]
    unreached: tuple[Unreached, ...]
    _changes: Changes = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Return the scheme, and how much it changed."""
        return f"<Conversion {self.scheme}: {len(self.sites)} sites, {len(self.unreached)} unreached>"

    def undo(self) -> nn.Module:
        """Undo everything that :func:`convert` did to the model, in place; a second call does nothing.

        Modules, forwards, hooks and ``requires_grad`` are as before. The forward pass and the gradients are those of
        the plain model, with the trained weights. Adapters and the learned state of a scheme are removed. Changes that
        others made since stay. A graph made before can still run backward. For a deep copy of the model,
        ``conversion_of(copy)`` undoes the copy. ::

            model = actbench.conversion_of(model).undo()

        Returns:
            The plain model: the same object that was converted.

        Raises:
            ConversionError: The scheme lost values of parameters, as ``qlora`` does; then nothing is undone. Or
                another forward or module has since wrapped one of the scheme's; then everything else is undone.
        """
        self.refuse_lost()
        model = self._changes.undo()
        for marked in {model, self._changes.converted}:
            vars(marked).pop(_MARK, None)
        return model

    def drawn(self) -> list[Table]:
        """Return what a notebook shows."""
        from actbench.tools.convert.report import sites_table  # which a training loop needs not

        return [sites_table(self.sites, f"Converted by {self.scheme}", fold=True)]

    def refuse_lost(self) -> None:
        """Raise a ConversionError if the conversion cannot be undone."""
        lost = self._changes.lost
        if lost:
            raise ConversionError(
                f"{self.scheme!r} cannot be undone: it stores {lost[0]} ({len(lost)} in all) in fewer bits, and the "
                "original values are gone; build the model again, or take these values with actbench.base_state_dict"
            )


def convert(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    example_batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> nn.Module:
    """Make a model save less for backward, in the user's own training loop or with a trainer.

    The model is changed in place. It keeps its Parameter objects and state_dict keys (unless the scheme changes
    parameters), hooks, flags and devices. After an error it is unchanged. A UserWarning names what the scheme cannot
    change through the model: under ``smaq``, the optimizer state, which :func:`actbench.optim.packed` packs. ::

        model = actbench.convert(model, "fewbit:3+randomized:0.2")

    Args:
        model: The model, not converted before.
        scheme: A specification such as ``fewbit:3``, or a scheme.
        example_batch: Arguments of the model: keyword arguments as a mapping, positional ones as a tuple, or one
            tensor. With it, one training forward on fake tensors (no memory, no random numbers, no values) finds
            what each site saves before and after, and which sites never run; without it, both stay unknown.
        loss: From the model and ``example_batch`` to a scalar; by default the model's own loss, or the sum of its
            results.

    Returns:
        The converted model: ``model`` itself, unless the scheme replaces the whole of it.

    Raises:
        ArgumentError: ``model`` is not a module, or ``scheme`` no scheme; it is a TypeError too.
        SpecError: The specification is wrong.
        ModelError: A layer of the model waits for its first batch to know its shape.
        ConversionError: The model was converted before or is in ``nn.DataParallel``, nothing in it can be converted, or
            the scheme changes more than a model.
    """
    check_module(model, "convert")
    check_argument(scheme, (str, Scheme), "convert", "a specification such as 'fewbit:3', or a Scheme")
    scheme = schemes.build(scheme) if isinstance(scheme, str) else scheme
    refuse_lazy(model)
    refuse_data_parallel(model)
    refuse_converted(model, scheme)
    refuse_spread(
        scheme,
        "a conversion changes the model of one process",
        "leave that scheme out, and spread the converted model by torch's fully_shard or DistributedDataParallel, or "
        "by accelerate; or use actbench.apply in a program that torchrun starts, which applies all schemes",
    )
    setup = TrainingSetup(model, loss=lambda module, batch: (loss or _own_loss)(module, batch[_EXAMPLE]))

    def batch() -> Batch:
        return {_EXAMPLE: shaped_like(example_batch)}

    if example_batch is not None:  # only then is the model traced, which takes the simulator
        from actbench.measuring.inspection import inspect, trace

        before = trace(setup, batch)
    with noting(model) as changes:
        converted = apply_to_model(scheme, setup)
        if example_batch is not None:
            sites, unreached = inspect(before, trace(converted, batch), converted)
            converted = replace(converted, sites=sites, unreached=unreached)
        refuse_unchanged(converted, scheme)
        changes.became(converted.module)
    marked = mark(converted, scheme, changes)
    for left in converted.unreached:
        if not left.path:
            told = f"{scheme.spec}: {left.kind} stays as it is: {left.reason}"
            warnings.warn(told, stacklevel=3)  # the keywords of actbench.convert are checked between
    return marked


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the mark of :func:`convert` on a model or a module inside it; None for an unconverted model."""
    check_module(model, "conversion_of")
    marks = (vars(module).get(_MARK) for module in model.modules())
    return next((found for found in marks if found is not None), None)


def converted_in_place(model: nn.Module, scheme: str | Scheme) -> Conversion:
    """Convert a model that other code refers to, so that the scheme can be taken off again; return its mark.

    Raises:
        SpecError: The specification is wrong.
        ConversionError: The model cannot be converted, or not in place, or the conversion could not be undone.
    """
    check_module(model, "a conversion")
    with noting(model):
        converted = convert(model, scheme)
        conversion = conversion_of(converted)
        assert conversion is not None
        if converted is not model:
            raise ConversionError(
                f"scheme {conversion.scheme!r} replaces the whole of this {type(model).__name__}, which the training "
                "loop still uses; put it inside of another module, such as nn.Sequential"
            )
        conversion.refuse_lost()
    return conversion


def refuse_unchanged(setup: TrainingSetup, scheme: Scheme) -> None:
    """Raise a ConversionError if a scheme changed nothing in a model."""
    if setup.sites:
        return
    if scheme.spec == "exact":
        raise ConversionError("'exact' is the unconverted model: leave the conversion out")
    outside = "; ".join(left.reason for left in setup.unreached if not left.path)
    if outside:
        raise ConversionError(
            f"scheme {scheme.spec!r} changes nothing of a model itself: {outside}, or apply it to the whole step with "
            "actbench.apply"
        )
    raise ConversionError(f"scheme {scheme.spec!r} converts nothing in this model; see 'actbench schemes'")


def mark(setup: TrainingSetup, scheme: Scheme, changes: Changes) -> nn.Module:
    """Leave the mark on a converted model and return it."""
    version = importlib.metadata.version("actbench")
    vars(setup.module)[_MARK] = Conversion(scheme.spec, version, setup.sites, setup.unreached, changes)
    return setup.module


def remark(model: nn.Module, sites: tuple[Site, ...], unreached: tuple[Unreached, ...]) -> None:
    """Replace sites and unreached parts in the mark of a converted model."""
    vars(model)[_MARK] = replace(vars(model)[_MARK], sites=sites, unreached=unreached)


def refuse_converted(model: nn.Module, scheme: Scheme) -> None:
    """Raise a ConversionError if a model, or a module inside it, was converted before."""
    found = conversion_of(model)
    if found is not None:
        both = f"{found.scheme}+{scheme.spec}"
        try:
            once = f"with schemes composed by +, such as {schemes.build(both).spec}"
        except SpecError:  # one of them excludes the other, or is the other
            once = "with the scheme that it is to have"
        raise ConversionError(
            f"this model was already converted with {found.scheme!r}; take the unconverted model and convert it once, "
            f"{once}"
        )


class _Uncarried(NamedTuple):
    """A field of a setup that a converted model cannot carry, and what to do where the model is trained."""

    what: str
    field: str
    remedy: str


_OWN = "in your own loop"
_UNCARRIED = (
    _Uncarried("the optimizer", "make_optimizer", "make that optimizer yourself"),
    _Uncarried("the loss", "loss", f"compute that loss {_OWN}"),
    _Uncarried("autocast", "precision.autocast", f"use torch.autocast {_OWN}, or bf16=True of Trainer's arguments"),
    _Uncarried("the type of inputs", "precision.inputs", "cast the model and its inputs to that type with .to()"),
    _Uncarried(
        "the memory format of inputs",
        "precision.memory_format",
        "call model.to(memory_format=torch.channels_last) where you train",
    ),
    _Uncarried(
        "how a batch is fed",
        "micro_batching.parts",
        f"accumulate gradients {_OWN}, or by gradient_accumulation_steps of Trainer's arguments",
    ),
)


def apply_to_model(scheme: Scheme, setup: TrainingSetup) -> TrainingSetup:
    """Apply a scheme to a setup whose model alone the caller keeps.

    Raises:
        ConversionError: The scheme changes the optimizer, the loss, the precision, or what a step does with its batch.
    """
    applied = scheme.apply(setup)
    changed = [each for each in _UNCARRIED if attrgetter(each.field)(applied) != attrgetter(each.field)(setup)]
    if changed:
        names, remedies = " and ".join(each.what for each in changed), "; ".join(each.remedy for each in changed)
        raise ConversionError(
            f"scheme {scheme.spec!r} also changes {names}, which a converted model cannot carry; leave that out and "
            f"{remedies}. In your own loop actbench.apply applies the whole scheme, which 'actbench measure' measures"
        )
    return applied


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
    """Return an example batch of empty CPU tensors with the same layout; fake if a fake tensor mode is active."""
    if isinstance(example, Mapping):
        example = dict(example)  # the mapping of a tokenizer is no dict
    return tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
        ),
        example,
    )
