"""A scheme on the models of a running script: applied when the first step has ended, so that all is known of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, MeasurementError
from actbench.model.measured import Measurement
from actbench.scheme import Scheme
from actbench.scheme.facets import Needs
from actbench.scheme.setup import MakeOptimizer, TrainingSetup


def trained(
    roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield each model with trained parameters, and the places of the optimizers that train them."""
    for root in roots:
        own = {id(parameter) for parameter in root.parameters() if parameter.requires_grad}
        if places := [place for place, each in enumerate(optimizers) if own & _parameters(each)]:
            yield root, places


def refused(
    specs: Iterable[str], roots: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer], *, are_fake: bool
) -> tuple[str, ...]:
    """Return the schemes that cannot be applied to what a script trains.

    Each is applied to fake models, in a process of its own, so that the script's models stay as they are. Those of real
    models are asked whether they refuse them, as far as they can tell without changing anything.
    """
    can = _can_be_applied if are_fake else _is_wanted
    return tuple(spec for spec in dict.fromkeys(specs) if not can(spec, roots, optimizers))


def _is_wanted(spec: str, roots: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
    models = [root for root, _ in trained(roots, optimizers)]
    needs = schemes.build(spec).facet(Needs)
    try:
        for model in models:
            if needs is not None:
                needs.check(model)
    except ConversionError:
        return False
    return bool(models)


_PATIENCE = 60
"""Seconds after which a scheme that is tried has hung: a thread of the script may hold a lock for ever in a fork."""


def _copied(run: Callable[[], object]) -> int:
    """Run a function in a copy of this process, and return the number of the copy, whose status is 1 for an error."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # for others of its pool, which are not in a copy, torch would wait for ever
        run()
        status = 0
    finally:
        os._exit(status)  # nothing of the script's may run in it


def _can_be_applied(spec: str, roots: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
    def apply() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE)
        with open(os.devnull, "w") as nowhere:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
        Applied(schemes.build(spec)).apply(roots, optimizers)

    return os.waitstatus_to_exitcode(os.waitpid(_copied(apply), 0)[1]) == 0


class Snapshot:
    """A copy of this process in which schemes are tried on what a script trains, whatever becomes of it here.

    The copy waits for :meth:`refused`, and ends with the answer or with this process.
    """

    def __init__(self, roots: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        asked, self._ask = os.pipe()
        self._answer, answered = os.pipe()

        def answer() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.close(self._ask)  # else it would wait for itself
            with open(asked) as question, open(answered, "w") as answer:
                if text := question.readline():  # not to its end, which workers of the script may hold open
                    json.dump(refused(json.loads(text), roots, optimizers, are_fake=True), answer)

        self._child = _copied(answer)
        os.close(asked)
        os.close(answered)

    def refused(self, specs: Iterable[str]) -> tuple[str, ...]:
        """Return the schemes that cannot be applied to what the script trained when the copy was made; ask once."""
        with open(self._ask, "w") as question:
            print(json.dumps(list(specs)), file=question)
        with open(self._answer) as answer:
            found = json.load(answer)
        os.waitpid(self._child, 0)
        return tuple(found)


class Applied:
    """A scheme that is applied to what a script trains; the next step is the first with it.

    Attributes:
        setups: The changed setup of each model.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self.setups: list[TrainingSetup] = []

    @property
    def keeps_state(self) -> bool:
        """Whether optimizers have their state when the first step with the scheme begins."""
        return not {"optimizer", "parameters"} & set(self._scheme.changes)

    def apply(self, roots: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Change the models that the optimizers train; an optimizer in the list is replaced by what steps for it.

        Raises:
            ConversionError: The scheme cannot be applied to a model, or needs another module in its place.
        """
        for root, places in trained(roots, optimizers):
            self._apply_to(root, optimizers, places)
        if not self.setups:
            raise ConversionError(
                f"{self._scheme.spec}: no optimizer of the script trains a parameter of a model that ran"
            )

    def with_changes(self, found: Measurement, steps: int) -> Measurement:
        """Return a measurement with what the scheme changed, and its warnings.

        Raises:
            MeasurementError: The script ended before it made a step with the scheme.
            IdleError: Real steps showed that the scheme does nothing.
        """
        if steps < 2:
            raise MeasurementError("the script ended after its first step, and a scheme is applied from the second on")
        warnings = [text for setup in self.setups for text in setup.warnings]
        after = [text for setup in self.setups for part in setup.parts for text in part.after()]
        return found.model_copy(
            update={
                "sites": tuple(site for setup in self.setups for site in setup.sites),
                "unreached": tuple(left for setup in self.setups for left in setup.unreached),
                "warnings": (*found.warnings, *dict.fromkeys(warnings), *after),
            }
        )

    def _apply_to(self, root: nn.Module, optimizers: list[torch.optim.Optimizer], places: list[int]) -> None:
        replaces = not self.keeps_state
        if replaces and len(places) > 1:
            kinds = " and ".join(type(optimizers[place]).__name__ for place in places)
            raise ConversionError(f"{self._scheme.spec} changes what one optimizer steps, and {kinds} step this model")
        own = optimizers[places[0]]
        changed = self._scheme.apply(TrainingSetup(root, make_optimizer=_given(own) if replaces else None))
        if changed.module is not root:
            raise ConversionError(
                f"{self._scheme.spec} puts another module around {type(root).__name__}, and the script holds the old "
                "one: convert the model in the script, by actbench.convert"
            )
        self.setups.append(changed)
        for parameter in root.parameters():
            parameter.grad = None
        if replaces and changed.make_optimizer is not None:
            optimizers[places[0]] = _stepping_for(own, changed.make_optimizer(root))


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _given(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """Return what makes the script's own optimizer again: of what is trained now, without state.

    It is another object with the same attributes, groups and state, because a scheme's optimizer may step it, and the
    script's own is about to step that of the scheme.
    """

    def make(module: nn.Module) -> torch.optim.Optimizer:
        known = _parameters(optimizer)
        trained = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
        for group in optimizer.param_groups:
            group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in trained]
            group.pop("initial_lr", None)  # a scheduler goes on with the groups of what steps from now on
        optimizer.param_groups[0]["params"] += [trained[key] for key in trained.keys() - known]
        vars(optimizer).pop("step", None)  # of a scheduler, which counts steps
        optimizer.state.clear()
        again = object.__new__(type(optimizer))
        vars(again).update(vars(optimizer))
        return again

    return make


def _stepping_for(own: torch.optim.Optimizer, new: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let another optimizer step where the script steps its own, and return it."""
    vars(own).update(step=new.step, zero_grad=new.zero_grad, param_groups=new.param_groups, state=new.state)
    return new
