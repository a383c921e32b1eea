"""What the driver's tools say of a simulated card, by a command or by pynvml, is what torch says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pynvml
import pytest
import torch

import actbench
from actbench.model.context import CONTEXT_BYTES
from actbench.units import MIB

ASKED = "--query-gpu=name,memory.total,memory.used,memory.free,driver_version,index,uuid,utilization.gpu"
HELD = 256 * MIB


def by_run(words: str) -> str:
    return subprocess.run(["nvidia-smi", *words.split()], capture_output=True, text=True, check=True).stdout


def by_popen(words: str) -> str:
    with subprocess.Popen(["nvidia-smi", *words.split()], stdout=subprocess.PIPE, text=True) as process:
        return process.communicate()[0]


def by_popen_of_os(words: str) -> str:
    with os.popen(f"nvidia-smi {words}") as told:
        return told.read()


def by_system(words: str) -> str:
    assert os.system(f"nvidia-smi {words} > told.txt") == 0
    with open("told.txt", encoding="utf-8") as file:
        return file.read()


WAYS: dict[str, Callable[[str], str]] = {
    "run": by_run,
    "check_output of a shell": lambda words: subprocess.check_output(f"nvidia-smi {words}", shell=True, text=True),
    "a path": lambda words: subprocess.check_output([str(shutil.which("nvidia-smi")), *words.split()], text=True),
    "a copy of the environment": lambda words: subprocess.check_output(
        ["nvidia-smi", *words.split()], text=True, env={**os.environ, "LC_ALL": "C"}
    ),
    "Popen": by_popen,
    "os.popen": by_popen_of_os,
    "os.system": by_system,
}


def test_nvidia_smi_answers_each_way_of_asking(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    before = os.environ.get("PATH")

    with actbench.simulate("rtx-4090"):
        held = torch.empty(HELD, dtype=torch.uint8, device="cuda")
        found = {name: ask(f"{ASKED} --format=csv,noheader,nounits").strip() for name, ask in WAYS.items()}
        _, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        del held

    total, used = total // MIB, (HELD + CONTEXT_BYTES) // MIB
    values = ["rtx-4090", total, used, total - used, "580.65.06", 0, f"GPU-{properties.uuid}", 100]
    assert found == dict.fromkeys(WAYS, ", ".join(map(str, values)))
    assert os.environ.get("PATH") == before


def test_nvidia_smi_says_what_the_card_has_now() -> None:
    with actbench.simulate("rtx-4090"):
        before = by_run("--query-gpu=memory.used --format=csv")
        held = torch.empty(HELD, dtype=torch.uint8, device="cuda")
        after = by_run("--query-gpu=memory.used --format=csv")
        del held

    assert before == f"memory.used [MiB]\n{CONTEXT_BYTES // MIB} MiB\n"
    assert after == f"memory.used [MiB]\n{(HELD + CONTEXT_BYTES) // MIB} MiB\n"


def test_nvidia_smi_lists_cards_and_processes_and_says_what_it_does_not_answer() -> None:
    with actbench.simulate("h100-80gb", processes=2):
        cards = by_run("-L").splitlines()
        one = by_run("-i 1 --query-gpu=gpu_name,count,gpu_serial --format=csv,noheader").strip()
        processes = by_run("--query-compute-apps=pid,process_name,used_memory --format=csv").splitlines()
        summary = by_run("")
        refused = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
        missing = subprocess.run(["nvidia-smi", "-L", "-i", "7"], capture_output=True, text=True, check=False)

    assert [line.partition(" (")[0] for line in cards] == ["GPU 0: h100-80gb", "GPU 1: h100-80gb"]
    assert one == "h100-80gb, 2, [N/A]"
    of_context = f"{CONTEXT_BYTES // MIB} MiB"
    assert processes == ["pid, process_name, used_gpu_memory [MiB]", f"{os.getpid()}, {sys.executable}, {of_context}"]
    assert f"CUDA Version: {torch.version.cuda or '12.8'}" in summary
    assert f"{CONTEXT_BYTES // MIB}MiB / " in summary
    assert refused.returncode == 2
    assert "topo -m" in refused.stderr
    assert (missing.returncode, missing.stdout) == (6, "No devices were found for -i 7\n")


def test_pynvml_answers_and_refuses_what_a_card_may_lack() -> None:
    own = pynvml.nvmlDeviceGetMemoryInfo
    with actbench.simulate("rtx-4090"):
        held = torch.empty(HELD, dtype=torch.uint8, device="cuda")
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory, newer = pynvml.nvmlDeviceGetMemoryInfo(card), pynvml.nvmlDeviceGetMemoryInfo(card, version=2)
        uuid = pynvml.nvmlDeviceGetUUID(card)

        assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count() == 1
        assert pynvml.nvmlDeviceGetName(card) == torch.cuda.get_device_name()
        assert (memory.free, memory.total) == (newer.free, newer.total) == torch.cuda.mem_get_info()
        assert memory.used == HELD + CONTEXT_BYTES
        assert pynvml.nvmlDeviceGetHandleByUUID(uuid) == card
        assert pynvml.nvmlDeviceGetCudaComputeCapability(card) == torch.cuda.get_device_capability()
        assert pynvml.nvmlDeviceGetComputeRunningProcesses(card)[0].pid == os.getpid()
        assert pynvml.nvmlDeviceGetUtilizationRates(card).gpu == torch.cuda.utilization()
        with pytest.raises(pynvml.NVMLError, match="Not Supported"):
            pynvml.nvmlDeviceGetFanSpeed(card)
        with pytest.raises(pynvml.NVMLError, match="Invalid Argument"):
            pynvml.nvmlDeviceGetHandleByIndex(1)
        del held

    assert pynvml.nvmlDeviceGetMemoryInfo is own
