from __future__ import annotations

import pytest

from actbench.errors import UsageError
from actbench.measuring.rank import is_first
from actbench.tools.train.launch import Launch, read

SECOND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
FSDP = {**SECOND, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_without_a_launcher_there_is_one_process() -> None:
    assert read({}) == Launch() == Launch(rank=0, size=1, strategy="single")
    assert read({**FSDP, "RANK": "0", "WORLD_SIZE": "1"}).strategy == "single"


def test_torchrun_and_accelerate_give_copies() -> None:
    assert read(SECOND) == Launch(rank=1, size=4, local_rank=1, strategy="ddp")
    assert read({**SECOND, "ACCELERATE_USE_CPU": "True"}).cpu
    assert not read(SECOND).is_first
    assert not is_first(SECOND)
    assert is_first({})


@pytest.mark.parametrize("prefix", ["PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"])
def test_mpirun_is_understood(prefix: str) -> None:
    found = read({f"{prefix}RANK": "2", f"{prefix}SIZE": "3", "MASTER_ADDR": "other", "ACCELERATE_USE_CPU": "true"})

    assert found == Launch(rank=2, size=3, local_rank=2, strategy="ddp", cpu=True)


def test_accelerates_options_of_fsdp2_are_followed() -> None:
    assert read(FSDP) == Launch(rank=1, size=4, local_rank=1, strategy="fsdp2")
    named = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, Other", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    named["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"

    assert read({**FSDP, **named}).blocks == ("BertLayer", "Other")
    assert not read({**FSDP, **named}).reshard


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"FSDP_VERSION": "1"}, "--fsdp_version 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "keep parameters on the device"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "name the scheme checkpoint in the recipe"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "give TRANSFORMER_BASED_WRAP"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, 'autocast = "bf16" into the recipe'),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "not compiled"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
    ],
)
def test_what_training_runs_do_not_do_is_refused(changes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read({**FSDP, **changes})
    with pytest.raises(UsageError, match=told):
        read({**FSDP, **changes, "RANK": "0", "WORLD_SIZE": "1"})


def test_many_processes_on_the_cpu_that_are_one_are_refused() -> None:
    # What accelerate 1.15 sets for --cpu --num_processes 2 without mpirun: it starts a single process.
    with pytest.raises(UsageError, match="starts one process only"):
        read({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert read({"ACCELERATE_USE_CPU": "True"}) == Launch(cpu=True)


def test_an_empty_variable_is_none() -> None:
    assert read({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}) == Launch()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "first"}, "the environment variable RANK is 'first', where launchers put a number"),
        ({"WORLD_SIZE": "-2"}, "the environment variable WORLD_SIZE is '-2'"),
        ({"LOCAL_RANK": "9" * 5000}, "the environment variable LOCAL_RANK is '9{40}', where"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4: ranks are counted from 0 below the size"),
    ],
)
def test_what_is_no_rank_is_told(changed: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read({**SECOND, **changed})
