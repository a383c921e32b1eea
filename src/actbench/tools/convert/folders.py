"""Folders of converted models: weights as transformers or safetensors write them, and ``actbench.json``.

Weights are read from safetensors only, nothing is unpickled, and no code in a folder, or named by it, is run.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from actbench import machine, scheme as schemes, workload as workloads
from actbench.errors import ConversionError, ModelError, StoreError, check_argument
from actbench.model.namedcode import named_code
from actbench.model.records import Case, FloatName, WorkloadSettings
from actbench.scheme import Scheme
from actbench.scheme.facets import RunsFiles
from actbench.tools.convert import savedmodel
from actbench.tools.convert.model import Conversion, conversion_of, convert, remark
from actbench.tools.convert.savedmodel import SavedModel, refuse_full_disk, refuse_taken, staged
from actbench.workload import names
from actbench.workload.base import Workload
from actbench.workload.folder import SINGLE, read_tensors, weight_files

_OTHER_BYTES = 4 * 1024**2  # room for the small files beside the weights


def save_converted(
    model: nn.Module,
    folder: str | Path,
    *,
    built_from: Case | str | None = None,
    weights_origin: str = "unknown",
    force: bool = False,
) -> Path:
    """Write a converted model into a folder, completely or not at all.

    A Hugging Face model is written by its own ``save_pretrained``, so the plain ``from_pretrained`` loads the
    unconverted model from the folder. Any other model is written as ``model.safetensors``. ``actbench.json`` has the
    rest.

    Args:
        model: A model that :func:`actbench.convert` returned, real and not fake.
        folder: The folder to make.
        built_from: The model specification, such as ``resnet50``, or the whole case, of the unconverted model; needed
            to build a torchvision model, or one of actbench's own, again.
        weights_origin: Where the weights came from, for the record.
        force: Replace a folder that holds a converted model.

    Returns:
        The folder.

    Raises:
        ConversionError: The model was not converted, or its scheme changes its parameters.
        StoreError: The folder is taken or cannot be written, or the disk is too full.
    """
    check_argument(folder, (str, Path), "save_converted", "the path of a folder")
    conversion = conversion_of(model)
    if conversion is None:
        raise ConversionError("this model was not converted; call actbench.convert first, or save it as it is")
    refuse_other_parameters(schemes.build(conversion.scheme))
    folder = Path(folder)
    replaceable = is_replaceable(folder, force=force)
    refuse_taken(folder, replaceable=replaceable)
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}  # shared ones once
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    refuse_full_disk(folder, needed + _OTHER_BYTES)
    saved = _described(model, conversion, built_from, weights_origin)
    with staged(folder, replaceable=replaceable) as stage:
        try:
            _write_weights(model, stage, saved)
            savedmodel.write(stage, saved)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{folder} cannot be written: {error}; choose another folder with --output") from error
    return folder


def load_converted(folder: str | Path, *, model: nn.Module | None = None, trust_remote_code: bool = False) -> nn.Module:
    """Load a converted model from its folder, in evaluation mode, as ``from_pretrained`` does.

    Args:
        folder: A folder of :func:`save_converted` or ``actbench convert``; its content need not be trusted.
        model: The unconverted model, if actbench cannot build it: your own model, or a Hugging Face model of the
            class that was saved. Its tensors are filled from the folder.
        trust_remote_code: Whether Python code in a Hugging Face folder, or a file that the scheme names, may run.

    Raises:
        ModelError: A file is missing, broken, truncated, a pickle, of a later version, or does not fit the model.
        SpecError: The scheme in ``actbench.json`` does not exist.
        ConversionError: The scheme cannot be applied, or ``model`` was converted before.
    """
    check_argument(folder, (str, Path), "load_converted", "the path of a folder")
    folder = Path(folder)
    saved = savedmodel.read(folder)
    if not trust_remote_code:
        _refuse_code(folder, saved, named_code(saved.scheme))  # before it is built: a plug-in's may import it then
    scheme = schemes.build(saved.scheme)
    refuse_other_parameters(scheme)
    if (runs := scheme.facet(RunsFiles)) and not trust_remote_code:
        _refuse_code(folder, saved, runs.paths)
    files = weight_files(folder)
    if not files:
        raise ModelError(f"{folder} holds no {SINGLE}; convert the model again")
    if saved.kind == "huggingface" and model is not None:
        _refuse_other_class(model, saved, folder)
        _fill(model, _named_as(model, read_tensors(files), folder), folder)
    elif saved.kind != "huggingface":
        tensors = read_tensors(files)
        if model is None:
            case = saved.case(_spec_of(folder, saved))
            model = _built(case, saved, workloads.load_workload(case))
            if saved.dtype is None:
                _take(model, tensors)
        _fill(model, tensors, folder)
    else:
        case = saved.case(str(folder.resolve()), trust_remote_code=trust_remote_code)
        model = _built(case, saved, _workload(folder.resolve(), case, saved))
        if saved.dtype is None:
            _take(model, read_tensors(files))
    converted = convert(model.eval(), scheme)
    if saved.sites:
        remark(converted, saved.sites, saved.unreached)
    return converted


def _refuse_code(folder: Path, saved: SavedModel, named: Sequence[str]) -> None:
    """Raise a ModelError if the scheme of an untrusted folder names code."""
    if named:
        raise ModelError(
            f"{folder}: the scheme {saved.scheme!r} runs {', '.join(named)}; read that file, and allow it "
            "with trust_remote_code=True"
        )


def refuse_other_parameters(scheme: Scheme) -> None:
    """Raise a ConversionError for a scheme whose models have other parameters than the plain model."""
    if "parameters" in scheme.changes:
        raise ConversionError(
            f"a folder of a converted model holds the plain model's parameters, and {scheme.spec!r} changes these; "
            f"convert in your own loop, model = actbench.convert(model, {scheme.spec!r}), and save the trained "
            "parameters: by model.save_pretrained(folder) those of a Hugging Face model, or {name: p for name, p in "
            "model.named_parameters() if p.requires_grad} of any model; 'actbench convert --dry-run' lists what changes"
        )


def is_replaceable(folder: Path, *, force: bool) -> bool:
    """Return whether a folder holds a converted model that may be replaced."""
    return force and os.path.isfile(folder / savedmodel.FILE_NAME)


def _described(
    model: nn.Module, conversion: Conversion, built_from: Case | str | None, weights_origin: str
) -> SavedModel:
    case = Case(model=built_from, batch_size=1) if isinstance(built_from, str) else built_from
    description: dict[str, Any] = (
        {} if case is None else case.model_dump(include={"model", *WorkloadSettings.model_fields})
    )
    return SavedModel.model_validate(
        {
            **description,
            "schema_version": savedmodel.SCHEMA_VERSION,
            "kind": _kind(model, case),
            "architecture": type(model).__name__,
            "dtype": _dtype(model),
            "scheme": conversion.scheme,
            "weights_origin": weights_origin,
            "sites": conversion.sites,
            "unreached": conversion.unreached,
            "versions": machine.versions(),
        }
    )


def _dtype(model: nn.Module) -> str | None:
    """Return the dtype of a model's parameters, or None if there are several."""
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()} or {"float32"}
    if len(found) > 1:
        return None
    (dtype,) = found
    if dtype not in get_args(FloatName):
        raise ConversionError(f"this model is {dtype}; a saved one is one of {', '.join(get_args(FloatName))}")
    return dtype


