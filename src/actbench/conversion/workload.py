"""``actbench convert`` as one call: from a case to a table of sites and a model folder."""

from __future__ import annotations

import time
from pathlib import Path

from actbench import schemes, workloads
from actbench.conversion import apply_to_model, mark
from actbench.conversion.folders import is_replaceable, save_converted
from actbench.conversion.staging import refuse_taken
from actbench.converted import ConversionReport
from actbench.foreign import boundary
from actbench.inspection import inspect, trace
from actbench.meters import profiles
from actbench.meters.operators import device_operators
from actbench.records import Case
from actbench.training import Batch, TrainingSetup


def convert_workload(case: Case, output: Path | None, *, force: bool = False) -> ConversionReport:
    """Build the model of a case, convert it by the case's scheme and write it.

    Args:
        case: Model, scheme, weights policy, and the batch for which bytes are told.
        output: Folder to write, or None for a dry run, which loads no weights.
        force: Replace a folder that holds a converted model.

    Raises:
        UsageError: The model or the scheme does not exist.
        CodeError: Code of the model fails.
        ConversionError: The scheme finds nothing to convert that runs in a training step.
        StoreError: The folder is taken or cannot be written, or the disk is too full.
    """
    started = time.perf_counter()
    scheme = schemes.build(case.scheme)
    if output is not None:
        refuse_taken(output, replaceable=is_replaceable(output, force=force))
    workload = workloads.load(case)
    with boundary(f"model {case.model!r} cannot be built"):
        setup = workload.setup(materialize=output is not None, seed=case.seed)

    def make_batch() -> Batch:
        return workload.batch(case.batch_size, seed=case.seed)

    with device_operators(profiles.get(case.device_profile or profiles.DEFAULT)):
        with boundary(f"a training step of {case.model!r} fails"):
            before = trace(setup, make_batch)
        with boundary(f"{case.scheme} cannot be applied to {case.model!r}"):
            converted = apply_to_model(scheme, setup)
        with boundary(f"a training step of {case.model!r} with {case.scheme} fails"):
            after = trace(converted, make_batch)
    sites, unreached = inspect(before, after, converted)
    model = mark(TrainingSetup(converted.module, sites=sites, unreached=unreached), scheme)
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
    )
