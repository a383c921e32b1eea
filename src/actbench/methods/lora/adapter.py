"""The kinds of adapters of a linear layer, each with peft's own configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import ConversionError

AdapterKind = Literal["lora", "dora", "lora_fa", "vera", "lokr"]
AdapterType = Literal["float32", "model"]

LABELS: dict[AdapterKind, str] = {"lora": "", "dora": "DoRA ", "lora_fa": "LoRA-FA ", "vera": "VeRA ", "lokr": "LoKr "}


@dataclass(frozen=True)
class Adapter:
    """An adapter of a linear layer with the weight W, (d_out, d_in).

    Attributes:
        kind: ``lora`` adds s B A x with A, (r, d_in), and B, (d_out, r). ``dora`` divides W + s B A by the norms of its
            rows, held constant, and multiplies by a trained magnitude for each row (arXiv 2402.09353, equation 5).
            ``lora_fa`` is ``lora`` with a frozen A, so that not x but A x is saved (arXiv 2308.03303). ``vera`` adds
            b * B (d * (A x)) with frozen random A and B that all layers share, and trained vectors b, (d_out,), and d,
            (r,) (arXiv 2310.11454, equation 2). ``lokr`` adds s (C kron (B A)) x with factors of the widths
            (arXiv 2309.14859, section 3.3).
        r: The rank.
        alpha: s times r; ``vera`` has none.
        dropout: The share of x that is dropped before A; ``lokr`` has none.
    """

    kind: AdapterKind
    r: int
    alpha: float
    dropout: float

    def inject(
        self, peft: Any, model: nn.Module, paths: tuple[str, ...], saved: tuple[str, ...], *, meta: bool, experts: bool
    ) -> None:
        """Let peft freeze a model and put adapters on it, in place.

        Args:
            peft: The package.
            model: The model.
            paths: Paths of the layers that get adapters.
            saved: Paths of the modules that are trained whole.
            meta: Whether new parameters are on the meta device.
            experts: Whether the model holds experts as stacks of matrices.

        Raises:
            ConversionError: peft has no such adapter for a layer.
        """
        # peft takes a text for a pattern that has to match whole paths, and a list for ends of paths
        common = {"target_modules": "|".join(map(re.escape, paths)), "modules_to_save": list(saved) or None}
        config = self._config(peft, **common)
        # With the config of a model with stacked experts peft rewrites patterns, and passes over dense layers.
        hidden = vars(model).pop("config", None) if experts else None
        try:
            self._inject(peft, model, config, meta=meta)
        finally:
            if hidden is not None:
                vars(model)["config"] = hidden
        if self.kind == "lokr":
            _leave_out_module_dropout(peft, model)

    def _inject(self, peft: Any, model: nn.Module, config: Any, *, meta: bool) -> None:
        if self.kind == "vera":  # inject_adapter_in_model refuses what layers share; the layers hold it themselves
            (_vera_on_card(peft) if meta else peft.VeraModel)(model, config, "default", low_cpu_mem_usage=meta)
            return
        try:
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=meta)
        except TypeError as error:
            if self.kind != "lokr":
                raise
            raise ConversionError(f"adapter=lokr: peft puts it on nn.Linear, not on these layers: {error}") from None

    def freeze(self, model: nn.Module) -> None:
        """Freeze those parameters that peft trains and the kind does not."""
        if self.kind == "lora_fa":
            for part in model.modules():
                getattr(part, "lora_A", nn.Identity()).requires_grad_(False)

    def _config(self, peft: Any, **common: Any) -> Any:
        if self.kind == "vera":  # the matrices follow from a seed, and a model that holds adapters cannot save them
            return peft.VeraConfig(r=self.r, vera_dropout=self.dropout, save_projection=False, **common)
        if self.kind == "lokr":
            return peft.LoKrConfig(r=self.r, alpha=self.alpha, **common)
        dora = self.kind == "dora"
        return peft.LoraConfig(r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, use_dora=dora, **common)


def _vera_on_card(peft: Any) -> Any:
    """Return peft's model whose shared matrices, which it draws for real, are fake where the layers are on a card."""

    class Shared(peft.VeraModel):  # type: ignore[misc]
        def _init_vera_A_vera_B(self, config: Any, adapter_name: str) -> None:  # noqa: N802 - peft's name
            super()._init_vera_A_vera_B(config, adapter_name)
            layer = next((each for each in self.model.parameters() if isinstance(each, FakeTensor)), None)
            if layer is None or layer.device.type == "cpu":
                return
            for shared in (self.vera_A, self.vera_B):
                with layer.fake_mode:
                    shared[adapter_name] = torch.empty(shared[adapter_name].shape, device=layer.device)

    return Shared


def _leave_out_module_dropout(peft: Any, model: nn.Module) -> None:
    """Let LoKr's layers draw no number to decide whether they act: a simulation has no numbers to look at."""
    kind = peft.tuners.lokr.layer.Linear
    for part in model.modules():
        if type(part) is kind:
            # in place: peft's parameters, names and hooks stay
            part.__class__ = _undropped(peft)


@cache
def _undropped(peft: Any) -> type[nn.Module]:
    class LoKrLinear(peft.tuners.lokr.layer.Linear):  # type: ignore[misc]
        """peft's layer for a module dropout of zero."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Return (..., d_out) of (..., d_in)."""
            if self.disable_adapters or self.merged:
                found: Tensor = super().forward(x, *args, **kwargs)
                return found
            result: Tensor = self.base_layer(x, *args, **kwargs)
            added: Tensor = self._get_delta_activations("default", x)
            return (result + added).to(x.dtype)

    return LoKrLinear
