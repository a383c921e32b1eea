"""An optimizer whose state and step are in host memory, for parameters on a device (Ren et al., arXiv 2101.06840)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils._pytree import tree_leaves, tree_map_only

from actbench.errors import ConversionError
from actbench.ops import hostmemory
from actbench.ops.hostmemory import is_elsewhere, to_host
from actbench.scheme.wrapped import called

_HOW_IT_COMPUTES = ("params", "foreach")  # the latter torch, and a meter, choose by where parameters are


class HostOptimizer(optim.Optimizer):
    """Steps copies of the parameters in host memory by an optimizer of torch's, and writes the parameters.

    Each step copies the gradients to the host and the parameters back. A parameter that other code has written since is
    copied to the host too, unless it was written through ``.data``, which torch does not count. A parameter in host
    memory is stepped in place. This optimizer and the replaced one load each other's saved states.

    Args:
        inner: An optimizer of the parameters; it is taken over, with its state.
    """

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.state.update(inner.state)
        self.inner = inner
        self._twins: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step; return what the closure does."""
        loss = called(closure)
        self._follow_groups()
        stepped = {parameter: twin for parameter, twin in self._twins.items() if parameter.grad is not None}
        away = [(parameter, twin) for parameter, twin in stepped.items() if twin is not parameter]
        try:
            for parameter, twin in away:
                if parameter._version != self._versions[parameter]:
                    twin.copy_(parameter, non_blocking=True)
                assert parameter.grad is not None
                twin.grad = to_host(parameter.grad)
            _wait_for([parameter for parameter, _ in away])
            self.inner.step()
        finally:
            for _, twin in away:
                twin.grad = None
        for parameter, twin in away:
            parameter.copy_(twin, non_blocking=True)
            self._versions[parameter] = parameter._version
        self._show_state(stepped)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in host memory, in the form of the replaced optimizer's."""
        self._follow_groups()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of the replaced one, into host memory."""
        self._follow_groups()
        self.inner.load_state_dict(state_dict)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key not in _HOW_IT_COMPUTES})
        self._show_state(self._twins)

    def _follow_groups(self) -> None:
        """Give the inner optimizer the groups and options that this has now."""
        groups = self.inner.param_groups
        for index, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key not in _HOW_IT_COMPUTES}
            options["params"] = [self._twin(parameter) for parameter in group["params"]]
            if index < len(groups):
                groups[index].update(options)
            else:
                self.inner.add_param_group(options)

    def _twin(self, parameter: Tensor) -> Tensor:
        if parameter not in self._twins:
            if hasattr(parameter, "__tensor_flatten__"):
                raise ConversionError(
                    f"optimizer_offload: a parameter is a {type(parameter).__name__}, as in FSDP2, which has "
                    "an offload of its own: fully_shard(..., offload_policy=CPUOffloadPolicy())"
                )
            away = is_elsewhere(parameter)
            self._twins[parameter] = to_host(parameter.detach()).requires_grad_() if away else parameter
            self._versions[parameter] = parameter._version
            if away and parameter in self.inner.state:
                state = self.inner.state.pop(parameter)
                self.inner.state[self._twins[parameter]] = tree_map_only(Tensor, to_host, state)
                self._show_state({parameter: self._twins[parameter]})
            _wait_for([parameter])
        return self._twins[parameter]

    def _show_state(self, twins: Mapping[Tensor, Tensor]) -> None:
        """Let the state be seen by parameter, as that of any optimizer."""
        for parameter, twin in twins.items():
            if twin in self.inner.state:
                self.state[parameter] = self.inner.state[twin]
            if twin is not parameter:
                for leaf in tree_leaves(self.state.get(parameter, {})):
                    if isinstance(leaf, Tensor):
                        hostmemory.NOTED.add(leaf.untyped_storage())


def _wait_for(parameters: Iterable[Tensor]) -> None:
    """Wait until the copies of CUDA parameters to host memory are there."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.synchronize(device)
