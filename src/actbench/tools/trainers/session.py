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

from actbench import scheme as schemes
from actbench.errors import ConversionError, UsageError
from actbench.packing.forwardwrapper import ReboundForward, adapt, adapted_states
from actbench.packing.samplegradients import samples
from actbench.scheme import Scheme
from actbench.tools.convert.changes import noting
from actbench.tools.convert.gradienterrors import recorded, warning
from actbench.tools.convert.model import converted_in_place
from actbench.tools.trainers.probe import Probe
from actbench.tools.trainers.reading import Watch

MEASURE_EVERY = 100
"""Default number of forward passes in training per measurement."""


class WatchedForward(ReboundForward):
    """A forward that ``watch`` reads from time to time; a copy of the model has no watch."""

    def __init__(self, module: nn.Module, watch: Watch | None = None) -> None:
        super().__init__(module)
        self.watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, under the watch if it trains."""
        module = self.module
        if self.watch is None or not (module.training and torch.is_grad_enabled()):
            return self.inner(module, *args, **kwargs)
        return self.watch.run(module, self.inner, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "watch": None}


class ConvertedRun:
    """A model under a scheme until it is closed, and what its training steps save.

    The Parameter objects stay, so an optimizer made before still fits. ``autocast_dtype`` is the dtype of mixed
    precision if ``torch.autocast`` is not active around the forward. With ``probe`` the gradient of one batch is
    compared with the exact model's.

    Raises:
        ConversionError: The model is compiled or already converted, nothing in it can be converted, or the scheme
            changes more than a model. The model is then unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: Scheme,
        *,
        measure_every: int = MEASURE_EVERY,
        autocast_dtype: torch.dtype | None = None,
        probe: bool = False,
    ) -> None:
        refuse_compiled(model, scheme)
        if "parameters" in scheme.changes:
            raise ConversionError(
                f"{scheme.spec!r} changes the parameters, and a callback converts the model after the trainer has made "
                "its optimizer; convert it before you make the trainer, and leave the callback out: "
                f"model = actbench.convert(model, {scheme.spec!r})"
            )
        self.model, self._scheme = model, scheme
        with noting(model) as self._changes:
            self._conversion = converted_in_place(model, scheme)
            probing = Probe(self._changes.undone, scheme.spec) if probe else None
            self.watch = Watch(self._changes.undone, measure_every, autocast_dtype, probing)
            WatchedForward(model, self.watch).bind()
        self._ran: set[str] = set()
        self._waiting = self._wait_for_sites()

    def check_ran(self) -> None:
        """Note the end of a training step; after the first, a ConversionError if no converted module ran in it."""
        waited_for, self._waiting = self._waiting, []
        for _, hook in waited_for:
            hook.remove()
        if waited_for and not self._ran:
            raise ConversionError(
                f"nothing that {self._scheme.spec!r} works on runs in a training step: no forward of this "
                f"{type(self.model).__name__} is ever called, nor any converted layer in it; convert the module whose "
                "forward the step calls (Lightning: module=)"
            )
        if waited_for and not self.watch.passes:
            warnings.warn(
                f"saved bytes are not measured: the step calls layers of this {type(self.model).__name__}, and not its "
                "own forward; convert the module whose forward the step calls (Lightning: module=)",
                stacklevel=2,
            )

    def adapted(self) -> dict[str, Any]:
        """Return the learned state of the scheme; see :mod:`actbench.packing.forwardwrapper`."""
        return adapted_states(self.model)

    def adapt(self, states: dict[str, Any]) -> None:
        """Load a result of :meth:`adapted`; a UsageError if it is of another model or scheme."""
        try:
            adapt(self.model, states)
        except KeyError as error:
            raise UsageError(
                f"the checkpoint does not fit {self._scheme.spec!r} on this {type(self.model).__name__}: {error}; give "
                "the callback the scheme that the run began with"
            ) from error

    def close(self) -> None:
        """Take everything off the model; a second call does nothing.

        Raises:
            ConversionError: Another forward has since wrapped one of the scheme's; the rest is then off.
        """
        for _, hook in self._waiting:
            hook.remove()
        self._changes.undo()

    def _wait_for_sites(self) -> list[tuple[str, RemovableHandle]]:
        """Return the paths of the converted modules, each with the handle of a hook that notes when the module runs."""
        modules = dict(self.model.named_modules())
        paths = [site.path for site in self._conversion.sites if site.path in modules]
        if "" in paths:  # a wrapper of the model also acts if the step calls its parts
            paths = list(modules)
        return [(path, modules[path].register_forward_pre_hook(partial(_note, self._ran, path))) for path in paths]


