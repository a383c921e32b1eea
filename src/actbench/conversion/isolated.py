"""``actbench convert`` as a task: what the process that converts does with the text it is sent."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import TypeAdapter

from actbench import schemes
from actbench.conversion.workload import convert_workload
from actbench.converted import ConversionReport, ConversionRequest
from actbench.paths import LONGEST_NAME


def convert(text: str) -> str:
    """Do what a :class:`ConversionRequest` asks, and return the :class:`ConversionReport`, both as JSON."""
    request = TypeAdapter(ConversionRequest).validate_json(text)
    case = request.case.model_copy(update={"scheme": schemes.build(request.case.scheme).spec})
    folder = request.output or Path(_folder_name(f"{case.model}-{case.scheme}"))
    report = convert_workload(case, None if request.dry_run else folder, force=request.force)
    return TypeAdapter(ConversionReport).dump_json(report).decode()


def _folder_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", text.removeprefix("hf:").removeprefix("torchvision:"))
    return name[:LONGEST_NAME].strip("-.")
