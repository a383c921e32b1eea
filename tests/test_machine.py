from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import psutil
import pytest

from actbench import machine


def test_the_machine_is_named_by_what_it_is_not_by_its_host():
    here = machine.machine()
    assert here.name.endswith(f"-{here.cores}c")
    assert platform.node() not in here.name
    assert here.memory_bytes <= psutil.virtual_memory().total
    assert here.cores <= psutil.cpu_count()


def test_a_machine_with_a_gpu_is_named_by_it(monkeypatch):
    monkeypatch.setattr(machine, "find_gpu", lambda: machine.Gpu("NVIDIA H200", 150_000_000_000, "580.1"))
    here = machine.machine()
    assert here.name == f"nvidia-h200-{here.cores}c"
    assert (here.gpu, here.gpu_memory_bytes, here.driver) == ("NVIDIA H200", 150_000_000_000, "580.1")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "intel-core-i7-8650u"),
        ("NVIDIA GeForce RTX 3060", "nvidia-geforce-rtx-3060"),
        ("../..", "machine"),
        ("", "machine"),
    ],
)
def test_names_are_made_fit_for_files(name, slug):
    assert machine._slug(name) == slug


def test_versions_are_those_that_python_would_import():
    import torch

    found = machine.versions()
    assert found.torch == torch.__version__
    assert found.cuda == torch.version.cuda
    assert found.python == platform.python_version()


def test_the_commit_is_that_of_the_checkout_that_actbench_is_imported_from():
    root = Path(machine.__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("actbench is not imported from a checkout")
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)

    assert machine.versions().commit == head.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_a_checkout_is_dirty_when_its_code_differs_not_when_it_holds_results(checkout):
    commit, dirty = machine._checkout(checkout)
    assert len(commit) == 40
    assert dirty is False
    (checkout / "results.jsonl").write_text("{}")
    assert machine._checkout(checkout) == (commit, False)
    (checkout / "src" / "code.py").write_text("2")
    assert machine._checkout(checkout) == (commit, True)


def test_an_installed_package_inside_a_checkout_of_something_else_has_no_commit(checkout, tmp_path_factory):
    assert machine._checkout(checkout / "src") == (None, None)
    assert machine._checkout(tmp_path_factory.mktemp("nowhere")) == (None, None)


@pytest.fixture
def control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")

    def write(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_without_control_groups_nothing_is_limited(control_group):
    assert (machine.memory_limit_bytes(), machine.memory_left_bytes(), machine.quota_cores()) == (None, None, None)
    control_group("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"})
    assert (machine.memory_limit_bytes(), machine.memory_left_bytes(), machine.quota_cores()) == (None, None, None)


def test_version_2_limits_of_the_groups_above_count_too(control_group):
    control_group(
        "0::/job/step\n",
        {
            "job/memory.max": "1000\n",
            "job/memory.current": "700\n",
            "job/memory.stat": "anon 500\ninactive_file 150\n",
            "job/step/memory.max": "2000\n",
            "job/step/memory.current": "600\n",
            "job/cpu.max": "150000 100000\n",
        },
    )
    assert machine.memory_limit_bytes() == 1000
    assert machine.memory_left_bytes() == 1000 - 700 + 150
    assert machine.quota_cores() == 2


def test_version_1_limits_are_read_and_its_huge_number_is_none(control_group):
    files = {
        "memory/job/memory.limit_in_bytes": "1000\n",
        "memory/job/memory.usage_in_bytes": "400\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu/job/cpu.cfs_quota_us": "300000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n",
    }
    control_group("9:memory:/job\n3:cpu:/job\n", files)
    assert machine.memory_limit_bytes() == 1000
    assert machine.memory_left_bytes() == 600
    assert machine.quota_cores() == 3


def test_the_machine_is_as_small_as_its_container(control_group):
    control_group(
        "0::/\n", {"memory.max": "1073741824\n", "memory.current": "73741824\n", "cpu.max": "100000 100000\n"}
    )
    here = machine.machine()
    assert (here.memory_bytes, here.cores) == (2**30, 1)
    assert machine.available_memory_bytes() == 1_000_000_000


@pytest.fixture
def driver(monkeypatch):
    """Stand in for the driver's library: four GPUs, of which ``parted`` are divided."""

    class Driver:
        NVMLError = OSError
        parted = ()
        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlDeviceGetCount = staticmethod(lambda: 4)
        nvmlDeviceGetHandleByUUID = staticmethod(str)
        nvmlDeviceGetName = staticmethod(lambda handle: f"gpu {handle}".encode())
        nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}")
        nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")

        @staticmethod
        def nvmlDeviceGetHandleByIndex(index):
            if index >= 4:
                raise OSError("no such device")
            return str(index)

        @staticmethod
        def nvmlDeviceGetMemoryInfo(handle):
            return type("Memory", (), {"total": 16})

        @classmethod
        def nvmlDeviceGetMigMode(cls, handle):
            if handle == "3":
                raise OSError("cannot be parted")
            return [handle in cls.parted, False]

    monkeypatch.setattr(machine, "pynvml", Driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Driver


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["gpu 0", "gpu 1", "gpu 2", "gpu 3"]),
        ("2, 1", ["gpu 2", "gpu 1"]),
        ("GPU-ab", ["gpu GPU-ab"]),
        ("1,-1,2", ["gpu 1"]),
        ("1,7,2", ["gpu 1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_gpus_are_those_that_are_visible(driver, monkeypatch, visible, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = machine.find_gpus()

    assert [gpu.name for gpu in found] == expected
    assert all((gpu.memory_bytes, gpu.driver) == (16, "580.1") for gpu in found)
    assert machine.find_gpu() == (found[0] if found else None)


def test_a_gpu_has_the_name_that_cuda_knows_it_by_and_a_parted_one_has_none(driver):
    driver.parted = ("1",)

    assert [gpu.uuid for gpu in machine.find_gpus()] == ["GPU-0", None, "GPU-2", "GPU-3"]


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch):
    class Driver:
        NVMLError = OSError

        @staticmethod
        def nvmlInit():
            raise OSError("no driver")

    monkeypatch.setattr(machine, "pynvml", Driver)
    assert machine.find_gpu() is None


def test_processes_that_were_ended_for_want_of_memory_are_counted(monkeypatch, tmp_path):
    membership, root, vmstat = tmp_path / "membership", tmp_path / "cgroup", tmp_path / "vmstat"
    for name, path in (("_MEMBERSHIP", membership), ("_CGROUPS", root), ("_VMSTAT", vmstat)):
        monkeypatch.setattr(machine, name, path)
    assert machine.memory_kills() is None
    vmstat.write_text("nr_free_pages 7\noom_kill 5\n")
    assert machine.memory_kills() == 5

    membership.write_text("0::/a/b\n")
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert machine.memory_kills() == 2