def refuse_compiled(model: nn.Module, scheme: Scheme) -> None:
    """Raise a ConversionError if a model, or a part of it, is or will be compiled."""
    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConversionError(compiled(path or type(model).__name__, scheme))


def compiled(what: str, scheme: Scheme) -> str:
    """Return why a compiled model is refused, and what to do."""
    return (
        f"{what} is compiled by torch.compile, which decides what to save before the callback can convert or measure "
        f"the model; leave torch.compile out, or leave the callback out and convert before you compile, as in "
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

    def __init__(self, scheme: str | Scheme, *, measure_every: int = MEASURE_EVERY, probe: bool = False) -> None:
        if measure_every < 1:
            raise UsageError(f"measure_every={measure_every}: it is a number of passes; give 1 or more")
        self.scheme = schemes.build(scheme) if isinstance(scheme, str) else scheme
        self.session: ConvertedRun | None = None
        self._measure_every, self._probe = measure_every, probe
        self._named = ExitStack()

    def begin(self, model: nn.Module, autocast_dtype: torch.dtype | None = None) -> ConvertedRun:
        """Put the scheme on a model, after taking it off the model of an unfinished run.

        Raises:
            ConversionError: The scheme cannot be applied, or cannot be taken off.
        """
        self.close()
        self.session = ConvertedRun(
            model,
            self.scheme,
            measure_every=self._measure_every,
            autocast_dtype=autocast_dtype,
            probe=self._probe,
        )
        name = getattr(getattr(model, "config", None), "name_or_path", "")
        if not self._probe and (text := warning(self.scheme.spec, name, recorded(name, self.scheme.spec))):
            warnings.warn(text, stacklevel=3)
        self._finalizer = weakref.finalize(self, self.session.close)  # if close() is not called
        self._finalizer.atexit = False
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self.session

    def close(self) -> None:
        """Take the scheme off the model: no layer, forward, hook or mark of it stays.

        Raises:
            ConversionError: Another forward has since wrapped one of the scheme's. The rest of the scheme is then off;
                remove the wrapper, and close again.
        """
        self._named.close()
        if self.session is not None:
            self.session.close()
            self._finalizer.detach()
            self.session = None

    def numbers(self) -> dict[str, float]:
        """Return the numbers to log: those of the last measured pass, the gradient's error, torch's peak on CUDA."""
        if self.session is None or self.session.watch.last is None:
            return {}
        found: dict[str, float] = {**self.session.watch.last.logged()}
        probe = self.session.watch.probe
        if probe is not None and probe.error is not None:
            found["actbench/gradient_error"] = probe.error
        if torch.cuda.is_available():
            found["actbench/peak_bytes"] = torch.cuda.max_memory_allocated()
        return found

    def name_samples(self, batch: Any, key: str | int) -> None:
        """Tell the schemes which samples of the data set the current batch holds; see :func:`actbench.samples`.

        ``batch[key]`` are the indices, integers (N,). From another device they are copied to the host, which waits for
        the copy.

        Raises:
            UsageError: The batch has no such entry.
        """
        try:
            ids = batch[key]
        except (KeyError, IndexError, TypeError):
            held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(
                f"sample_ids={key!r}: the batch has no such entry ({held}); let the data set give the index of each "
                "sample under this key, and let the trainer keep it (transformers: remove_unused_columns=False)"
            ) from None
        self._named.close()
        self._named.enter_context(samples(ids.cpu() if isinstance(ids, Tensor) else ids))
