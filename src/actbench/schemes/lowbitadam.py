from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from actbench.errors import ConversionError, MeasurementError
from actbench.ops import hostmemory
from actbench.optim.optimizers import is_decoupled
from actbench.results.records import Published, Site, Unreached
from actbench.schemes.base import OPTIMIZER_STATE, Change, Scheme, refuse_untrained
from actbench.setup import Part, TrainingSetup

_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = "optimizer state"
_COMPILED = "torch compiles its step on CUDA; simulated for CUDA it is one kernel a parameter, without temporaries"
_SMALLEST = 4096  # elements of a parameter whose moments are of 8 bits
_SOURCE = "README of torchao.optim"
_SETTING = "ViT-H fine-tuned on RESISC45, AdamW 12.23 GB"


class Adam8bit(Scheme):
    """Adam and AdamW keep both moments in 8 bits: torchao's ``Adam8bit`` and ``AdamW8bit`` in place of torch's.

    Paper: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; by torchao, an optional
    package: ``pip install "actbench[torchao]"``.
    Kept from step to step, of each parameter of at least 4,096 elements, a multiple of 256: two codes of 8 bits an
    element, a float32 scale for each 256 of them, and 1 KiB of levels for each moment. Smaller parameters keep moments
    in their own type. Gradients are bit for bit those without the scheme; the update is that of rounded moments.
    On CUDA torch compiles the step, as torchao has it, and a simulation for CUDA counts no temporaries of it; on a CPU
    it runs operator by operator, with temporaries of the largest parameter in float32.
    Not reproduced: bitsandbytes' kernels, stable embeddings.
    """

    name: ClassVar[str] = "adam8bit"
    summary: ClassVar[str] = "Adam and AdamW with moments of 8 bits (torchao); gradients are exact"
    paper: ClassVar[str] = "Dettmers et al. 2021, arXiv 2110.02861"
    rank: ClassVar[int] = 50
    published: ClassVar[tuple[Published, ...]] = (
        Published(quantity="peak_saving", value=1 - 8.33 / 12.23, setting=_SETTING, source=_SOURCE),
    )

    suffix: ClassVar[str] = "8bit"
    becomes: ClassVar[str] = "8 bits, a scale for each 256 elements"

    @property
    def changes(self) -> tuple[Change, ...]:
        """The optimizer alone."""
        return ("optimizer",)

    @property
    def claims(self) -> tuple[str, ...]:
        """The state of an optimizer is in one format."""
        return (OPTIMIZER_STATE,)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Put an 8-bit optimizer in the place of the one that the setup makes.

        Raises:
            NothingToConvertError: Nothing is trained.
            MeasurementError: torchao is not installed.
        """
        refuse_untrained(self.name, setup.module)
        make = setup.make_optimizer
        if make is None:
            reason = f"the optimizer is not part of the model; make torchao.optim.AdamW{self.suffix} of its parameters"
            return setup.changed(setup.module, (), (Unreached(path="", kind=_STATE, reason=reason),))
        classes = _classes(self.name, self.suffix)

        def make_in_few_bits(module: torch.nn.Module) -> torch.optim.Optimizer:
            return _in_few_bits(self.name, make(module), classes)

        site = Site(path=f"({_STATE})", was=_STATE, becomes=self.becomes)
        changed = setup.changed(setup.module, (site,), by=Part(self.spec))
        if any(isinstance(parameter, FakeTensor) for parameter in setup.module.parameters()):
            changed = replace(changed, warnings=(*changed.warnings, f"{self.name}: {_COMPILED}"))
        return replace(changed, make_optimizer=make_in_few_bits)


class Adam4bit(Adam8bit):
    """Adam and AdamW keep both moments in 4 bits: torchao's ``Adam4bit`` and ``AdamW4bit`` in place of torch's.

    Paper: Li et al., "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507; by torchao.
    Kept from step to step, of each parameter of at least 4,096 elements, a multiple of 128: two codes of 4 bits an
    element, a float32 scale for each 128 of them, and 64 bytes of levels for each moment. The rest is as in
    ``adam8bit``.
    Not reproduced: rank-1 normalization of the second moment.
    """

    name: ClassVar[str] = "adam4bit"
    summary: ClassVar[str] = "Adam and AdamW with moments of 4 bits (torchao); gradients are exact"
    paper: ClassVar[str] = "Li et al. 2023, arXiv 2309.01507"
    published: ClassVar[tuple[Published, ...]] = (
        Published(quantity="peak_saving", value=1 - 7.72 / 12.23, setting=_SETTING, source=_SOURCE),
    )
    suffix: ClassVar[str] = "4bit"
    becomes: ClassVar[str] = "4 bits, a scale for each 128 elements"


class AdamFp8(Adam8bit):
    """Adam and AdamW keep both moments as 8-bit floats: torchao's ``AdamFp8`` and ``AdamWFp8`` in place of torch's.

    Kept from step to step, of each parameter of at least 4,096 elements, a multiple of 256: two e4m3 floats an element
    and a float32 scale for each 256 of them. The rest is as in ``adam8bit``.
    """

    name: ClassVar[str] = "adamfp8"
    summary: ClassVar[str] = "Adam and AdamW with moments of 8-bit floats (torchao); gradients are exact"
    paper: ClassVar[str] = ""
    published: ClassVar[tuple[Published, ...]] = ()
    suffix: ClassVar[str] = "Fp8"
    becomes: ClassVar[str] = "8-bit floats, a scale for each 256 elements"


def _in_few_bits(
    scheme: str, optimizer: torch.optim.Optimizer, classes: dict[bool, Callable[..., Any]]
) -> torch.optim.Optimizer:
    """Return torchao's optimizer for the parameters, groups and options of torch's."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConversionError(
            f"{scheme}: the optimizer is {type(optimizer).__name__}; torchao has a twin of torch.optim.Adam and AdamW "
            "only: --optimizer adamw"
        )
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise ConversionError(f"{scheme}: the optimizer has {option}=True, which torchao's does not take")
    groups = [{key: group[key] for key in ("params", *_OPTIONS)} for group in optimizer.param_groups]
    return classes[is_decoupled(optimizer)](groups)  # type: ignore[no-any-return]


