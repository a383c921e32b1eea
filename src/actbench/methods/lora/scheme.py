from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator
from torch import nn

from actbench.methods.lora import lowrank
from actbench.methods.lora.adapter import LABELS, Adapter
from actbench.methods.lora.lowrank import Targets
from actbench.model.provenance import Published
from actbench.model.records import Site, Unreached
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Needs
from actbench.scheme.setup import TrainingSetup

_READ = "its parent reads its weight and does not call it outside of training; it stays frozen"


class Lora(Scheme):
    """The model is frozen; only low-rank matrices beside the weights of its linear layers are trained.

    Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; by peft, an optional
    package: ``pip install "actbench[peft]"``.
    A layer computes ``W x + b + (alpha / r) B A x`` with A, (r, d_in), drawn as peft does, and B, (d_out, r), of zeros:
    the first forward pass equals that of the plain model. Trained are A and B, ``r (d_in + d_out)`` numbers a layer,
    and a whole classifier (peft's ``modules_to_save``, which keeps a frozen copy beside it); all else is frozen, also
    embeddings, norms, biases and the head of a language model. Only trained parameters have gradients and optimizer
    state. About as much is saved for backward as without the scheme: inputs of layers are saved for A in place of W.
    Adapters of bfloat16 and float16 models are float32, as ``peft.get_peft_model`` makes them, and save their inputs in
    that type: add ``checkpoint`` or a scheme for saved tensors, or ``dtype=model``.
    ``adapter=`` puts something else beside the layers (:class:`~actbench.methods.lora.adapter.Adapter`):
    DoRA (Liu et al., arXiv 2402.09353), LoRA-FA (Zhang et al., arXiv 2308.03303), VeRA (Kopiczko et al., arXiv
    2310.11454), LoKr (Yeh et al., arXiv 2309.14859).
    Not reproduced: merged weights for inference, which peft makes of a saved adapter; LoRA-FA's optimizer that scales
    the gradient of B by the inverse of A A^T.

    Attributes:
        r: The rank.
        alpha: The factor of B A x, times r; twice the rank by default.
        dropout: The share of the inputs of A that is dropped.
        target: Names of the linear layers that get adapters, such as ``q_proj/v_proj``; by default all but the head.
        adapter: What is put beside a layer.
        dtype: Type of adapters beside half weights: float32, or that of the ``model``.
        modules_to_save: Ends of the paths of modules that are trained whole, such as ``embed_tokens/lm_head``, each
            beside a frozen copy; peft's option of that name. A copy of tied weights is tied to nothing.
    """

    name: ClassVar[str] = "lora"
    positional: ClassVar[str | None] = "r"
    card: ClassVar[Card] = Card(
        summary="low-rank matrices next to frozen weights (peft): few parameters are trained",
        paper="Hu et al. 2021, arXiv 2106.09685",
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 350 / 1200,
                setting="GPT-3 175B, r = 4 on query and value, Adam, 1.2 TB",
                source="arXiv 2106.09685, section 4.2",
            ),
        ),
        rank=3,
        variants=(":16",),  # the usual rank
        libraries=("peft", "actbench.methods.lora.adaptercaches"),
        extras={"peft": "adapters of peft"},
    )
    claims: ClassVar[tuple[str, ...]] = ("freeze a model and put adapters on it",)
    changes: ClassVar[tuple[Change, ...]] = ("parameters",)

    r: PositiveInt = 16
    alpha: Annotated[float, Field(gt=0)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target: tuple[str, ...] = ()
    adapter: Literal["lora", "dora", "lora_fa", "vera", "lokr"] = "lora"
    dtype: Literal["float32", "model"] = "float32"
    modules_to_save: tuple[str, ...] = ()

    @field_validator("target")
    @classmethod
    def _names(cls, target: tuple[str, ...]) -> tuple[str, ...]:
        if "" in target:
            raise ValueError("names of linear layers stand between the /, such as target=q_proj/v_proj")
        return target

    @field_validator("modules_to_save")
    @classmethod
    def _modules(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        if "" in modules:
            raise ValueError("names of modules stand between the /, such as modules_to_save=embed_tokens/lm_head")
        return modules

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.adapter == "vera" and self.alpha is not None:
            raise ValueError("adapter=vera has no alpha")
        if self.adapter == "lokr" and self.dropout:
            raise ValueError("adapter=lokr has no dropout of inputs")
        return self

    @property
    def facets(self) -> Iterable[Facet]:
        """A model has to have linear layers that can get adapters."""
        return (Needs(lambda module: self._check(self._targets(module, whole_model=True))),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Freeze the model, and put adapters on its linear layers.

        Raises:
            NothingToConvertError: No such layer is found.
            ConversionError: The model is compiled, or holds adapters already, or peft has no such adapter for a layer.
            MeasurementError: peft is not installed.
        """
        targets = self._targets(setup.module, whole_model=not setup.path)
        self._check(targets)
        adapter = Adapter(self.adapter, self.r, 2 * self.r if self.alpha is None else self.alpha, self.dropout)
        model = lowrank.adapt(setup.module, targets, self.name, adapter, self.dtype)
        model = self._settled(model, targets)
        left = [Unreached(path=path, kind="linear layer", reason=_READ) for path in targets.passed_by]
        left += [self._left(path, part) for path, part in targets.stacks.items()]
        return setup.changed(model, tuple(self._sites(targets)), tuple(left))

    def _targets(self, module: nn.Module, *, whole_model: bool) -> Targets:
        return lowrank.find(module, self.target, self.modules_to_save, self.name, whole_model=whole_model)

    def _check(self, targets: Targets) -> None:
        """Refuse layers before anything is changed."""

    def _settled(self, model: nn.Module, targets: Targets) -> nn.Module:
        """Return the model with adapters in the form that is trained."""
        if self.adapter == "dora":
            for part in lowrank.adapters(model):
                lowrank.renew_magnitudes(part)
        return model

    def _left(self, path: str, module: nn.Module) -> Unreached:
        """Return why a module with stacks of matrices has no adapters."""
        names = " and ".join(name for name, _ in lowrank.stacked(module))
        reason = f"its {names}: matrices in a stack, not in linear layers; frozen without an adapter"
        return Unreached(path=path, kind=type(module).__name__, reason=reason)

    def _sites(self, targets: Targets) -> list[Site]:
        label = LABELS[self.adapter]
        found = [
            Site(
                path=path, was=type(targets.layers[path]).__name__, becomes=f"frozen, {label}adapters of rank {self.r}"
            )
            for path in targets.adapted
        ]
        for path in targets.saved:
            was = "classifier" if path == targets.head else "module"
            found.append(Site(path=path, was=was, becomes="trained whole; a frozen copy is kept"))
        return found
