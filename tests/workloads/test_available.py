from __future__ import annotations

import subprocess
import sys

from actbench import workloads
from actbench.workloads import names


def test_every_listed_model_is_understood_by_its_name() -> None:
    listed = workloads.available()

    assert {entry.source for entry in listed} == {"preset", "torchvision"}
    assert all(names.parse(entry.spec).name == entry.spec for entry in listed)
    assert len({entry.spec for entry in listed}) == len(listed) >= 100
    assert all(entry.task != "auto" and entry.note for entry in listed)


def test_importing_the_package_imports_neither_library() -> None:
    code = "import sys, actbench.workloads; print({'torchvision', 'transformers'} & set(sys.modules))"

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "set()"
