"""Embeddings and heads of language models, shared among processes by the words of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from actbench.methods.parallel.tensor import ranks as across
from actbench.methods.parallel.tensor.crossings import Entry, Exit
from actbench.methods.parallel.tensor.cutting import cut_parameter
from actbench.methods.parallel.tensor.ranks import Ranks
from actbench.packing.forwardwrapper import ReboundForward


@dataclass(frozen=True)
class Vocabulary:
    """The layers of a model that have a row for each word.

    Attributes:
        embedding: The layer that looks words up, with its path, or None where it is not shared.
        head: The layer that makes the logits, the same.
        why_not: Why layers are not shared, by path.
    """

    embedding: tuple[str, nn.Embedding] | None
    head: tuple[str, nn.Linear] | None
    why_not: dict[str, str]


def vocabulary_of(model: nn.Module, size: int) -> Vocabulary:
    """Return the layers that can be shared among as many processes; of tied ones both or none."""
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = (_asked(model, f"get_{which}_embeddings") for which in ("input", "output"))
    reasons = {
        layer: _why_not(layer, model, (embedding, head), size) for layer in (embedding, head) if layer is not None
    }
    if len(reasons) == 2 and any(reasons.values()) and embedding.weight is head.weight:
        reasons = {layer: why or "it is tied to one that is not shared" for layer, why in reasons.items()}
    shared = {layer: (paths[layer], layer) for layer, why in reasons.items() if not why}
    why_not = {paths[layer]: why for layer, why in reasons.items() if why}
    return Vocabulary(shared.get(embedding), shared.get(head), why_not)


def share(vocabulary: Vocabulary, ranks: Ranks) -> None:
    """Cut the layers, in place, so that their results stay the same."""
    layers = [found[1] for found in (vocabulary.embedding, vocabulary.head) if found is not None]
    # a tied weight is cut once
    for parameter in dict.fromkeys(each for layer in layers for each in layer.parameters()):
        cut_parameter(parameter, 0, ranks)
    if vocabulary.embedding is not None:
        SharedEmbedding(vocabulary.embedding[1], ranks).bind()
    if vocabulary.head is not None:
        head = vocabulary.head[1]
        # F.linear reads the weight alone; this is for code that asks the layer
        head.out_features //= ranks.size
        head.register_forward_pre_hook(Entry(ranks), with_kwargs=True)
        head.register_forward_hook(Gathered(ranks))


class SharedEmbedding(ReboundForward):
    """The forward of a cut embedding: each process has some words, the others' are zeros, and all are summed."""

    uncompilable = Entry.uncompilable

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module)
        self._ranks = ranks

    def bind(self) -> None:
        """Make this the forward of the module, which then knows its own words only."""
        module: Any = self.module
        module.num_embeddings //= self._ranks.size
        # the word whose row gets no gradient may be one of another process
        if module.padding_idx is not None:
            place = module.padding_idx - self._first
            module.padding_idx = place if 0 <= place < module.num_embeddings else None
        super().bind()

    @property
    def _first(self) -> int:
        module: Any = self.module
        return self._ranks.rank * int(module.num_embeddings)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch gives it)
        """Return the rows of words, (..., width)."""
        module: Any = self.module
        places = input - self._first
        others = (places < 0) | (places >= module.num_embeddings)
        # any row will do for words of other processes, since it is replaced by zeros
        found: Tensor = self.inner(module, places.masked_fill(others, 0))
        return across.summed(found.masked_fill(others[..., None], 0), self._ranks)


class Gathered(Exit):
    """A forward hook: all processes have the logits of all words."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        """Return the logits, (..., words)."""
        return None if output is None else across.joined(output, self.ranks, output.dim() - 1)


def _asked(model: nn.Module, method: str) -> Any:
    own: Any = getattr(model, method, None)
    found = own() if callable(own) else None
    return found if isinstance(getattr(found, "weight", None), nn.Parameter) else None


def _why_not(layer: Any, model: nn.Module, known: tuple[Any, Any], size: int) -> str:
    """Return why a layer is not shared; empty where it can be."""
    if not isinstance(layer, nn.Embedding) and type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, and nn.Embedding and nn.Linear are shared"
    if "forward" in vars(layer):
        return "another scheme has made it compute otherwise"
    if getattr(layer, "max_norm", None) is not None:
        return "it changes its rows by max_norm"
    if getattr(layer, "scale_grad_by_freq", False):
        return "it scales gradients by how often words come (scale_grad_by_freq)"
    if layer.weight.shape[0] % size:
        return f"its {layer.weight.shape[0]} rows do not divide among {size} processes"
    own = {id(parameter) for parameter in layer.parameters()}
    for path, part in model.named_modules():
        named = any(id(parameter) in own for parameter in part._parameters.values())
        if named and not any(part is each for each in known):
            return f"{path or type(model).__name__} has its parameters, too"
    return ""
