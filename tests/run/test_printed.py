"""What a script prints comes to the streams of the command while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from io import StringIO

from actbench.run.printed import passed_on, printing_to


def test_what_a_process_and_its_children_print_is_passed_on_while_they_run(capfd):
    out, err = StringIO(), StringIO()
    with passed_on(out, err) as folder:
        with printing_to(str(folder)):
            os.write(1, "ü".encode())
            subprocess.run([sys.executable, "-c", "import sys; print('child'); print('bad', file=sys.stderr)"])
            deadline = time.monotonic() + 60
            while "child" not in out.getvalue():  # it comes before the block ends
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.write(1, b"\xff\n")
            os.write(1, b"\xc3")
        print("after")

    assert out.getvalue() == "üchild\n\ufffd\n\ufffd"
    assert err.getvalue() == "bad\n"
    assert capfd.readouterr().out == "after\n"
    assert not folder.exists()


def test_much_output_is_passed_on_whole():
    out = StringIO()
    with passed_on(out, StringIO()) as folder, printing_to(str(folder)):
        for _ in range(300):
            os.write(1, b"x" * 9999 + b"\n")

    assert out.getvalue() == ("x" * 9999 + "\n") * 300
