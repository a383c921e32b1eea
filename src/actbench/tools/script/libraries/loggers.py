"""Disables experiment loggers: a simulated run has no metrics."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

from actbench.tempfiles import temporary_folder
from actbench.tools.script.libraries.importpatches import Change, Make, changed, is_users_import

Note = Callable[[str], None]

_OFF = " is off: a simulated run logs nothing."
_ENVIRONMENT = {"WANDB_MODE": "disabled", "WANDB_SILENT": "true"}
_PACKAGES = (
    *("mlflow", "comet_ml", "clearml", "neptune", "aim", "swanlab", "trackio", "dvclive", "tensorboardX"),
    "torch.utils.tensorboard",
)


class Silent:
    """Answers every attribute, call, item and ``with`` by itself, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a class or function of a logger takes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that is decorated; else return this object."""
        decorated = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Silent)
        return args[0] if decorated else self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        """Do not suppress exceptions."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return ""


class _SilentModule(ModuleType):
    """A module that does nothing: each name in it is a class of :class:`Silent`, so that scripts may derive from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (Silent,), {}) if name[:1].isupper() else Silent()
        setattr(self, name, made)
        return made


def silent_module(**names: Any) -> ModuleType:
    """Return a module that does nothing, but for the ``names`` that it has."""
    made = _SilentModule("silent")
    vars(made).update({"__version__": "0.0.0", "__path__": [], **names})
    return made


def stubs() -> dict[str, Make]:
    """Return functions that make the modules of loggers which a script imports: each module does nothing.

    wandb itself does nothing if it is told so, and keeps the settings of a run, which scripts read.
    """
    missing = () if importlib.util.find_spec("wandb") else ("wandb",)
    return dict.fromkeys((*_PACKAGES, *missing), silent_module)


def noting(note: Note) -> Callable[[str], None]:
    """Return a function that notes a logger which the user's own files import; libraries import what they never use."""

    def tell(package: str) -> None:
        if is_users_import():
            note(f"{package}{_OFF}")

    return tell


def together(notes: Iterable[str]) -> tuple[str, ...]:
    """Return notes, with those of several loggers as one in the place of the first."""
    found = list(notes)
    off = [note for note in found if note.endswith(_OFF)]
    if len(off) < 2:
        return tuple(found)
    *others, last = (note.removesuffix(_OFF) for note in off)
    found[found.index(off[0])] = f"{', '.join(others)} and {last} are off: a simulated run logs nothing."
    return tuple(note for note in found if note not in off)


@contextmanager
def environment() -> Iterator[None]:
    """Inside the block, switch off loggers that listen to the environment."""
    own = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def changes(note: Note) -> dict[str, Change]:
    """Return the changes of trainers that call loggers, by the names of their modules."""
    return {
        "transformers.training_args": lambda module: changed(
            module.TrainingArguments, "__post_init__", _unreported(note)
        ),
        "accelerate.accelerator": lambda module: changed(module.Accelerator, "__init__", _untracked(note)),
        "lightning.pytorch.trainer.trainer": _lightning(note, "lightning.pytorch.loggers.logger"),
        "pytorch_lightning.trainer.trainer": _lightning(note, "pytorch_lightning.loggers.logger"),
        "wandb": _wandb(note),
    }


def _unreported(note: Note) -> Callable[[Any], Any]:
    def change(own: Callable[..., None]) -> Callable[..., None]:
        def settle(self: Any, *args: Any, **kwargs: Any) -> None:
            asked = _names(self.report_to)
            self.report_to = "none"
            own(self, *args, **kwargs)
            if asked:
                note(f"TrainingArguments.report_to={', '.join(asked)}{_OFF}")

        return settle

    return change


def _names(asked: Any) -> list[str]:
    """Return the loggers that a setting names; "all" is not an explicit request."""
    many = asked if isinstance(asked, list | tuple) else [asked]
    return [str(getattr(each, "value", each)) for each in many if each not in (None, "all", "none")]


def _untracked(note: Note) -> Callable[[Any], Any]:
    def change(own: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            asked = kwargs.pop("log_with", None)
            own(self, *args, **kwargs)
            self.log_with = []
            if asked:
                named = ", ".join(_names(asked)) or str(asked)
                note(f"Accelerator(log_with={named}){_OFF}")

        return init

    return change


def _lightning(note: Note, loggers: str) -> Change:
    @contextmanager
    def change(module: ModuleType) -> Iterator[None]:
        with temporary_folder() as folder, changed(module.Trainer, "__init__", _unlogged(note, loggers, str(folder))):
            yield

    return change


def _unlogged(note: Note, loggers: str, folder: str) -> Callable[[Any], Any]:
    """Return the change of a Trainer's ``__init__`` that gives it a logger with a folder, which logs nothing."""

    def change(own: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            asked = kwargs.get("logger")
            if asked is not False:
                silent = importlib.import_module(loggers).DummyLogger
                # a LightningCLI writes its config there, and refuses one of an earlier run
                kwargs["logger"] = type("Silent", (silent,), {"save_dir": folder, "log_dir": folder})()
            own(self, *args, **kwargs)
            if asked not in (None, False, True):
                many = asked if isinstance(asked, list | tuple) else [asked]
                named = ", ".join(type(each).__name__ for each in many)
                note(f"Trainer(logger={named}){_OFF}")

        return init

    return change


def _wandb(note: Note) -> Change:
    def change(module: ModuleType) -> AbstractContextManager[object]:
        noting(note)("wandb")
        return ExitStack()

    return change
