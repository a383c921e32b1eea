"""A scheme on a model for the length of a with-block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from actbench.errors import UsageError
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked import HookedForward
from actbench.scheme import Scheme
from actbench.tools.convert.model import converted_in_place


class Controller:
    """Packs what a model saves for backward in the user's own training loop, until it is closed.

    The model is converted when the controller is made. Closing the controller, or leaving its with-block, even by an
    exception, removes every forward, hook and mark of the scheme. Other changes of the model stay. ::

        with actbench.Controller(model, "gact:L2") as controller:
            for batch in batches:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                controller.iterate(lambda: loss_of(model, batch[:8]))

    Without :meth:`iterate` bits are allocated in the forward pass, as in a converted model: by the loss that the model
    returns, or by a random combination of its results.

    Args:
        model: The unconverted model; its parameters, flags and ``state_dict`` keys stay the same, except with ``lora``.
        scheme: As for :func:`actbench.convert`, but not one that stores parameters in fewer bits.

    Raises:
        SpecError: The specification is wrong.
        ConversionError: The scheme cannot be applied, or could not be removed, or the model is already converted or
            under a controller.
    """

    def __init__(self, model: nn.Module, scheme: str | Scheme = "gact:L2") -> None:
        self._model: nn.Module | None = model
        self._conversion = converted_in_place(model, scheme)
        bound = [forward for module in model.modules() for forward in ReboundForward.all_of(module)]
        hooked = [forward for forward in bound if isinstance(forward, HookedForward)]  # one for each part of a model
        self._probings = [(each, each.probing.restarted()) for each in hooked if each.probing is not None]
        self._entered = False

    def iterate(self, loss_of: Callable[[], Tensor]) -> None:
        """Count a training step, and at times allocate bits by the user's own loss.

        This happens at the first call and then every ``adapt_interval`` calls. After the first call the forward pass
        allocates no bits. A level of fixed bits allocates none. Gradients, running statistics and the states of random
        generators do not change.

        Args:
            loss_of: Runs the model, not a ``DistributedDataParallel`` around it, on a few samples and returns the loss,
                a scalar with its graph; no backward pass, no optimizer step. Called once when bits are allocated.

        Raises:
            UsageError: The controller is closed, or ``loss_of`` returns something else.
        """
        model = self._open_model()
        for hooked, _ in self._probings:
            hooked.probing = None
        for hooked, probing in self._probings:
            if probing.is_due():
                probing.allocate(hooked.hooks, model, lambda: _scalar(loss_of()))

    def close(self) -> None:
        """Take the scheme off the model; on a closed controller this does nothing.

        Raises:
            ConversionError: Another forward or module has since wrapped one of the scheme's. The rest of the scheme is
                then off; remove the wrapper, and close again.
        """
        self._conversion.undo()
        self._model = None

    def _open_model(self) -> nn.Module:
        if self._model is None:
            raise UsageError("this Controller is closed; make a new one, actbench.Controller(model, scheme)")
        return self._model

    def __enter__(self) -> Self:
        """Return the controller; a UsageError if it is closed, or was entered before."""
        self._open_model()
        if self._entered:
            raise UsageError(
                "this Controller was entered before, and would be closed by the inner block; enter it once"
            )
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scalar(loss: Tensor) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"a tensor of shape {list(loss.shape)} without a graph" if isinstance(loss, Tensor) else repr(type(loss))
    raise UsageError(f"iterate() needs a function that returns the loss, a scalar with its graph; it returned {found}")
