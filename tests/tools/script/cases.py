"""The training scripts beside this file, with small and with realistic arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).parent / "scripts"
Size = Literal["tiny", "real"]
Folders = Mapping[str, str]  # what stands for {NAME} in arguments: a folder that the fixture of this name makes


@dataclass(frozen=True)
class ScriptCase:
    """One training script, unchanged, with its arguments.

    ``measured_as`` are the arguments of ``actbench measure`` that train the same model with the same batch, precision
    and optimizer as the script with its real arguments; empty where ``measure`` cannot express it. ``cpu`` are more
    arguments with which the script trains on a machine without a GPU; None where it insists on one.
    """

    name: str
    target: str  # a file of SCRIPTS, or the name of a module after -m
    tiny: str
    real: str = ""
    cpu: str | None = ""
    tiny_environment: Mapping[str, str] = field(default_factory=dict)
    convolutional: bool = False
    processes: int = 1
    real_processes: int = 1
    measured_as: str = ""

    def arguments(self, size: Size, folders: Folders) -> list[str]:
        """Return the script's own arguments, with ``folders`` put in."""
        return [word.format(**folders) for word in self._text(size).split()]

    def command(self, size: Size, folders: Folders) -> list[str]:
        """Return what stands after ``python`` or ``actbench run``."""
        target = [str(SCRIPTS / self.target)] if self.target.endswith(".py") else ["-m", self.target]
        return [*target, *self.arguments(size, folders)]

    def environment(self, size: Size) -> Mapping[str, str]:
        """Return the environment variables from which the script takes its sizes."""
        return self.tiny_environment if size == "tiny" else {}

    def folders(self, size: Size) -> list[str]:
        """Return the fixtures whose folders stand in the arguments."""
        return [name for name in ("tiny_llama", "llama_8b", "chats") if f"{{{name}}}" in self._text(size)]

    def _text(self, size: Size) -> str:
        return self.tiny if size == "tiny" else self.real


TINY_LLAMA = "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 4 --kv-heads 2 --vocab 128 --length 32"
TINY_DETECTION = "-b 2 -j 1 --epochs 1 --samples 4 --classes 5 --size 64 --min-size 64 --max-size 96"
TINY_PARALLEL = "--dim 32 --hidden 64 --layers 2 --heads 4 --vocab 128 --length 16 --samples 16"
TINY_GPT = (
    "--n_layer=2 --n_head=2 --n_embd=32 --vocab_size=128 --block_size=32 --batch_size=2 "
    "--gradient_accumulation_steps=2 --max_iters=5 --eval_interval=3 --eval_iters=2"
)
TINY_TRAINER = {
    "HIDDEN_SIZE": "32",
    "INTERMEDIATE_SIZE": "64",
    "LAYERS": "2",
    "HEADS": "4",
    "KV_HEADS": "2",
    "VOCAB_SIZE": "128",
    "LENGTH": "32",
}

