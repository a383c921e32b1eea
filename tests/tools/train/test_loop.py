from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from actbench.errors import IdleError, StoreError, UsageError
from actbench.tools.train.checkpoint import FILE_NAME, CheckpointFolder
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import Trained, TrainingCase

CASE = TrainingCase(
    model="resnet-cifar@depth=8,width=8,channels=1",
    data="digits",
    image_size=8,
    batch_size=64,
    steps=30,
    optimizer="sgd",
    learning_rate=0.1,
    momentum=0.9,
    schedule="cosine",
    evaluate_every=10,
)
TEXT = TrainingCase(
    model="tiny-gpt2@vocab_size=28,n_embd=32,n_layer=1", data="text", sequence_length=32, batch_size=16, steps=12,
    optimizer="adamw", learning_rate=3e-3, warmup_steps=2, evaluate_every=100,
)  # fmt: skip


def case(base: TrainingCase = CASE, **fields: Any) -> TrainingCase:
    return base.model_copy(update=fields)


def trained(case: TrainingCase) -> Trained:
    loop = TrainingLoop(case)
    list(loop)
    return loop.result()


def test_a_small_network_learns_the_digits() -> None:
    found = trained(CASE)

    assert found.final.accuracy > 0.85  # chance is 0.1
    assert [evaluation.step for evaluation in found.evaluations] == [10, 20, 30]
    assert found.evaluations[0].accuracy < found.final.accuracy
    assert len(found.losses) == len(found.step_seconds) == 30
    assert found.peak_bytes > found.weights_bytes + (found.optimizer_bytes or 0) + found.activation_bytes


def test_without_a_learning_rate_nothing_is_learned() -> None:
    assert trained(case(learning_rate=1e-12, steps=10)).final.accuracy < 0.4


def test_the_optimizer_keeps_what_it_is_said_to_keep() -> None:
    assert trained(case(steps=2)).optimizer_bytes == sum(
        4 * p.numel() for p in TrainingLoop(CASE)._setup.module.parameters()
    )


@pytest.mark.slow
def test_a_scheme_that_is_exact_gives_the_exact_curve() -> None:
    # dropout is on in this model: the masks must be the same ones
    exact, checkpointed = trained(TEXT), trained(case(TEXT, scheme="checkpoint"))

    assert checkpointed.losses == exact.losses
    assert checkpointed.sites == 1
    assert exact.final == checkpointed.final
    assert exact.metric == "loss"


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["randomized,dim=512", "fewbit:3+randomized,dim=512"])
def test_a_part_of_a_scheme_that_does_nothing_is_refused_before_the_first_step(scheme: str) -> None:
    with pytest.raises(IdleError, match=r"^randomized:0.2,dim=512 does nothing in a training step"):
        TrainingLoop(case(TEXT, scheme=scheme))  # 16 times 32 rows


def test_schemes_of_a_seed_start_alike_and_other_seeds_do_not() -> None:
    def first(run: TrainingCase) -> tuple[float, torch.Tensor]:
        loop = TrainingLoop(run)
        return next(iter(loop)), loop._batch(3)["input_ids"]

    exact, sketched, other = first(TEXT), first(case(TEXT, scheme="randomized:0.5")), first(case(TEXT, seed=1))

    assert exact[0] == sketched[0] != other[0]
    assert torch.equal(exact[1], sketched[1])
    assert not torch.equal(exact[1], other[1])


WATCHED = "actnn:L3,adapt_interval=3"
FOUR_EPOCHS = case(steps=12, batch_size=480, scheme="actnn:L3,adapt_interval=2,use_gradient=true")


FURTHER = pytest.mark.sampled(slow=3)


@pytest.mark.parametrize(
    ("base", "stop"),
    [
        (case(steps=12, evaluate_every=4), 7),
        pytest.param(case(steps=12, scheme=WATCHED), 7, marks=FURTHER),  # ranges are not gathered yet
        pytest.param(case(steps=12, scheme="gact:L2.2,adapt_interval=5,probes=8"), 7, marks=FURTHER),
        pytest.param(case(TEXT, scheme="gact:L2.2,adapt_interval=5,probes=8+checkpoint"), 7, marks=FURTHER),
        pytest.param(case(TEXT, scheme="randomized:0.5"), 7, marks=FURTHER),
        pytest.param(case(steps=12, scheme=WATCHED), 6, marks=FURTHER),  # between two watched steps
        pytest.param(FOUR_EPOCHS, 7, marks=FURTHER),  # the fourth epoch
        pytest.param(case(TEXT, scheme=WATCHED), 7, marks=FURTHER),  # attention by hooks
    ],
)
def test_a_resumed_run_has_the_same_curve_bit_for_bit(tmp_path: Path, base: TrainingCase, stop: int) -> None:
    whole = trained(base)
    folder = CheckpointFolder(tmp_path / "run")
    first = TrainingLoop(base)
    for _ in first:
        if first.done == stop:
            break
    first.save(folder)
    torch.manual_seed(1234)  # whatever else happened in between

    second = TrainingLoop(base)
    second.resume(folder)
    list(second)
    found = second.result()

    assert found.losses == whole.losses
    assert found.evaluations == whole.evaluations
    assert found.resumed_at == (stop,)
    assert found.warnings == ()


