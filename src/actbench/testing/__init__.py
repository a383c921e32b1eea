"""The contract that every scheme fulfils, for the tests of its author."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch

from actbench.scheme import Scheme
from actbench.testing import declared, model, step
from actbench.testing.subject import Subject

__all__ = ["PARTS", "check_scheme"]

PARTS: Mapping[str, Callable[[Subject], None]] = MappingProxyType(
    {
        "card": declared.card,
        "specification": declared.specification,
        "wrong values": declared.wrong_values,
        "keys": model.keys,
        "forward": step.forward,
        "gradient": step.gradient,
        "mean gradient": step.mean_gradient,
        "second derivative": step.second_derivative,
        "saved bytes": step.saved_bytes,
        "packed bytes": step.packed_bytes,
        "simulation": step.simulation,
        "compilation": step.compilation,
        "converting twice": model.converting_twice,
        "undo": model.undo,
        "folder": model.folder,
    }
)
"""The parts of the contract by name, each with the function that checks it."""


def check_scheme(
    scheme: str | Scheme, *, on: str = "tiny-gpt2", batch_size: int = 4, parts: Collection[str] | None = None
) -> None:
    """Check that a scheme fulfils the contract of schemes; seconds on a CPU.

    What the scheme declares (``changes``, ``gradient``, ``facets``) decides what is asked of it. In a package that
    brings a scheme by an entry point, this is its whole contract test::

        from actbench.testing import check_scheme


        def test_contract():
            check_scheme("theirs:4")

    The parts, in :data:`PARTS`, are:

    * ``card``: The scheme has a docstring, and a card with a summary.
    * ``specification``: Its entry point is found, and ``scheme.spec`` builds an equal scheme.
    * ``wrong values``: A wrong key or value is a SpecError that names it.
    * ``keys``: Parameters, the keys of the state_dict, and the flags of training survive.
    * ``forward``: The loss is the exact one bit for bit, unless the scheme declares a ``LossyForward``.
    * ``gradient``: All gradients are finite; if declared exact, they are the exact ones to rounding.
    * ``mean gradient``: If declared unbiased, the mean over draws is exact within its standard error.
    * ``second derivative``: It is exact, or a RuntimeError says that there is none.
    * ``saved bytes``: A step saves fewer bytes, and the scheme lists what it changed.
    * ``packed bytes``: The storages of packed tensors have the bytes of ``Codec.packed_bytes``.
    * ``simulation``: The simulated peak is the real one of a CPU to 2 %.
    * ``compilation``: ``torch.compile`` gives the gradients of the uncompiled model, or a ConversionError.
    * ``converting twice``: The second time is a ConversionError.
    * ``undo``: ``Conversion.undo`` gives back the model of before, with its loss and gradients.
    * ``folder``: ``save_converted`` and ``load_converted`` give the same model.

    Args:
        scheme: A specification, or a scheme.
        on: The specification of a model in which the scheme finds something to convert, also ``file.py:function``.
        batch_size: Rows of its batch.
        parts: The parts to check; None for all.

    Raises:
        AssertionError: A part is not fulfilled. The message begins with the scheme and the part, and has the numbers.
        ValueError: There is no such part.
        SpecError: The specification is wrong.
        NothingToConvertError: The model holds nothing that the scheme works on.
    """
    unknown = set(parts or ()) - PARTS.keys()
    if unknown:
        raise ValueError(f"the contract has no part {sorted(unknown)}; its parts are {', '.join(PARTS)}")
    subject = Subject.of(scheme, on, batch_size)
    for part in PARTS if parts is None else parts:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                PARTS[part](subject)
            except AssertionError as failed:
                raise AssertionError(f"{subject.scheme.spec}: {part}: {failed}") from None