def _classes(scheme: str, suffix: str) -> dict[bool, Callable[..., Any]]:
    """Return torchao's classes, AdamW's for True, as :func:`_adapted` makes them."""
    try:
        from torchao import optim  # type: ignore[import-untyped]
    except ImportError:
        raise MeasurementError(f'{scheme} needs torchao: pip install "actbench[torchao]"') from None
    return {
        decoupled: _adapted(getattr(optim, f"{name}{suffix}")) for decoupled, name in ((True, "AdamW"), (False, "Adam"))
    }


@functools.cache
def _adapted(kind: type[Any]) -> type[Any]:
    """Return a class of torchao that needs no compiler off CUDA, and whose saved state is plain tensors."""

    class Adapted(kind):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def step(self, closure: Any = None) -> Any:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            _make_rates_tensors(self.param_groups)
            if _stand_for_cuda(parameters):
                return _make_state(self, parameters)
            compiles = all(parameter.is_cuda for parameter in parameters)
            with torch.compiler.set_stance("default" if compiles else "force_eager"):
                return super().step(closure)

        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            groups = [{**group, "lr": float(group["lr"])} for group in found["param_groups"]]
            state = {number: {name: _apart(each) for name, each in of.items()} for number, of in found["state"].items()}
            return {**found, "state": state, "param_groups": groups}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            parameters = _by_number(state_dict, self.param_groups)
            state = {
                number: {name: self._together(parameters[number], name, each) for name, each in of.items()}
                for number, of in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state})

        def _together(self, parameter: Tensor, name: str, saved: Any) -> Any:
            if name not in _MOMENTS:
                return saved
            moment = self._new_buffer(parameter, signed=name == "exp_avg")
            if not isinstance(saved, dict):  # torch's own, or of a small parameter
                return moment.copy_(saved)
            for part, tensor in saved.items():
                getattr(moment, part).copy_(tensor)
            return moment

    found = type(kind.__name__, (Adapted,), {})
    with unset_fake_temporarily():  # the first step computes the levels, whose values fake tensors lack
        parameter = torch.nn.Parameter(torch.zeros(_SMALLEST))
        parameter.grad = torch.zeros_like(parameter)
        found([parameter]).step()
    return found


def _make_rates_tensors(groups: list[dict[str, Any]]) -> None:
    """Give torchao the tensors that it wants for learning rates, where schedulers have written numbers."""
    for group in groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)


def _make_state(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Do of a step what is seen of it in memory where it is one kernel: make what is not there yet."""
    for parameter in parameters:
        if parameter.grad is not None and not optimizer.state[parameter]:
            moments = {name: optimizer._new_buffer(parameter, name == "exp_avg") for name in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _stand_for_cuda(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters are fake and stand for those of a CUDA device."""
    return any(isinstance(parameter, FakeTensor) and hostmemory.is_elsewhere(parameter) for parameter in parameters)


def _by_number(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[int, Tensor]:
    """Return an optimizer's parameters by the numbers that a saved state has for them."""
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = dict(zip(numbers, itertools.chain.from_iterable(group["params"] for group in groups), strict=False))
    if not state_dict["state"].keys() <= parameters.keys():
        raise ValueError("the loaded state is of more parameters than this optimizer has")
    return parameters


def _apart(value: Any) -> Any:
    """Return a tensor that is made of others as these by name, and anything else as it is."""
    if not hasattr(value, "__tensor_flatten__"):
        return value
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