CASES = [
    ScriptCase(
        name="nanogpt",
        target="nanogpt.py",
        tiny="--layers 2 --heads 2 --width 32 --vocab 128 --context 32 --batch-size 4 --samples 32",
    ),
    ScriptCase(
        name="llama_peft",
        target="llama_peft.py",
        tiny=f"{TINY_LLAMA} --samples 8",
        measured_as=(
            "llama-3.1-8b --dtype bf16 --autocast bf16 --batch-size 2 --sequence-length 2048 "
            "--scheme lora:16,target=q_proj/v_proj+checkpoint+accumulate:2"
        ),
    ),
    ScriptCase(
        name="trainer",
        target="trainer.py",
        tiny="",
        tiny_environment=TINY_TRAINER,
        measured_as=(
            "llama-3.2-1b --dtype bf16 --autocast bf16 --batch-size 8 --sequence-length 1024 --optimizer adamw-fused "
            "--scheme checkpoint+accumulate:2"
        ),
    ),
    ScriptCase(
        name="vit",
        target="vit.py",
        tiny="--image-size 32 --classes 10 -b 4 -j 2 --samples 16 --epochs 1",
        cpu=None,
        measured_as=(
            "torchvision:vit_b_16 --autocast fp16 --batch-size 64 --optimizer sgd-momentum --scheme channels_last"
        ),
    ),
    ScriptCase(
        name="lightning_resnet",
        target="lightning_resnet.py",
        tiny="--arch resnet18 --image-size 32 --classes 10 --batch-size 4 --samples 32 --workers 1 --max-steps 4",
        cpu="--accelerator cpu --precision bf16-mixed",
        convolutional=True,
        measured_as="resnet50 --autocast fp16 --batch-size 64 --optimizer sgd-momentum",
    ),
    ScriptCase(
        name="classification",
        target="classification.py",
        tiny="--model resnet18 -b 4 -j 1 --epochs 1 --samples 16 --classes 10 --crop-size 32",
        cpu="--device cpu",
        convolutional=True,
        measured_as="resnet50 --batch-size 32 --optimizer sgd-nesterov",
    ),
    ScriptCase(
        name="classification_amp",
        target="classification.py",
        tiny="--model resnet18 -b 4 -j 1 --epochs 1 --samples 16 --classes 10 --crop-size 32 --amp --mix --ema",
        real="--amp --mix --ema -b 128",
        cpu="--device cpu",
        convolutional=True,
    ),
    ScriptCase(
        name="retinanet",
        target="detection.py",
        tiny=f"--model retinanet_resnet50_fpn {TINY_DETECTION}",
        real="--model retinanet_resnet50_fpn --amp",
        cpu="--device cpu",
        convolutional=True,
    ),
    ScriptCase(
        name="faster_rcnn",
        target="detection.py",
        tiny=f"--model fasterrcnn_resnet50_fpn {TINY_DETECTION}",
        real="--model fasterrcnn_resnet50_fpn",
        cpu="--device cpu",
        convolutional=True,
    ),
    ScriptCase(
        name="gpt_train",
        target="gpt_train.py",
        tiny=TINY_GPT,
        real="--gradient_accumulation_steps=4 --eval_iters=2",  # 40 micro-batches take the same memory, and longer
        cpu="--device=cpu --compile=False",
    ),
    ScriptCase(
        name="unet_lora",
        target="unet_lora.py",
        tiny=(
            "--resolution 32 --channels 8 16 --layers-per-block 1 --text-width 32 --text-layers 1 --vae-channels 8 8 "
            "--groups 4 --train-batch-size 2 --samples 8 --mixed-precision bf16"
        ),
        convolutional=True,
    ),
    ScriptCase(
        name="qlora",
        target="qlora.py",
        tiny="{tiny_llama} --batch-size 2 --max-length 32 --max-steps 3",
        real="{llama_8b}",
        cpu="--optim adamw_torch",
    ),
    ScriptCase(
        name="trl_sft",
        target="trl.scripts.sft",
        tiny=(
            "--model_name_or_path {tiny_llama} --dataset_name {chats} --output_dir sft-out --max_steps 3 "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 64 --logging_steps 1 "
            "--save_strategy no --report_to none --use_peft --lora_r 4"
        ),
        real=(
            "--model_name_or_path {llama_8b} --dataset_name {chats} --output_dir sft-out --max_steps 10 "
            "--dtype bfloat16 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 1024 "
            "--packing --logging_steps 1 --report_to none --use_peft --lora_r 32 --lora_alpha 16"
        ),
        cpu="--use_cpu --bf16 False",
    ),
    ScriptCase(
        name="gan",
        target="gan.py",
        tiny="--latent 8 --width 4 --batch-size 4 --samples 16 --workers 1 --epochs 1",
        convolutional=True,
    ),
    ScriptCase(
        name="batch_finder",
        target="batch_finder.py",
        tiny="--batch-size 8 --length 32 --hidden-size 32 --layers 2 --heads 2 --samples 32",
    ),
    ScriptCase(
        name="fsdp2",
        target="fsdp.py",
        tiny=TINY_PARALLEL,
        cpu="--cpu",
        processes=2,
        real_processes=8,
    ),
    ScriptCase(
        name="fsdp1",
        target="fsdp.py",
        tiny=f"--mode fsdp1 {TINY_PARALLEL}",
        real="--mode fsdp1",
        cpu="--cpu",
        processes=2,
        real_processes=8,
    ),
    ScriptCase(
        name="ddp",
        target="fsdp.py",
        tiny=f"--mode ddp {TINY_PARALLEL}",
        real="--mode ddp",
        cpu="--cpu",
        processes=2,
        real_processes=8,
    ),
    ScriptCase(
        name="tensor_parallel",
        target="fsdp.py",
        tiny=f"--mode tp {TINY_PARALLEL}",
        real="--mode tp",
        cpu="--cpu",
        processes=2,
        real_processes=8,
    ),
    ScriptCase(
        name="whisper",
        target="whisper.py",
        tiny="--width 32 --layers 2 --heads 2 --seconds 2 --vocab 128 --batch-size 2 --samples 8 --max-steps 3",
        convolutional=True,
    ),
    ScriptCase(
        name="graphs",
        target="graphs.py",
        tiny=(
            "--nodes 12 --degree 3 --features 4 --hidden 16 --layers 2 --batch-size 8 --samples 32 --workers 1 "
            "--epochs 1"
        ),
    ),
    ScriptCase(
        name="dpo",
        target="dpo.py",
        tiny=f"{TINY_LLAMA} --batch-size 2 --samples 8",
        cpu="--device cpu",
    ),
    ScriptCase(
        name="vision_language",
        target="vision_language.py",
        tiny=(
            "--image-size 28 --vision-width 32 --vision-layers 3 --hidden-size 32 --intermediate-size 64 --layers 2 "
            "--heads 8 --text-length 16 --batch-size 2 --samples 8"
        ),
        cpu="--device cpu",
    ),
    ScriptCase(
        name="ppo",
        target="ppo.py",
        tiny="--environments 4 --steps 16 --minibatches 2 --epochs 2 --hidden 16 --updates 3",
    ),
    ScriptCase(
        name="reinforce",
        target="reinforce.py",
        tiny=(
            "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 4 --kv-heads 2 --vocab 128 --prompts 2 "
            "--length 8 --answers 2 --steps 4"
        ),
    ),
    ScriptCase(
        name="speech",
        target="speech.py",
        tiny=(
            "--bands 8 --frames 40 --letters 6 --alphabet 8 --width 32 --layers 2 --heads 2 --batch-size 4 --samples 16"
        ),
        real="--amp",
    ),
    ScriptCase(
        name="pinn",
        target="pinn.py",
        tiny="--points 200 --width 16 --layers 2 --history 10 --steps 4",
    ),
]
