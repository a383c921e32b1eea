"""The command in a process that has no torch and starts no other process."""

NOTHING_STARTED = """
import sys
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(refuse)
sys.modules["torch"] = None
from actbench.cli import main
main()
"""
