"""A scheme in a run of the ``Trainer`` of Lightning: package ``lightning`` or, without it, ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from actbench.errors import ConversionError, UsageError
from actbench.scheme import Scheme
from actbench.tools.trainers.session import MEASURE_EVERY, SchemeCallback, compiled

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment,unused-ignore]
    except ModuleNotFoundError as error:
        raise ImportError(
            "actbench.tools.trainers.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            "there; install one of them: pip install lightning"
        ) from error


class ActbenchCallback(SchemeCallback, Callback):
    """Converts a module when fitting begins, logs the bytes that this saves, and undoes it when fitting ends.

    ::

        trainer = Trainer(callbacks=[ActbenchCallback("actnn:L3")])
        trainer.fit(module, data)

    Parameters stay the same objects under the same ``state_dict`` keys: optimizers fit, checkpoints load into the plain
    module. Validation packs nothing. The checkpoint holds the learned state of the scheme, and a resume restores it.
    An exception or an interrupt also undoes the conversion.

    A scheme that wraps a forward, as ``gact`` does, needs a module whose forward the training step calls. By default it
    is the only child of the LightningModule with parameters, if this is no single layer; else the LightningModule
    itself, which ``training_step`` must then call as ``self(x)``. A first step without this call fails with the reason.

    Logged for each training step: ``actbench/activation_bytes``, ``actbench/exact_bytes`` and
    ``actbench/saved_bytes`` of the last measured forward pass, and on CUDA ``actbench/peak_bytes``, torch's peak in
    this process since fitting began.

    Args:
        scheme: A specification such as ``gact:L2``, or a scheme.
        module: Path of the module to convert, such as ``model`` for ``self.model``; empty for the whole.
        measure_every: Forward passes in training per measurement.
        sample_ids: The key or position in a batch of the index of each row in the data set, for schemes that remember
            single samples (``actnn:L3,use_gradient=true``).
        probe: Whether to compare the gradient of the second batch with the exact model's, which then needs its whole
            memory once; logged as ``actbench/gradient_error``, with a warning if it is large.

    Raises:
        SpecError: The specification is wrong.
        UsageError: ``measure_every`` is below 1.
    """

    def __init__(
        self,
        scheme: str | Scheme = "gact:L2",
        *,
        module: str | None = None,
        measure_every: int = MEASURE_EVERY,
        sample_ids: str | int | None = None,
        probe: bool = False,
    ) -> None:
        super().__init__(scheme, measure_every=measure_every, probe=probe)
        self._path, self._sample_ids = module, sample_ids
        self._adapted: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Convert the module, and restore the scheme's state from the checkpoint.

        Raises:
            UsageError: There is not a module of that path, or the checkpoint is of another scheme or model.
            ConversionError: The scheme cannot be applied to the module.
        """
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ConversionError(compiled(type(pl_module).__name__, self.scheme))
        self.begin(self._chosen(pl_module))
        self._go_on()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Tell the scheme which samples the batch holds."""
        if self._sample_ids is not None:
            self.name_samples(batch, self._sample_ids)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers, and check that the converted modules run."""
        if self.session is not None:
            self.session.check_ran()
        for name, number in self.numbers().items():
            pl_module.log(name, torch.tensor(number, dtype=torch.float64), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the scheme off."""
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the scheme off."""
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the scheme off, however fitting ended."""
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheme and its learned state, for Lightning's checkpoint."""
        return {} if self.session is None else {"scheme": self.scheme.spec, "adapted": self.session.adapted()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`; some strategies do so before fitting begins, others after."""
        self._adapted = state_dict.get("adapted")
        self._go_on()

    def _go_on(self) -> None:
        if self.session is not None and self._adapted is not None:
            self.session.adapt(self._adapted)
            self._adapted = None

    def _chosen(self, pl_module: LightningModule) -> nn.Module:
        if self._path is None:
            return _only_model(pl_module) or pl_module
        try:
            return pl_module.get_submodule(self._path)
        except AttributeError as error:
            raise UsageError(
                f"module={self._path!r}: {type(pl_module).__name__} has none; its children are "
                f"{', '.join(name for name, _ in pl_module.named_children()) or 'none'}"
            ) from error


def _only_model(pl_module: LightningModule) -> nn.Module | None:
    """Return the only child with parameters, if it has a forward and is no single layer; else None."""
    trained = [child for child in pl_module.children() if any(True for _ in child.parameters())]
    if len(trained) != 1 or not any(True for _ in trained[0].children()):
        return None
    return None if type(trained[0]).forward is nn.Module.forward else trained[0]
