"""The command in a process that has no torch, nor what is installed for torch, and starts no other process."""

NOTHING_STARTED = """
import sys
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(refuse)
heavy = "torch", "torchvision", "transformers", "huggingface_hub", "safetensors", "numba"
sys.modules.update(dict.fromkeys(heavy))
from actbench.cli import main
main()
"""
