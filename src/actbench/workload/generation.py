"""Generation: the prefill of a prompt and the tokens that a causal language model writes after it, one by one.

The passes are those of ``generate`` of transformers, without sampling and without padding. The first one reads the
prompt, and each further one reads one token. Keys and values of all tokens before it are in the cache.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from actbench.errors import ModelError, boundary
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.overrides import full_rows, known_scalars

_GROWING = ("keys", "values", "indexer_keys", "_quantized_keys", "_quantized_values")
"""Attributes of a cache's layer with a place for each token, in the last dimension but one."""
_LAST = 2
"""Passes that run at the full length when the passes before are skipped."""


class NoOptimizer(torch.optim.Optimizer):
    """The optimizer of a model that is not trained: it has no parameter and no state."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change nothing."""


class GenerationStep(TrainStep):
    """One generation in the parts of a training step: the prefill is its forward pass, all else its backward pass.

    With ``whole`` each pass runs. Otherwise passes in the middle are skipped, and the cache is lengthened by empty
    tensors: the largest passes are the prefill, the one after it, which replaces what sliding layers kept of the whole
    prompt, and the last ones.

    Attributes:
        cache_bytes: What the cache holds at its full length; known after the step.
    """

    trains = False

    def __init__(self, setup: TrainingSetup, batch: Batch, case: Case, *, whole: bool) -> None:
        super().__init__(setup, batch)
        assert case.generate is not None
        self._case, self._whole, self._passes = case, whole, case.generate - 1
        taken = inspect.signature(setup.module.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.cache_bytes = 0

    @property
    def loss(self) -> Tensor:
        """Zero: a generation has no loss."""
        return torch.zeros(())

    def forward(self) -> Tensor:
        """Read the prompt, and return the first tokens ``(rows,)`` int64."""
        self.phase = "forward"
        self.around_forward()
        self._ids: Tensor = self.batch["input_ids"]
        length = self._ids.shape[1] + self._passes + 1
        self._cache = new_cache(self.setup.module, self._case, length)
        self._pass(self._ids)
        self.around_forward()
        first: Tensor = self._ids[:, -1]
        return first

    def backward(self, loss: Tensor) -> None:
        """Write all tokens but the first, and drop the cache."""
        self.phase = "backward"
        skipped = 0 if self._whole or self._case.cache == "static" else self._passes - 1 - _LAST
        for place in range(self._passes - max(skipped, 0)):
            if place == 1 and skipped > 0:
                self._skip(skipped)
            self._pass(self._ids[:, -1:])
        self.cache_bytes = sum({id(held): held.nbytes() for held in map(Tensor.untyped_storage, self._held())}.values())
        self.abandon()

    def abandon(self) -> None:
        """Drop the cache."""
        self._ids, self._cache = self.batch["input_ids"], None

    def _pass(self, ids: Tensor) -> None:
        with torch.no_grad(), self.setup.autocast(), full_rows(self.batch), known_scalars(self.setup.module):
            found = self.setup.module(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._options)
            scores = found.logits[:, -1].to(copy=True, dtype=torch.float32)
            self._ids = torch.cat([self._ids, scores.argmax(-1, keepdim=True)], dim=-1)
        self.around_cache(self._held())

    def _skip(self, passes: int) -> None:
        for layer in self._cache.layers:
            _lengthen(layer, passes)
        self._ids = self._ids.new_zeros(len(self._ids), self._ids.shape[1] + passes)

    def _held(self) -> list[Tensor]:
        held = (tree_leaves([*vars(layer).values()]) for layer in self._cache.layers)
        return [leaf for leaves in held for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


def generating(case: Case, setup: TrainingSetup) -> TrainingSetup:
    """Return a setup with its model as it writes text: in evaluation mode, frozen, and without an optimizer.

    Raises:
        ModelError: The model takes no cache of keys and values.
    """
    if "past_key_values" not in inspect.signature(setup.module.forward).parameters:
        raise ModelError(f"--generate: {case.model} is a {type(setup.module).__name__}, which takes no past_key_values")
    setup.module.eval().requires_grad_(False)
    return replace(setup, make_optimizer=lambda module: NoOptimizer())


def new_cache(module: nn.Module, case: Case, length: int) -> Any:
    """Return an empty cache of the kind that the case names, for ``length`` tokens of each row.

    Raises:
        ModelError: The installed transformers has no such cache for the model.
    """
    config: Any = module.config
    with boundary(f"--cache {case.cache}: transformers makes none for {case.model}", ModelError):
        from transformers import DynamicCache, QuantizedCache, StaticCache

        if case.cache == "static":
            return StaticCache(config=config, max_cache_len=length)
        return DynamicCache(config=config) if case.cache == "dynamic" else QuantizedCache(case.cache, config)


def _lengthen(layer: Any, more: int) -> None:
    """Let a layer of a cache hold ``more`` tokens, in new tensors without values, one after the other."""
    window = getattr(layer, "sliding_window", None)
    for name in _GROWING:
        if getattr(layer, name, None) is not None:
            setattr(layer, name, tree_map(lambda leaf: _longer(leaf, more, window), getattr(layer, name)))
    if isinstance(getattr(layer, "cumulative_length", None), int):
        layer.cumulative_length += more


def _longer(held: Any, more: int, window: int | None) -> Any:
    if not isinstance(held, Tensor) or held.dim() < 3:
        return held
    length = held.shape[-2] + more
    if window is not None and held.shape[-2] >= window - 1:
        return held
    shape = [*held.shape[:-2], length if window is None else min(length, window), held.shape[-1]]
    made = held.new_empty(shape)
    return made if window is None else made[..., -window + 1 :, :]
