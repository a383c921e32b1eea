"""A scheme on the model of a training run, from the first step to the last."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.hooks import RemovableHandle

from actbench import schemes
from actbench.conversion.changes import noting
from actbench.conversion.model import converted_in_place
from actbench.conversion.trainers.reading import Watch
from actbench.errors import ConversionError, UsageError
from actbench.nn.forwardwrapper import ReboundForward, adapt, adapted_states
from actbench.nn.saved.samplegradients import samples
from actbench.schemes import Scheme

MEASURE_EVERY = 100
"""Forward passes in training from one that is measured to the next, unless said otherwise."""


class WatchedForward(ReboundForward):
    """A forward that ``watch`` reads from time to time; a copy of the model has none."""

    def __init__(self, module: nn.Module, watch: Watch | None = None) -> None:
        super().__init__(module)
        self.watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, in training under the watch."""
        module = self.module
        if self.watch is None or not (module.training and torch.is_grad_enabled()):
            return self.inner(module, *args, **kwargs)
        return self.watch.run(module, self.inner, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "watch": None}


class ConvertedRun:
    """A model under a scheme until it is closed, and what its training steps save.

    The Parameter objects, and with them an optimizer that was made before, stay. ``autocast_dtype`` is the type of
    mixed precision where the forward does not run under ``torch.autocast`` from outside.

    Raises:
        ConversionError: The model is compiled or was converted, nothing in it can be converted, or the scheme changes
            more than a model. It is as it was then.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        *,
        measure_every: int = MEASURE_EVERY,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_compiled(model, scheme)
        _refuse_other_parameters(scheme)
        self.model, self._scheme = model, scheme
        with noting(model) as self._changes:
            self._conversion = converted_in_place(model, scheme)
            self.watch = Watch(self._changes.undone, measure_every, autocast_dtype)
            WatchedForward(model, self.watch).bind()
        self._ran: set[str] = set()
        self._waiting = self._wait_for_sites()

    def check_ran(self) -> None:
        """Note that a training step is over; the first one tells whether what was converted runs in it.

        Raises:
            ConversionError: It does not.
        """
        waited_for, self._waiting = self._waiting, []
        for _, hook in waited_for:
            hook.remove()
        if waited_for and not self._ran:
            raise ConversionError(
                f"nothing that {self._scheme.spec!r} works on runs in a training step: no forward of this "
                f"{type(self.model).__name__} is ever called, or no layer that was converted in it is; convert the "
                "module whose forward the step calls (Lightning: module=)"
            )
        if waited_for and not self.watch.passes:
            warnings.warn(
                f"what is kept is not measured: the step calls layers of this {type(self.model).__name__}, and not its "
                "own forward; convert the module whose forward the step calls (Lightning: module=)",
                stacklevel=2,
            )

    def adapted(self) -> dict[str, Any]:
        """Return what the scheme has learned; see :mod:`actbench.nn.forwardwrapper`."""
        return adapted_states(self.model)

    def adapt(self, states: dict[str, Any]) -> None:
        """Go on from what :meth:`adapted` returned; a UsageError if it is of another model or scheme."""
        try:
            adapt(self.model, states)
        except KeyError as error:
            raise UsageError(
                f"the checkpoint does not fit {self._scheme.spec!r} on this {type(self.model).__name__}: {error}; give "
                "the callback the scheme that the run began with"
            ) from error

    def close(self) -> None:
        """Take everything off the model; a second time there is nothing to take off.

        Raises:
            ConversionError: Another forward was bound in front of one of the scheme's since; all else is off then.
        """
        for _, hook in self._waiting:
            hook.remove()
        self._changes.undo()

    def _wait_for_sites(self) -> list[tuple[str, RemovableHandle]]:
        """Return the paths of the converted modules, each with a hook that notes that the module runs."""
        modules = dict(self.model.named_modules())
        paths = [site.path for site in self._conversion.sites if site.path in modules]
        if "" in paths:  # what stands around the model stands around its parts, where the step calls these
            paths = list(modules)
        return [(path, modules[path].register_forward_pre_hook(partial(_note, self._ran, path))) for path in paths]


def refuse_compiled(model: nn.Module, scheme: Scheme) -> None:
    """Raise a ConversionError if a model, or a part of it, is or will be compiled."""
    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConversionError(compiled(path or type(model).__name__, scheme))


def _refuse_other_parameters(scheme: Scheme) -> None:
    if "parameters" in scheme.changes:
        raise ConversionError(
            f"{scheme.spec!r} changes the parameters, and the trainer has made its optimizer when a callback converts "
            "the model; convert it before you make the trainer, and leave the callback out: "
            f"model = actbench.convert(model, {scheme.spec!r})"
        )


def compiled(what: str, scheme: Scheme) -> str:
    """Return why a compiled model is refused, and what to do."""
    return (
        f"{what} is compiled by torch.compile, and what a compiled model keeps is decided before the callback can "
        f"convert or measure it; leave torch.compile out, or the callback: convert first and compile then, as "
        f"torch.compile(actbench.convert(model, {scheme.spec!r})), which fewbit and randomized allow"
    )


def _note(ran: set[str], path: str, *_: Any) -> None:
    ran.add(path)


class SchemeCallback:
    """Holds the scheme and, during training, the session of a run.

    Raises:
        SpecError: The specification is wrong.
        UsageError: ``measure_every`` is below 1.
    """

    def __init__(self, scheme: str | Scheme, *, measure_every: int = MEASURE_EVERY) -> None:
        if measure_every < 1:
            raise UsageError(f"measure_every={measure_every}: passes from one that is measured to the next, 1 or more")
        self.scheme = schemes.build(scheme) if isinstance(scheme, str) else scheme
        self.session: ConvertedRun | None = None
        self._measure_every = measure_every
        self._named = ExitStack()

    def begin(self, model: nn.Module, autocast_dtype: torch.dtype | None = None) -> ConvertedRun:
        """Put the scheme on a model, after taking it off that of an unfinished run.

        Raises:
            ConversionError: The scheme cannot be applied, or not be taken off.
        """
        self.close()
        self.session = ConvertedRun(
            model, self.scheme, measure_every=self._measure_every, autocast_dtype=autocast_dtype
        )
        self._finalizer = weakref.finalize(self, self.session.close)  # where nobody closes this: with the trainer
        self._finalizer.atexit = False
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self.session

    def close(self) -> None:
        """Take the scheme off the model: no layer, forward, hook or mark of it stays.

        Raises:
            ConversionError: Another forward was bound in front of one of the scheme's since. All the others are off
                then; take that one off, and close again.
        """
        self._named.close()
        if self.session is not None:
            self.session.close()
            self._finalizer.detach()
            self.session = None

    def numbers(self) -> dict[str, int]:
        """Return what is to be logged: the last measured pass, and torch's peak on CUDA."""
        if self.session is None or self.session.watch.last is None:
            return {}
        found = self.session.watch.last.logged()
        if torch.cuda.is_available():
            found["actbench/peak_bytes"] = torch.cuda.max_memory_allocated()
        return found

    def name_samples(self, batch: Any, key: str | int) -> None:
        """Tell the schemes which samples of the data set a batch holds, until the next; see :func:`actbench.samples`.

        ``batch[key]`` are the indices, integers (N,); from another device they are copied to the host, which waits for
        it.

        Raises:
            UsageError: The batch has no such entry.
        """
        try:
            ids = batch[key]
        except (KeyError, IndexError, TypeError):
            held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(
                f"sample_ids={key!r}: the batch has no such entry ({held}); let the data set give the index of each "
                "sample under it, and the trainer keep it (transformers: remove_unused_columns=False)"
            ) from None
        self._named.close()
        self._named.enter_context(samples(ids.cpu() if isinstance(ids, Tensor) else ids))