def test_a_checkpoint_is_one_file_of_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path / "run")
    loop = TrainingLoop(CASE)
    next(iter(loop))
    loop.save(folder)
    next(iter(loop))
    loop.save(folder)

    assert [file.name for file in folder.path.iterdir()] == [FILE_NAME]
    with pytest.raises(StoreError, match="another run"):
        folder.read(case(seed=5))
    before = (folder.path / FILE_NAME).read_bytes()
    with monkeypatch.context() as full:
        full.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
        with pytest.raises(StoreError, match="make room there"):
            loop.save(folder)
    assert (folder.path / FILE_NAME).read_bytes() == before
    for broken in (b"broken", before[: len(before) // 2], b""):
        (folder.path / FILE_NAME).write_bytes(broken)
        with pytest.raises(StoreError, match="remove the folder"):
            folder.read(CASE)
    folder.remove()
    assert folder.read(CASE) is None


def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.json").write_text("{}")

    with pytest.raises(StoreError, match=r"checkpoint.json was written by an earlier version.*remove the folder"):
        CheckpointFolder(tmp_path / "run").read(CASE)


def test_processes_gather_no_state_of_the_optimizer_that_the_first_one_has(tmp_path: Path) -> None:
    gathered: list[Any] = []

    class Group(ProcessGroup):
        def all_gather(self, value: Any, group: Any = None) -> list[Any]:
            gathered.append(value)
            return [value]

    loop = TrainingLoop(CASE, Group())
    next(iter(loop))
    gathered.clear()
    loop.save(CheckpointFolder(tmp_path / "run"))

    state = CheckpointFolder(tmp_path / "run").read(CASE)
    assert state is not None
    momenta = sum(p.numel() for p in loop._setup.module.parameters())
    assert _elements(state[1]["optimizer"]) >= momenta
    assert [_elements(each["optimizer"]) for each in gathered if isinstance(each, dict)] == [0]


def _elements(tree: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "run").mkdir()
    torch.save({"progress": Harmful()}, tmp_path / "run" / FILE_NAME)

    with pytest.raises(StoreError, match="cannot be read"):
        CheckpointFolder(tmp_path / "run").read(CASE)
    assert not (tmp_path / "ran").exists()


def test_state_that_no_checkpoint_holds_is_refused_when_it_is_written() -> None:
    loop = TrainingLoop(CASE)
    loop._step.optimizer.param_groups[0]["names"] = {"a set"}

    with pytest.raises(StoreError, match=r"\['param_groups'\]\[0\]\['names'\]: a set cannot be written"):
        loop.save(CheckpointFolder(Path("nowhere")))


def test_a_run_whose_loss_is_no_number_ends_there() -> None:
    found = trained(case(learning_rate=1e30, steps=20))

    assert found.diverged_at is not None
    assert len(found.losses) == found.diverged_at < 20
    assert found.final.step == found.diverged_at


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "tiny-vit@num_labels=4,num_channels=1,image_size=8,patch_size=4"}, "num_labels=10"),
        ({"model": "resnet-cifar@num_classes=3,channels=1"}, "num_classes=10"),
        ({"model": "tiny-gpt2", "sequence_length": 32}, "is for an image-classification model"),
        ({"data": "text"}, "is for a causal-lm model"),
        ({"model": "tiny-bert", "data": "text", "sequence_length": 16, "task": "masked-lm"}, "causal-lm"),
        ({"model": "tiny-bert", "data": "text", "sequence_length": 16, "task": "token-classification"}, "causal-lm"),
        ({"model": "tiny-gpt2@vocab_size=20", "data": "text", "sequence_length": 16}, "vocab_size=28"),
        ({"batch_size": 5000}, "1437 training samples"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TrainingLoop(case(**fields)).check()


@pytest.mark.slow
def test_a_small_bert_learns_to_read_reviews() -> None:
    fields = {"learning_rate": 1e-3, "steps": 80, "evaluate_every": 80, "warmup_steps": 20, "image_size": None}
    words = {"data": "reviews", "sequence_length": 16, "optimizer": "adamw", "momentum": 0.0}
    model = "tiny-bert@vocab_size=64,hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"

    assert trained(case(model=model, **fields, **words)).final.accuracy > 0.65  # chance is 0.5


@pytest.mark.exhaustive
def test_a_small_vit_learns_the_digits() -> None:
    fields = {"learning_rate": 1e-3, "steps": 150, "evaluate_every": 150, "optimizer": "adamw", "momentum": 0.0}

    found = trained(case(model="tiny-vit@num_channels=1,patch_size=2", warmup_steps=20, **fields))

    assert found.final.accuracy > 0.5  # chance is 0.1
