"""A scheme in a run of the Hugging Face ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from actbench.errors import ConversionError
from actbench.scheme import Scheme
from actbench.tools.trainers.session import MEASURE_EVERY, SchemeCallback, compiled


class ActbenchCallback(SchemeCallback, TrainerCallback):
    """Converts the model when training begins, logs the bytes that this saves, and undoes it when training ends.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[ActbenchCallback("gact:L2")])
        trainer.train()

    Parameters stay the same objects under the same ``state_dict`` keys: the optimizer fits, checkpoints load into the
    plain model, ``resume_from_checkpoint`` works. Evaluation packs nothing. After a resume bits are allocated again.

    ``Trainer`` does not tell its callbacks of an exception. Inside ``with callback.on(trainer):`` an exception undoes
    the conversion; otherwise :meth:`close`, the next ``train()``, or the end of trainer and callback does.

    Logged with each training loss, in ``log_history`` and on the console: ``actbench/activation_bytes``,
    ``actbench/exact_bytes`` and ``actbench/saved_bytes`` of the last measured forward pass, and on CUDA
    ``actbench/peak_bytes``, torch's peak in this process since training began. ``Trainer`` calls its reporters, such as
    TensorBoard's, before the user's callbacks; use :meth:`on` so that reporters see the numbers.

    Args:
        scheme: A specification such as ``gact:L2``, or a scheme.
        measure_every: Forward passes in training per measurement.
        sample_ids: The key of a batch with the index of each row in the data set, for schemes that remember single
            samples (``actnn:L3,use_gradient=true``). It is removed before the model is called, and needs
            ``TrainingArguments(remove_unused_columns=False)``.
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
        measure_every: int = MEASURE_EVERY,
        sample_ids: str | None = None,
        probe: bool = False,
    ) -> None:
        super().__init__(scheme, measure_every=measure_every, probe=probe)
        self._sample_ids = sample_ids
        self._naming = ExitStack()

    @contextmanager
    def on(self, trainer: Trainer) -> Iterator[Self]:
        """Add this callback to a trainer inside a with-block, in front of all others; take the scheme off at its end.

        Reporters run after this callback, so they see its numbers. ::

            with ActbenchCallback("gact:L2").on(trainer):
                trainer.train()
        """
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        try:
            yield self
        finally:
            handler.callbacks = [callback for callback in handler.callbacks if callback is not self]
            self.close()

    def close(self) -> None:
        """Take the scheme off the model; see :meth:`SchemeCallback.close`."""
        self._naming.close()
        super().close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Convert the model; a ConversionError if the scheme cannot be applied to it."""
        if args.torch_compile:
            raise ConversionError(compiled("with torch_compile=True the model", self.scheme))
        model: nn.Module = given["model"]
        # Accelerate puts this autocast around the model's own forward
        self.begin(model, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
        if self._sample_ids is not None:
            hook = model.register_forward_pre_hook(self._name_samples, with_kwargs=True)
            self._naming.callback(hook.remove)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that the converted modules run."""
        if self.session is not None:
            self.session.check_ran()

    on_step_end = on_substep_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add the numbers to the logs of a training loss."""
        logs: dict[str, float] = given["logs"]
        if "loss" in logs:
            logs.update(self.numbers())
            state.log_history[-1].update(self.numbers())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Take the scheme off."""
        self.close()

    def _name_samples(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        key = self._sample_ids
        if key is not None and module.training and torch.is_grad_enabled():
            self.name_samples(kwargs, key)
        return args, {name: value for name, value in kwargs.items() if name != key}
