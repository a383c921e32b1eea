"""The parts of libraries around torch that a run on a simulated card replaces.

Each file of this folder has one part; :func:`prepared` enters all of them. A library that a script does not import is
not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from actbench.tools.script.card.facade import loading_named
from actbench.tools.script.libraries import (
    checkpoints,
    data,
    detectors,
    flash,
    kernels,
    linesearch,
    loading,
    loggers,
    packed,
    savedmodels,
    saving,
    weightfiles,
    zero,
)
from actbench.tools.script.libraries.importpatches import Change, combined, patch_on_import, rebind, searched_once

Note = Callable[[str], None]
Real = Callable[[], AbstractContextManager[None]]


@contextmanager
def prepared(
    note: Note,
    *,
    batch_size: int | None = None,
    real: Real = nullcontext,
    fetched: Callable[[int], object] = lambda rows: None,
    ordered: data.Ordered | None = None,
    compiler: Callable[[Note], AbstractContextManager[None]] = kernels.without_compile,
) -> Iterator[None]:
    """Inside the block, let libraries that are or will be imported run on tensors without values.

    Enter it inside the fake tensor mode. Weights come from shapes, nothing is saved, logged or uploaded, data is loaded
    in this process, and kernels leave their work to torch's operators.

    Args:
        note: Receives, once, a sentence about each thing that is done in another way.
        batch_size: Rows of a batch, in place of the script's own (see :mod:`actbench.tools.script.libraries.data`).
        real: Makes the context in which data is loaded, where no tensor is fake.
        fetched: Is told the samples of each batch that is fetched while gradients are recorded.
        ordered: As of :func:`actbench.tools.script.libraries.data.loaded_here`.
        compiler: Makes the context in which ``torch.compile`` is called.
    """
    told: set[str] = set()

    def once(sentence: str) -> None:
        if sentence not in told:
            told.add(sentence)
            note(sentence)

    silent, simulated = loggers.stubs(), flash.stubs()

    def named(package: str) -> None:
        (loggers if package in silent else flash).noting(once)(package)

    with ExitStack() as leaving, ExitStack() as stack:
        with searched_once():
            saved = savedmodels.SavedModels(stack)
            contents = checkpoints.Contents(once, saved.is_ours)
            modules = (loading, packed, saving, loggers, kernels, flash, detectors, zero)
            parts = [*(module.changes(once) for module in modules), data.changes(real)]
            parts += [contents.changes(), savedmodels.changes(saved, contents, once)]
            changes = {
                name: combined([part[name] for part in parts if name in part]) for part in parts for name in part
            }
            stack.enter_context(loggers.environment())
            stack.enter_context(data.loaded_here(once, real, batch_size, fetched, ordered))
            stack.enter_context(contents.of_torch())
            stack.enter_context(weightfiles.files_stay(contents))
            stack.enter_context(loading.no_downloads(once))
            stack.enter_context(compiler(once))
            stack.enter_context(kernels.without_flat_rnn_weights())
            stack.enter_context(kernels.without_nested_tensors())
            stack.enter_context(linesearch.all_iterations())
            stack.enter_context(patch_on_import(changes, {**silent, **simulated}, named))
        stack.callback(lambda: leaving.enter_context(searched_once()))  # the first to run when the parts are left
        yield


@contextmanager
def prepared_for_real(
    note: Note,
    *,
    batch_size: int | None = None,
    real: Real = nullcontext,
    fetched: Callable[[int], object] = lambda rows: None,
    ordered: data.Ordered | None = None,
) -> Iterator[None]:
    """Inside the block, change only what a comparable run on real tensors needs, and what would leave this machine.

    Data is loaded in this process, nothing is compiled, logged or uploaded. Weights are read, and what a script saves
    before it ends is written. Arguments are those of :func:`prepared`.
    """
    with ExitStack() as stack:
        stack.enter_context(loggers.environment())
        stack.enter_context(data.loaded_here(note, real, batch_size, fetched, ordered))
        stack.enter_context(kernels.without_compile(note))
        found: dict[str, Change] = {
            **loggers.changes(note),
            "safetensors.torch": lambda module: rebind(module, "load_file", loading_named),
        }
        stack.enter_context(patch_on_import(found, loggers.stubs(), loggers.noting(note)))
        yield
