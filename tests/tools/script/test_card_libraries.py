"""Libraries believe in the card that a script believes in."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cards import Card

from actbench.device.card import simulated_device


def run(code: str, before: str = "") -> None:
    """Run code inside the block, in a process of its own: libraries keep for ever what they once asked."""
    script = (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport torch\n"
        "from cards import Card, product\nfrom actbench.device.card import simulated_device\n"
        f"{textwrap.dedent(before)}\nwith simulated_device(Card()):\n" + textwrap.indent(textwrap.dedent(code), "    ")
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_build_without_cuda_believes_too() -> None:
    run(
        """
        assert torch.cuda.is_available() and torch.accelerator.device_count() == 1
        assert torch.backends.cuda.is_built() and torch.version.cuda
        assert torch.cuda.max_memory_allocated() == 5 * 2**30 and torch.cuda.mem_get_info()[0] == 16 * 2**30
        assert torch.cuda.get_arch_list() == ["sm_89"] and torch.cuda.nccl.version()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0), torch.cuda.nvtx.range("forward"):
            torch.cuda.synchronize()
        torch.manual_seed(3)
        """,
        before="""
        for name in [name for name in vars(torch._C) if name.startswith(("_cuda_", "_nccl", "_nvtx"))]:
            delattr(torch._C, name)
        torch._C._has_cuda, torch.version.cuda, torch.cuda._cudart = False, None, None
        torch._C._accelerator_getAccelerator = lambda: None
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        """,
    )


@pytest.mark.slow
def test_accelerate_believes() -> None:
    run("""
        from accelerate import Accelerator, PartialState, utils
        from accelerate.state import AcceleratorState
        from torch.overrides import TorchFunctionMode

        class Mapped(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "device"})

        for mixed, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            accelerator = Accelerator(mixed_precision=mixed)
            assert accelerator.device.type == "cuda" and (accelerator.scaler is not None) == (mixed == "fp16")
            with accelerator.autocast():
                assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == dtype
            AcceleratorState._reset_state(True)
        assert utils.is_cuda_available() and utils.is_bf16_available() and PartialState().device.type == "cuda"
        with Mapped():
            assert utils.get_max_memory()[0] == 16 * 2**30
        utils.memory.clear_device_cache(garbage_collection=True)
        assert torch.cuda.memory_reserved() == 4 * 2**30
    """)


@pytest.mark.exhaustive
def test_transformers_peft_and_trl_believe() -> None:
    run("""
        import peft, trl
        from peft.utils.other import infer_device
        from transformers import TrainingArguments
        from transformers.utils import is_torch_bf16_gpu_available, is_torch_cuda_available

        assert is_torch_cuda_available() and is_torch_bf16_gpu_available() and infer_device() == "cuda"
        for mixed in ("bf16", "fp16"):
            arguments = TrainingArguments(output_dir="unused", report_to=[], **{mixed: True})
            assert arguments.device == torch.device("cuda", 0) and arguments.n_gpu == 1
        assert trl.SFTConfig(output_dir="unused", report_to=[]).bf16
    """)


@pytest.mark.exhaustive
def test_lightning_picks_the_card() -> None:
    run("""
        from lightning import Fabric, Trainer
        from lightning.fabric.accelerators.cuda import num_cuda_devices
        from lightning.pytorch.accelerators import CUDAAccelerator

        assert num_cuda_devices() == 1 and CUDAAccelerator.is_available()
        asked = Trainer(accelerator="gpu", devices=1, precision="16-mixed", logger=False, enable_checkpointing=False)
        found = Trainer(logger=False, enable_checkpointing=False)
        for trainer in (asked, found):
            assert trainer.strategy.root_device == torch.device("cuda", 0)
        assert asked.precision_plugin.scaler.is_enabled() and isinstance(found.accelerator, CUDAAccelerator)
        assert Fabric(accelerator="cuda", devices=1).device.type == "cuda"
    """)


@pytest.mark.exhaustive
def test_libraries_of_models_import() -> None:
    run("""
        import bitsandbytes, diffusers, timm, torchmetrics, torchvision
        from diffusers import UNet2DConditionModel
        from diffusers.training_utils import EMAModel, free_memory

        free_memory()
        timm.utils.NativeScaler()
        assert torchmetrics.MeanMetric().device == torch.device("cpu")
    """)


def test_libraries_forget_what_they_were_told_before_and_inside() -> None:
    """Transformers asks once whether there is a card, and remembers the answer."""
    from transformers.utils.import_utils import is_torch_cuda_available

    before = is_torch_cuda_available()
    with simulated_device(Card()):
        inside = is_torch_cuda_available()

    assert (before, inside, is_torch_cuda_available()) == (False, True, False)
