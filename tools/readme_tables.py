"""Writes README.md's tables from benchmarks/results/*.json. Nothing in them is typed by hand.

python tools/readme_tables.py

Tables are kept with the README's other made parts, between markers (see ``markers``).
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from markers import fill_file

ROOT = Path(__file__).resolve().parents[1]
PLAIN, BATCH_INVARIANT = "std", "bi"
NAMES = {PLAIN: "plain vLLM", BATCH_INVARIANT: "`VLLM_BATCH_INVARIANT=1`"}


def _name(mode: str) -> str:
    policy, _, runner = mode.partition("@")
    name = NAMES.get(policy, f"CoRun `{policy}`")
    return f"{name}, {runner.upper()} runner" if runner else name


def _cell(mode: dict[str, Any], plain: dict[str, Any], workload: str) -> str:
    speed = mode["workloads"][workload]["tokens_per_s"]
    share = speed / plain["workloads"][workload]["tokens_per_s"]
    return f"{speed:,.0f} ({share:.2f})"


def _equal(mode: dict[str, Any]) -> str:
    found = mode.get("determinism")
    if not found:
        return "not measured"
    of = found["requests"]
    return f"{found['tokens_equal']}/{of}, {found['logprobs_equal']}/{of}"


def throughput_table(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of throughput records, as ``benchmarks.throughput`` writes them.

    ValueError where a record has no run of plain vLLM to compare with.
    """
    lines: list[str] = []
    for record in records:
        modes = [mode for mode in record["modes"] if "error" not in mode]
        plain = next((mode for mode in modes if mode["mode"] == PLAIN), None)
        if plain is None:
            raise ValueError(f"the throughput record of {record['model']} has no plain vLLM in it")
        workloads = list(plain["workloads"])
        settings, hardware = record["settings"], record["hardware"]
        if lines:
            lines.append("")
        lines += [
            f"{record['model']} shape, random weights, vLLM {hardware['vllm']} on one "
            f"{hardware['gpu']}; {settings['requests']} requests at once, "
            f"`max_num_seqs` {settings['max_num_seqs']}:",
            "",
            "| mode | " + " | ".join(f"in/out {w}" for w in workloads) + " | alone = in a batch |",
            "|---" * (len(workloads) + 2) + "|",
        ]
        lines += [
            f"| {_name(mode['mode'])} | "
            + " | ".join(_cell(mode, plain, w) for w in workloads)
            + f" | {_equal(mode)} |"
            for mode in modes
        ]
    lines += [
        "",
        "Output tokens/s (share of plain vLLM in the same run). Last column: of 32 prompts at "
        "temperature 0.6, how many have the same tokens, and the same logprobs to the bit, alone "
        "and in a batch of 32.",
    ]
    return "\n".join(lines)


def throughput_records(directory: Path) -> list[dict[str, Any]]:
    """The throughput records under `directory`, in the order of their files' names."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    return [record for record in found if record.get("benchmark") == "throughput"]


def main() -> None:
    """Fill the README."""
    argparse.ArgumentParser(description="Write README.md's tables from the results.").parse_args()
    table = throughput_table(throughput_records(ROOT / "benchmarks" / "results"))
    fill_file(ROOT / "README.md", "throughput", table)


if __name__ == "__main__":
    main()
