from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator
from torch import nn, optim

from actbench.errors import ConversionError
from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.actnn.variance import rounding_variance
from actbench.methods.formats.encoded import (
    Encoded,
    EncodedOutputs,
    PackedGradients,
    RoundedState,
    RoundedWeights,
    StepByParameter,
    quantized_modules,
    rounded,
)
from actbench.methods.formats.encoded.form import BY_PARAMETER
from actbench.methods.formats.encodings import Encoding
from actbench.methods.formats.optim.base import PackedOptimizer
from actbench.methods.formats.optim.optimizers import packed
from actbench.model.gradient import Gradient
from actbench.model.records import Site, Unreached
from actbench.ops.library import DTYPES
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.hooked.forward import HOOKS, OffloadedForward
from actbench.packing.refusals import NotInParallel, refuse_compiled, refuse_sharded
from actbench.packing.wrapped import bind_entries
from actbench.scheme.base import (
    GRADIENTS,
    NOTHING_PACKED,
    OPTIMIZER_STATE,
    SAVED_RESULTS,
    SAVED_TENSORS,
    WAITING_GRADIENTS,
    Change,
    Scheme,
    refuse_untrained,
)
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Adaptive, Diagnosed, Facet, LossyForward, OwnOptimizer
from actbench.scheme.setup import MakeOptimizer, Part, TrainingSetup

Structure = Literal["weights", "gradients", "activations", "maps", "state"]
STRUCTURES: tuple[Structure, ...] = get_args(Structure)
_WITHOUT = "leave them out of on=; activations and maps work there"

WAS = {
    "weights": "weights",
    "gradients": "weight gradients",
    "activations": "activations",
    "maps": "gradient maps",
    "state": "optimizer state",
}
"""The five data structures in words."""

_NO_MAPS = "no layer that the step calls returns a tensor that a gradient is asked of; leave maps out of on="
_BY_PARAMETER = (*BY_PARAMETER, PackedOptimizer)
_ELEMENTS = 1 << 20  # of a tensor whose bits per element are reported: so many that a partial last block does not count

_CLAIMS: dict[Structure, str] = {"activations": SAVED_TENSORS, "gradients": GRADIENTS, "state": OPTIMIZER_STATE}
_FURTHER_CLAIMS: dict[Structure, str] = {"activations": SAVED_RESULTS, "gradients": WAITING_GRADIENTS}


