from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from actbench.methods.parallel.ddp import Count, OverProcesses
from actbench.methods.parallel.tensor.crossings import Entry
from actbench.methods.parallel.tensor.cutting import check, share_layers
from actbench.methods.parallel.tensor.plan import Plan, plan_of
from actbench.methods.parallel.tensor.ranks import Ranks
from actbench.methods.parallel.tensor.vocabulary import Vocabulary, share, vocabulary_of
from actbench.model.records import Site, Unreached
from actbench.ops.noise import draw_as
from actbench.packing.refusals import refuse_compiled
from actbench.scheme.base import TENSOR_PARALLEL
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Spread
from actbench.scheme.mesh import DATA, TENSOR, rank_along
from actbench.scheme.setup import TrainingSetup


class TensorParallel(OverProcesses):
    """Each layer is split over processes: each has some attention heads and a part of every MLP's width.

    Paper: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    arXiv 1909.08053; ``sequence`` is of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", arXiv 2205.05198.
    Layers of queries, keys and values and the first layers of an MLP are split by outputs, the layers after them by
    inputs; embedding and head of a language model by words, if these divide. Each process keeps its parts of weights,
    gradients and optimizer state, and all of norms, other embeddings and classifiers. Kept for backward are parts of
    the tensors inside of attention and MLP, and all of the tensors around them; with ``sequence`` a part of their
    tokens. Gradients are exact to the rounding of sums over processes. Rank 0 alone holds a bias that is added to such
    a sum. Each process draws its own dropout masks for split tensors; for all others, processes draw the same masks.
    Supported are models of transformers whose configs have a plan (``base_model_tp_plan``: Llama, Qwen, Mistral,
    Gemma and more), BERT, RoBERTa, DistilBERT, GPT-2 and ViT. A split model cannot be saved: a process has only parts.
    Not reproduced: the cross entropy of parts of the logits (here all processes gather the logits), and communication
    that overlaps with computation.

    Attributes:
        ranks: How many processes share the layers.
        sequence: Whether norms, dropout and residuals are split too, by tokens.
    """

    name: ClassVar[str] = "tp"
    card: ClassVar[Card] = Card(
        summary="each layer is split over processes by attention heads, MLP width and vocabulary",
        paper="Shoeybi et al. 2019, arXiv 1909.08053",
        rank=8,  # after adapters and types of parameters, before layers are replaced
        variants=(),  # ``actbench fit`` asks what fits on one card
    )
    axis: ClassVar[str] = TENSOR
    claims: ClassVar[tuple[str, ...]] = (TENSOR_PARALLEL,)

    ranks: Count = 2
    sequence: bool = False

    @property
    def facets(self) -> Iterable[Facet]:
        """Each process has parts of layers."""
        return (Spread({self.axis: self.ranks}, of_layers=True),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Cut the layers of the model down to this process's part.

        Raises:
            NothingToConvertError: Nobody says how the model's layers are to be cut.
            ConversionError: They do not divide, or there is no mesh with as many processes.
        """
        module = setup.module
        ranks = Ranks.of(self._mesh(setup), TENSOR)
        refuse_compiled(module, *Entry.uncompilable)
        plan = plan_of(module, self.spec)
        check(module, plan, self.ranks, self.spec)
        vocabulary = vocabulary_of(module, self.ranks)
        sites = tuple(self._sites(module, plan, vocabulary))
        left = tuple(Unreached(path=path, kind="vocabulary", reason=why) for path, why in vocabulary.why_not.items())
        # processes that share layers round equally what all of them hold; others draw numbers of their own
        draw_as(rank_along(setup.processes.mesh, DATA))
        share_layers(module, plan, ranks, of_sequence=self.sequence)
        share(vocabulary, ranks)
        return setup.changed(module, sites, left)

    def _sites(self, module: nn.Module, plan: Plan, vocabulary: Vocabulary) -> Iterator[Site]:
        for place in plan.places:
            was = type(module.get_submodule(place.path)).__name__
            yield Site(path=place.path, was=was, becomes=f"1/{self.ranks} of its {place.cut}")
        for found in (vocabulary.embedding, vocabulary.head):
            if found is not None:
                layer: Any = found[1]
                yield Site(path=found[0], was=type(layer).__name__, becomes=f"1/{self.ranks} of its words")
