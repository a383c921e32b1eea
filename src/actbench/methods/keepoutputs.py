from __future__ import annotations

from typing import Any, ClassVar, Final

from torch import nn

from actbench.errors import NothingToConvertError
from actbench.model.records import Site
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup

_KEPT: Final = "_actbench_outputs"


class KeepOutputs(Scheme):
    """The loop keeps the model's outputs in a variable, as ``outputs = model(**batch)`` does, until it gets the next.

    Kept from the forward pass of one step to the end of that of the next: what the model returns, such as logits, which
    are otherwise freed as soon as nothing saves them. At the end of a forward pass those of two steps are alive. Loss,
    gradients and updates are those without the scheme, which saves nothing: it says what such a loop needs.
    """

    name: ClassVar[str] = "keep_outputs"
    card: ClassVar[Card] = Card(
        summary="the loop keeps the model's outputs, such as logits, until the next forward pass (saves nothing)",
        rank=56,
    )
    changes: ClassVar[tuple[Change, ...]] = ()
    claims: ClassVar[tuple[str, ...]] = ("keep the outputs of the model",)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Keep what the model returned last, in an attribute.

        Raises:
            NothingToConvertError: The module trains nothing, so that no loop runs it.
        """
        if not any(parameter.requires_grad for parameter in setup.module.parameters()):
            raise NothingToConvertError(f"{self.name}: {type(setup.module).__name__} trains nothing")
        setup.module.register_forward_hook(_keep)
        return setup.changed(setup.module, (Site(path="(outputs)", was="freed", becomes="kept to the next pass"),))


def _keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
    vars(module)[_KEPT] = outputs
