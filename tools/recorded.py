"""The records of benchmarks/results that are one file each: certificates, verifications, ..."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Records = Mapping[str, Record]
"""Records by the names of their files."""

DEFAULT_RUNNER = "vLLM's default"
_FIXED_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER=0": "V1", "VLLM_USE_V2_MODEL_RUNNER=1": "V2"}


def records_of(directory: Path, benchmark: str) -> dict[str, Record]:
    """The records of one kind under `directory`, by file name and in that order."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    return {name: r for name, r in found.items() if r.get("benchmark") == benchmark}


def runner(record: Record) -> str:
    """The model runner that the record's command asked for."""
    named = (name for word, name in _FIXED_RUNNER.items() if word in record["command"])
    return next(named, DEFAULT_RUNNER)
