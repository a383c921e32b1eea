"""What a model is under a scheme, and after it: keys, parameters, undo, folders."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import actbench
from actbench.errors import ConversionError
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.testing.subject import Subject, flat, gradients, loss_of


def keys(subject: Subject) -> None:
    """Check that a checkpoint of the changed model is one of the plain model, and the other way round."""
    setup = subject.plain()
    setup.module.train()
    first = next(iter(setup.module.children()), setup.module).eval()
    frozen = next(setup.module.parameters()).requires_grad_(False)
    before, parameters = list(setup.module.state_dict()), dict(setup.module.named_parameters())
    trains = {name for name, part in setup.module.named_modules() if part.training}
    changed = subject.scheme.apply(setup).module
    if not subject.trains_others:
        after = list(changed.state_dict())
        lost, new = [key for key in before if key not in after], [key for key in after if key not in before]
        if after != before:
            raise AssertionError(
                f"keys of the state_dict change: {len(lost)} go ({lost[:2]}), {len(new)} come ({new[:2]})"
            )
        for name, parameter in changed.named_parameters():
            if parameter is not parameters[name]:
                raise AssertionError(f"the parameter {name} is another object than before")
        if frozen.requires_grad:
            raise AssertionError("a frozen parameter is trained")
    modules = dict(changed.named_modules())
    flags = [name for name in trains if name in modules and not modules[name].training]
    if flags:
        raise AssertionError(f"modules that trained do not: {flags[:2]}")
    thawed = [type(part).__name__ for part in first.modules() if part.training]
    if thawed:
        raise AssertionError(f"modules in evaluation mode train: {thawed[:2]}")


def converting_twice(subject: Subject) -> None:
    """Check that a changed model is not changed again, which would pack what is packed."""
    if not subject.is_of_model:
        return
    applied = subject.changed()
    _refused("scheme.apply", lambda: subject.scheme.apply(applied))
    converted = actbench.convert(subject.plain().module, subject.scheme)
    _refused("actbench.convert", lambda: actbench.convert(converted, subject.scheme))


def _refused(what: str, again: Callable[[], object]) -> None:
    try:
        again()
    except ConversionError:
        return
    raise AssertionError(f"{what} takes a model that the scheme has changed; raise a ConversionError")


def undo(subject: Subject) -> None:
    """Check that a model is what it was, with the gradients of the plain model, after a step under the scheme."""
    if not subject.is_of_model:
        return
    setup, plain = subject.plain(), subject.plain()
    before = _standing_on(setup.module)
    converted = actbench.convert(setup.module, subject.scheme)
    _step(converted, setup, subject.batch)
    conversion = actbench.conversion_of(converted)
    try:
        back = converted if conversion is None else conversion.undo()
    except ConversionError as error:
        if subject.trains_others:  # values of parameters are lost, and the refusal says so
            return
        raise AssertionError(f"it cannot be undone: {error}") from error
    back.zero_grad()
    after = _standing_on(back)
    left = [path for path in before if before[path] != after.get(path)]
    if back is not setup.module:
        raise AssertionError("undo returns another model than the one that was converted")
    if left:
        differing = _differing(before[left[0]], after.get(left[0], {}))
        raise AssertionError(f"{len(left)} modules are not what they were, such as {left[0]!r}: {differing}")
    plain.module.load_state_dict(back.state_dict())
    found, exact = (gradients(each, subject.batch) for each in (setup, plain))
    if not torch.equal(flat(found), flat(exact)):
        raise AssertionError("after undo, the gradients are not those of the plain model")


def _step(model: nn.Module, setup: TrainingSetup, batch: Batch) -> None:
    """Train a model by one step of plain SGD, so that the weights are others than before."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replace(setup, module=model).forward(batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _standing_on(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the classes, attributes, children and hooks of modules by path."""
    found = {}
    for path, module in model.named_modules():
        own = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        trains = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        found[path] = {"class": type(module), "requires_grad": trains, **own}
    return found


def _differing(was: dict[str, Any], found: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name in {*was, *found} if was.get(name) != found.get(name)))


def folder(subject: Subject) -> None:
    """Check that a folder of the converted model is loaded as what was saved."""
    if not subject.is_of_model or subject.trains_others:
        return
    setup = subject.plain()
    model = actbench.convert(setup.module, subject.scheme)
    twin = copy.deepcopy(subject.plain().module)
    with tempfile.TemporaryDirectory() as place:
        path = actbench.save_converted(model, Path(place) / "model", built_from=subject.case)
        own = type(twin).__module__.startswith("transformers")
        back = actbench.load_converted(path, model=None if own else twin, trust_remote_code=True)
    was, found = (actbench.conversion_of(each) for each in (model, back))
    assert was is not None
    if not (found is not None and found.scheme == was.scheme):
        raise AssertionError(f"saved under {was.scheme}, and loaded as {found}")
    for key, tensor in model.state_dict().items():
        if not torch.equal(tensor, back.state_dict()[key]):
            raise AssertionError(f"{key} is not what was saved")
    assert setup.loss is not None
    back.train(model.training)
    saved, loaded = (loss_of(setup.changed(each, ()), subject.batch) for each in (model, back))
    if not torch.equal(saved, loaded):
        raise AssertionError(f"the loss is {saved:.8f}, and {loaded:.8f} once saved and loaded")
