"""The trainers of transformers and of Lightning in a whole run that is cut short.

They evaluate and save as soon as steps repeat; a Trainer goes on at the steps that its callbacks name, as where a layer
is unfrozen; and the first that has saved resumes once from its checkpoint, as a later process would.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from actbench.errors import is_users
from actbench.tools.script.libraries.importpatches import Change, changed

FEWEST = 6
"""Steps before an epoch is cut: callbacks change a model after a few."""

LATER = 2
"""Steps of an epoch after the first, and after evaluations and saves."""

_PREDICTED = ("predictions", "label_ids")

_MOST_REPEATED_BYTES = 2**26
"""The largest array of predictions that is made at full length; larger ones hold a few batches."""

_NAMED = 8
"""Most steps that callbacks name and that are gone to."""


class Trainers:
    """Shortens what trainers do.

    Args:
        is_settled: Returns whether enough steps have run for what comes after them.
        is_late: Returns whether a trainer should end.
        optimizers: Returns the optimizers that have stepped.
        note: Receives sentences about what is done in another way.

    Attributes:
        is_going_on: Whether a Trainer is to go on with its epoch, to a step that a callback names.
    """

    def __init__(
        self,
        is_settled: Callable[[], bool],
        is_late: Callable[[], bool],
        optimizers: Callable[[], Sequence[Optimizer]],
        note: Callable[[str], None],
    ) -> None:
        self._is_settled, self._is_late, self._optimizers, self._note = is_settled, is_late, optimizers, note
        self._has_resumed = False
        self.is_going_on = False

    def changes(self) -> dict[str, Sequence[Change]]:
        """Return the changes of modules by their names."""
        lightning = (lambda module: changed(module.Trainer, "__init__", _brief), self._fitting)
        return {
            "transformers.trainer": (
                lambda module: changed(module.Trainer, "evaluation_loop", completed),
                self._forwarded,
                self._training,
            ),
            **{f"{package}.trainer.trainer": lightning for package in ("lightning.pytorch", "pytorch_lightning")},
        }

    def _forwarded(self, module: ModuleType) -> AbstractContextManager[object]:
        """Let a Trainer evaluate and save as soon as steps repeat, and then end its epoch, or itself if time is up."""
        trainers = self

        class Forward(module.TrainerCallback):  # type: ignore[misc, name-defined]
            def __init__(self, others: Iterable[object]) -> None:
                self.others = others
                self.settled = self.saved = 0
                self.named: list[int] = []

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.saved = state.global_step

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if trainers._is_settled():
                    trainers._go_on(self, args, state, control)

        def init(own: Callable[..., None]) -> Callable[..., None]:
            def make(trainer: Any, *args: Any, **kwargs: Any) -> None:
                own(trainer, *args, **kwargs)
                callbacks = trainer.callback_handler.callbacks
                if not any(type(each).__name__ == "Forward" for each in callbacks):
                    trainer.add_callback(Forward(callbacks))

            return make

        return changed(module.Trainer, "__init__", init)

    def _go_on(self, forward: Any, args: Any, state: Any, control: Any) -> None:
        """Let a Trainer, whose first steps have run, do what comes next."""
        if not forward.settled:
            forward.settled = state.global_step
            control.should_evaluate = args.eval_strategy != "no"
            control.should_save = args.save_strategy != "no"
            first = forward.settled + LATER + 1  # those before it run anyway
            forward.named = [each for each in named_steps(forward.others) if first <= each <= state.max_steps][:_NAMED]
            self.is_going_on = bool(forward.named)
        elif state.global_step < forward.settled + LATER:
            return
        elif forward.named and not self._is_late():
            forward.settled = forward.named.pop(0)
            state.global_step = forward.settled - 1
            self._note(f"the Trainer went on at step {forward.settled:,}, which a callback of it names")
        else:
            self.is_going_on = False
            control.should_epoch_stop = True
            control.should_training_stop = self._is_late()

    def _training(self, module: ModuleType) -> AbstractContextManager[object]:
        """Let the first Trainer that has trained and saved resume once from its checkpoint."""

        def training(own: Callable[..., Any]) -> Callable[..., Any]:
            def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
                result = own(trainer, resume_from_checkpoint, *args, **kwargs)
                followed = trainer.callback_handler.callbacks  # of which a script may have removed ours
                saved = max((each.saved for each in followed if type(each).__name__ == "Forward"), default=0)
                if not self._has_resumed and not resume_from_checkpoint and saved:
                    name, asked = f"{module.PREFIX_CHECKPOINT_DIR}-{saved}", trainer.args
                    place = os.path.join(asked.output_dir, name)
                    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
                    if asked.save_only_model or is_sharded or self._is_late():
                        self._note(f"no resume from {name} was tried; what it needs is not in the figures")
                    else:
                        self._resume(trainer.model, name, lambda: own(trainer, place))
                self._has_resumed = True
                return result

            return train

        return changed(module.Trainer, "train", training)

    def _fitting(self, module: ModuleType) -> AbstractContextManager[object]:
        """Let the first Trainer of Lightning that has trained and saved resume once, for one more epoch."""

        def fitting(own: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(own)

            def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                result = own(trainer, *args, **kwargs)
                asked = signature.bind(trainer, *args, **kwargs).arguments
                saving = trainer.checkpoint_callback
                saved = saving and (saving.last_model_path or saving.best_model_path)
                if saved and not self._has_resumed and asked.get("ckpt_path") is None and not self._is_late():
                    most = trainer.fit_loop.max_epochs
                    if most is not None and most >= 0:
                        trainer.fit_loop.max_epochs = most + 1
                    again = {name: value for name, value in asked.items() if name not in ("self", "ckpt_path")}
                    self._resume(
                        asked["model"], os.path.basename(saved), lambda: own(trainer, **again, ckpt_path=saved)
                    )
                self._has_resumed = True
                return result

            return fit

        return changed(module.Trainer, "fit", fitting)

    def _resume(self, model: Any, checkpoint: str, train: Callable[[], object]) -> None:
        """Let a trainer train on from a checkpoint that it saved, as it would in a new process."""
        model.zero_grad(set_to_none=True)
        for optimizer in self._optimizers():
            optimizer.state.clear()
        try:
            train()
        except Exception as error:
            self._note(f"the resume from {checkpoint} ended with {type(error).__name__}: {error}")
        else:
            self._note(f"the Trainer resumed once from its {checkpoint}, as a later process would")


def named_steps(callbacks: Iterable[object]) -> list[int]:
    """Return the whole numbers that the user's callbacks hold, or that stand in what they do at a step, in order.

    Some of them are steps at which a callback does something; at any other, one more step runs in vain.
    """
    found = set[object]()
    for each in callbacks:
        kind = type(each)
        functions = [getattr(kind, name, None) for name in ("on_step_begin", "on_step_end")]
        codes = [code for function in functions if (code := getattr(function, "__code__", None))]
        if any(is_users(code.co_filename) for code in codes):
            found.update(vars(each).values() if hasattr(each, "__dict__") else ())
            found.update(constant for code in codes for constant in code.co_consts)
    return sorted(number for number in found if isinstance(number, int) and not isinstance(number, bool))


def completed(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a Trainer's evaluation return as many predictions as it has samples: scripts compare them with these."""

    def loop(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        rows = output.num_samples or 0

        def repeated(found: Any) -> Any:
            is_short = isinstance(found, np.ndarray) and found.ndim and 0 < len(found) < rows
            if not is_short or rows * found[0].nbytes > _MOST_REPEATED_BYTES:
                return found
            return np.resize(found, (rows, *found.shape[1:]))

        return output._replace(**{name: tree_map(repeated, getattr(output, name)) for name in _PREDICTED})

    return loop


def _brief(own: Callable[..., None]) -> Callable[..., None]:
    """Let Lightning's epochs have a few steps and then a validation."""

    def make(trainer: Any, *args: Any, **kwargs: Any) -> None:
        steps = FEWEST * int(kwargs.get("accumulate_grad_batches") or 1)
        asked = kwargs.get("limit_train_batches")
        limit = min(asked, steps) if isinstance(asked, int) else steps
        own(trainer, *args, **{**kwargs, "limit_train_batches": limit, "val_check_interval": 1.0})

    return make
