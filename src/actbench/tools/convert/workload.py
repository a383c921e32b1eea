"""``actbench convert`` as a function, and as the task of a process."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from actbench import scheme as schemes, workload as workloads
from actbench.errors import boundary
from actbench.measuring.inspection import inspect, trace
from actbench.model.records import Case
from actbench.paths import file_name
from actbench.scheme.microbatches import Batch
from actbench.simulator import profiles
from actbench.simulator.card import operators_of
from actbench.tools.convert.changes import noting
from actbench.tools.convert.folders import is_replaceable, refuse_other_parameters, save_converted
from actbench.tools.convert.gradienterrors import probed
from actbench.tools.convert.model import apply_to_model, mark, refuse_unchanged
from actbench.tools.convert.report import ConversionReport, ConversionRequest
from actbench.tools.convert.savedmodel import refuse_taken


def convert_workload(case: Case, output: Path | None, *, force: bool = False, probe: bool = False) -> ConversionReport:
    """Build the model of a case, convert it and write it; without ``output`` no weights are loaded.

    With ``probe`` the gradient of one batch is compared with the exact model's first.

    Raises:
        UsageError: The model or the scheme does not exist.
        CodeError: Code of the model fails.
        ConversionError: The scheme finds nothing to convert that runs in a training step.
        StoreError: The folder is taken or cannot be written, or the disk is too full.
    """
    started = time.perf_counter()
    scheme = schemes.build(case.scheme)
    if output is not None:
        refuse_other_parameters(scheme)
        refuse_taken(output, replaceable=is_replaceable(output, force=force))
    workload = workloads.load_workload(case)
    with boundary(f"model {case.model!r} cannot be built"):
        whole = workload.setup(materialize=output is not None, seed=case.seed)
        setup = replace(whole, make_optimizer=None)  # a converted model brings none

    def make_batch() -> Batch:
        return workload.batch(case.batch_size, seed=case.seed)

    with operators_of(profiles.get(case.device_profile or profiles.DEFAULT)):
        with boundary(f"a training step of {case.model!r} fails"):
            before = trace(setup, make_batch)
        with boundary(f"{case.scheme} cannot be applied to {case.model!r}"), noting(setup.module) as changes:
            converted = apply_to_model(scheme, setup)
            changes.became(converted.module)
        with boundary(f"a training step of {case.model!r} with {case.scheme} fails"):
            after = trace(converted, make_batch)
    sites, unreached = inspect(before, after, converted)
    found = replace(converted, sites=sites, unreached=unreached)
    refuse_unchanged(found, scheme)
    error = probed(case) if probe else None
    model = mark(found, scheme, changes)
    if output is not None:
        with boundary(f"{case.model!r} cannot be written"):
            save_converted(model, output, built_from=case, weights_origin=workload.weights_origin, force=force)
    return ConversionReport(
        case=case,
        sites=sites,
        unreached=unreached,
        bytes_before=before.total_bytes,
        bytes_after=after.total_bytes,
        folder=output,
        weights_origin=workload.weights_origin,
        built=setup.built,
        warnings=workload.warnings,
        seconds=time.perf_counter() - started,
        gradient_error=error.error if error else None,
    )


def convert(text: str) -> str:
    """Run a :class:`ConversionRequest` and return its :class:`ConversionReport`, both as JSON."""
    request = TypeAdapter(ConversionRequest).validate_json(text)
    case = request.case.model_copy(update={"scheme": schemes.build(request.case.scheme).spec})
    model = case.model.removeprefix("hf:").removeprefix("torchvision:")
    folder = request.output or Path(file_name(f"{model}-{case.scheme}"))
    output = None if request.dry_run else folder
    report = convert_workload(case, output, force=request.force, probe=request.probe)
    return TypeAdapter(ConversionReport).dump_json(report).decode()