def _kind(model: nn.Module, case: Case | None) -> str:
    if hasattr(model, "save_pretrained"):
        return "huggingface"
    if case is not None and type(model).__module__.startswith("torchvision.models."):
        return "torchvision"
    if case is not None and names.is_own(case.model):
        return "actbench"
    return "module"


def _write_weights(model: nn.Module, stage: Path, saved: SavedModel) -> None:
    if saved.kind == "huggingface":
        from actbench.workload.huggingface import quiet  # imports transformers, as the model already did

        with quiet():
            model.save_pretrained(stage)  # type: ignore[operator]
    else:
        save_model(model, str(stage / SINGLE))


def _workload(folder: Path, case: Case, saved: SavedModel) -> Workload:
    """Find the model of a folder; for a class that actbench cannot build, the error says how to load it."""
    try:
        return workloads.from_folder(folder, case)
    except ModelError as error:
        loading = f"load it unconverted by {saved.architecture}.from_pretrained"
        raise ModelError(f"{error}; or {loading} and give it: load_converted(folder, model=...)") from error


def _built(case: Case, saved: SavedModel, workload: Workload) -> nn.Module:
    model: nn.Module = workload.setup(materialize=True, seed=0).module
    if type(model).__name__ != saved.architecture:
        raise ModelError(
            f"{case.model} holds a {saved.architecture}, where actbench builds a {type(model).__name__}; load it "
            f"unconverted by {saved.architecture}.from_pretrained and give it: load_converted(folder, model=...)"
        )
    for warning in workload.warnings:
        warnings.warn(warning, stacklevel=4)
    return model


def _spec_of(folder: Path, saved: SavedModel) -> str:
    """Return the specification of a torchvision model or of actbench's own; a folder can build nothing else."""
    spec = saved.model or ""
    name = spec.removeprefix("torchvision:")
    if saved.kind == "torchvision" and re.fullmatch(r"\w+", name):
        return f"torchvision:{name}"
    if saved.kind == "actbench" and names.is_own(spec):
        return spec
    raise ModelError(
        f"{folder}: {spec or 'the model'} is not built from a folder; build the unconverted model yourself and give "
        "it: load_converted(folder, model=...)"
    )


def _take(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give parameters and buffers the dtypes of the tensors with their names, and their values if the dtype differs."""
    for name, own in model.state_dict(keep_vars=True).items():
        saved = tensors.get(name)
        if saved is not None and saved.shape == own.shape and saved.dtype != own.dtype:
            own.data = saved.to(own.device)


def _refuse_other_class(model: nn.Module, saved: SavedModel, folder: Path) -> None:
    """Raise a ModelError if a given model is not of the class that was saved."""
    if type(model).__name__ != saved.architecture:
        raise ModelError(
            f"{folder} holds a {saved.architecture}, and the given model is a {type(model).__name__}; give a "
            f"{saved.architecture}, such as {saved.architecture}.from_pretrained(folder)"
        )


def _named_as(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder by a model's names; transformers may write others, and renames."""
    if _misfit(model, tensors) is None:
        return tensors
    from actbench.workload.huggingface import renamed  # imports transformers, as the model already did

    return renamed(model, tensors, folder)


def _misfit(model: nn.Module, tensors: dict[str, Tensor]) -> str | None:
    """Return what a model lacks of some tensors, or these of the model; tied tensors have one name."""
    state = model.state_dict(keep_vars=True)
    filled = {id(tensor) for name, tensor in state.items() if name in tensors}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    foreign = [name for name in tensors if name not in state]
    for keys, problem in ((missing, "has no tensor for"), (foreign, "has tensors that the model lacks:")):
        if keys:
            return f"it {problem} {keys[0]} ({len(keys)} in all)"
    return None


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copy tensors into a model, which must have all of them and no others."""
    problem = _misfit(model, tensors)
    if problem is not None:
        raise ModelError(f"{folder} does not fit the model: {problem}")
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{folder} does not fit the model: {' '.join(str(error).split())}") from None