class EncodedStructures(Scheme):
    """Stores data structures of a training step in one number format; ``on`` names the structures.

    A subclass gives the format, the docstring and the names of the registry.
    """

    on: Annotated[tuple[Structure, ...], Field(min_length=1)] = ("activations", "state")
    forward: Literal["exact", "lossy"] = "exact"

    @property
    def gradient(self) -> Gradient:
        """Exact if only the optimizer's state is in the format."""
        return "exact" if self.on == ("state",) else "approximate"

    @field_validator("on")
    @classmethod
    def _ordered(cls, on: tuple[Structure, ...]) -> tuple[Structure, ...]:
        if len(set(on)) < len(on):
            raise ValueError("a structure is given twice")
        return tuple(structure for structure in STRUCTURES if structure in on)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.forward == "lossy" and "activations" not in self.on:
            raise ValueError("forward=lossy is about activations; add them to on=")
        return self

    @property
    def number_format(self) -> Encoding:
        """The number format."""
        raise NotImplementedError

    @property
    def facets(self) -> Iterable[Facet]:
        """The facets that follow from the structures in the format."""
        if self.forward == "lossy":
            yield LossyForward()
        if self._whole:
            yield Limits(unsharded=": ".join(_sharded(self._whole)))
        if "weights" in self.on:
            yield Adaptive(as_after_a_step=lambda setup: rounded(_trained(setup.module), self._unbiased))
        if "activations" in self.on and self.forward == "exact" and not {"maps", "gradients"} & set(self.on):
            yield Diagnosed((rounding_variance,))
        if {"activations", "state"}.issuperset(self.on) and "state" in self.on:
            of_model = self.model_copy(update={"on": ("activations",)}).spec if "activations" in self.on else ""
            yield OwnOptimizer(f'actbench.optim.packed({{}}, encoding="{self.number_format.spec}")', of_model)

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes that the structures belong to; maps and weight gradients are both gradients."""
        of: dict[Structure, Change] = {"activations": "saved tensors", "state": "optimizer", "weights": "precision"}
        return tuple(dict.fromkeys(of.get(each, "gradients") for each in self.on))

    @property
    def claims(self) -> tuple[str, ...]:
        """Each structure has one format, which no other scheme may set."""
        own = tuple(_CLAIMS.get(each, f"have {WAS[each]} in a format") for each in self.on)
        return own + tuple(claim for each, claim in _FURTHER_CLAIMS.items() if each in self.on)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind hooks on the model, its parameters and its optimizer.

        Raises:
            ConversionError: The model has nothing to train, is of a type that the format does not take, is sharded or
                compiled, has one of the structures in a format already, or comes without an optimizer where one is
                needed.
        """
        self._check(setup)
        make = setup.make_optimizer
        sites = [self._site(each, setup.module) for each in self.on if each != "state" or make is not None]
        lacks_optimizer = "state" in self.on and make is None
        unreached = (_without_optimizer(self.number_format),) if lacks_optimizer else ()
        packer = SavedTensors(Encoded(self.number_format))
        if "activations" in self.on:
            hooks = Hooks(packer, self._bits, small_codes(), whole_model=not setup.path)
            HookedForward(setup.module, hooks).bind()
            bind_entries(setup.module)
        hook = self._hook_outputs(setup.module)
        if make is not None:
            make = self._make_optimizer(make, setup.module)
        by = Part(self.spec, acts=packer if "activations" in self.on else None, idle=NOTHING_PACKED)
        changed = setup.changed(setup.module, tuple(sites), unreached, by=by)
        if "maps" in self.on:
            maps = (self._site("maps", setup.module),)
            changed = replace(changed, parts=(*changed.parts, Part(self.spec, acts=hook, idle=_NO_MAPS, sites=maps)))
        return replace(changed, make_optimizer=make, warnings=setup.warnings + tuple(self._warnings()))

    def _warnings(self) -> Iterator[str]:
        simulated = [WAS[structure] for structure in self.on if not self._is_stored(structure)]
        if simulated:
            yield f"{self.spec}: {', '.join(simulated)} are simulated: their values are rounded, no byte is saved"
        if self.forward == "lossy":
            yield f"{self.spec}: the forward pass is lossy: modules compute on outputs rounded to the format"

    def _is_stored(self, structure: Structure) -> bool:
        return self.number_format.stored and structure not in ("weights", "maps")

    def _check(self, setup: TrainingSetup) -> None:
        self._check_parameters(setup.module)
        if {"activations", "maps"} & set(self.on):
            refuse_compiled(setup.module, *HOOKS)
        self._check_others(setup)
        shared = self._named("weights", "gradients")
        if self._whole:
            refuse_sharded(setup.module, *_sharded(self._whole))
        if setup.make_optimizer is None and (shared or self.on == ("state",)):
            raise ConversionError(
                f"{self.spec}: {self._named('weights', 'gradients', 'state')} need the optimizer, which a model alone "
                "does not bring; apply the scheme to a TrainingSetup with make_optimizer, or leave them out of on="
            )

    def _check_parameters(self, module: nn.Module) -> None:
        refuse_untrained(self.spec, module)
        other = next((parameter.dtype for parameter in _trained(module) if parameter.dtype not in DTYPES), None)
        if other is not None:
            raise ConversionError(
                f"{self.spec}: {type(module).__name__} has parameters of {other}, which {self.number_format.spec} does "
                "not take; convert the model to float32 or bfloat16 first"
            )

    def _check_others(self, setup: TrainingSetup) -> None:
        """Refuse structures that another scheme has changed."""
        bound = (forward.of(setup.module) for forward in (HookedForward, OffloadedForward))
        if "activations" in self.on and any(bound):
            raise ConversionError(
                f"{self.spec}: {type(setup.module).__name__} packs or moves its saved tensors already, and of hooks "
                "only the innermost run; leave activations out of on=, or convert the original"
            )
        taken = {site.path for site in setup.sites}
        for structure in self.on:
            if structure != "activations" and _path(structure) in taken:
                raise ConversionError(
                    f"{self.spec}: another scheme stores {WAS[structure]} in a format; name them once"
                )

    @property
    def _whole(self) -> str:
        """What needs whole tensors, in words: state does where its format is simulated."""
        state = WAS["state"] if "state" in self.on and not self.number_format.stored else ""
        return self._named("weights", "gradients") or state

    def _named(self, *structures: Structure) -> str:
        """Return in words which of these structures ``on`` names."""
        return " and ".join(WAS[structure] for structure in self.on if structure in structures)

    def _hook_outputs(self, module: nn.Module) -> EncodedOutputs:
        hook = EncodedOutputs(
            forward=self.number_format if self.forward == "lossy" else None,
            maps=self.number_format if "maps" in self.on else None,
        )
        if hook.forward is not None or hook.maps is not None:
            for child in quantized_modules(module):
                child.register_forward_hook(hook)
        return hook

    def _make_optimizer(self, make: MakeOptimizer, module: nn.Module) -> MakeOptimizer:
        """Return what makes an optimizer and wraps it as the structures need."""
        shared = self._named("weights", "gradients")
        if not (shared or "state" in self.on):
            return make
        gradients = PackedGradients(_trained(module), self.number_format) if "gradients" in self.on else None
        if shared or not self.number_format.stored:
            module.register_forward_pre_hook(NotInParallel(*_replicated(shared or WAS["state"])))

        def wrapped(module: nn.Module) -> optim.Optimizer:
            if self._whole:
                refuse_sharded(module, *_sharded(self._whole))
            optimizer = make(module)
            if "state" in self.on and self.number_format.stored:
                optimizer = packed(optimizer, encoding=self.number_format)
            elif "state" in self.on:
                optimizer.register_step_post_hook(RoundedState(self.number_format))
            if "weights" in self.on:
                optimizer.register_step_post_hook(RoundedWeights(self._unbiased))
            return optimizer if gradients is None else StepByParameter(optimizer, gradients, _BY_PARAMETER)

        return wrapped

    @property
    def _unbiased(self) -> Encoding:
        """The format with stochastic rounding, if it has it: to the nearest, small updates of weights are lost."""
        found = self.number_format
        return found.model_copy(update={"rounding": "stochastic"}) if "rounding" in type(found).model_fields else found

    @property
    def _bits(self) -> float:
        return 8 * self.number_format.packed_bytes((_ELEMENTS,), DTYPES[0]) / _ELEMENTS

    def _site(self, structure: Structure, module: nn.Module) -> Site:
        spec = self.number_format.spec
        becomes = f"{spec}, {self._bits:g} bits" if self._is_stored(structure) else f"simulated: values of {spec}"
        if structure == "activations" and self.forward == "lossy":
            becomes += "; outputs of modules are lossy"
        before = after = None
        if structure == "gradients":
            trained = _trained(module)
            before = sum(parameter.nbytes for parameter in trained)
            after = sum(PackedGradients.bytes_of(parameter, self.number_format) for parameter in trained)
        return Site(path=_path(structure), was=WAS[structure], becomes=becomes, bytes_before=before, bytes_after=after)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _replicated(what: str) -> tuple[str, str]:
    """Return what does not work with DDP, and why."""
    why = "each process would pack its gradients before they are averaged, and round its weights differently"
    return f"{what} in a number format", f"{why}; {_WITHOUT}"


def _sharded(what: str) -> tuple[str, str]:
    """Return what does not work with FSDP, and why."""
    why = "each process holds a shard, whose ends are not those of the format's blocks, and FSDP reduces gradients"
    return f"{what} in a number format", f"{why} by itself; {_WITHOUT}"


def _path(structure: Structure) -> str:
    """Return the path of a structure's site: the model's for activations, else its name in parentheses."""
    return "" if structure == "activations" else f"({WAS[structure]})"


def _without_optimizer(encoding: Encoding) -> Unreached:
    """Return the report about the state of a setup without an optimizer."""
    what = (
        f'wrap it by actbench.optim.packed(optimizer, encoding="{encoding.spec}")'
        if encoding.stored
        else "apply the scheme to a TrainingSetup with make_optimizer, or leave state out of on="
    )
    return Unreached(path="", kind=WAS["state"], reason=f"the optimizer is not part of the model; {what}")
