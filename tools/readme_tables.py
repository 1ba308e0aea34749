"""Writes README.md's tables from benchmarks/results/*.json. Nothing in them is typed by hand.

python tools/readme_tables.py

Tables are kept with the README's other made parts, between markers (see ``markers``).
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from markers import fill_file
from readme_bench import bench_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
PLAIN, BATCH_INVARIANT = "std", "bi"
NAMES = {PLAIN: "plain vLLM", BATCH_INVARIANT: "`VLLM_BATCH_INVARIANT=1`"}
MISSING = "not measured"
FIXED_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER=0": "V1", "VLLM_USE_V2_MODEL_RUNNER=1": "V2"}
NOT_CHECKED = "not checked"

Record = dict[str, Any]
Records = Mapping[str, Record]
"""Records by the names of their files."""


def _link(file: str, text: str) -> str:
    return f"[{text}]({RESULTS}/{file})"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*names: str) -> list[str]:
    return [_row(names), "|---" * len(names) + "|"]


def _name(mode: str) -> str:
    policy, _, runner = mode.partition("@")
    name = NAMES.get(policy, f"CoRun `{policy}`")
    return f"{name}, {runner.upper()} runner" if runner else name


def _cell(mode: Record, plain: Record, workload: str) -> str:
    """Tokens/s and share of plain vLLM, as far as they were measured."""
    if workload not in mode["workloads"]:
        return MISSING
    speed = mode["workloads"][workload]["tokens_per_s"]
    if workload not in plain["workloads"]:
        return f"{speed:,.0f}"
    return f"{speed:,.0f} ({speed / plain['workloads'][workload]['tokens_per_s']:.2f})"


def _equal(mode: Record) -> str:
    found = mode.get("determinism")
    if not found:
        return MISSING
    of = found["requests"]
    return f"{found['tokens_equal']}/{of}, {found['logprobs_equal']}/{of}"


def _notes(record: Record, modes: list[Record]) -> list[str]:
    """What a record says about itself, one line each."""
    told = [f"{_name(mode['mode'])}: {mode['note']}." for mode in modes if mode.get("note")]
    if record.get("note"):
        told.append(f"{record['note']}.")
    return [f"- {text}" for text in told]


def _throughput(file: str, record: Record, which: str) -> list[str]:
    modes = [mode for mode in record["modes"] if "error" not in mode]
    plain = next((mode for mode in modes if mode["mode"] == PLAIN), None)
    if plain is None:
        raise ValueError(f"the throughput record of {record['model']} has no plain vLLM in it")
    workloads = list(dict.fromkeys(w for mode in (plain, *modes) for w in mode["workloads"]))
    settings, hardware = record["settings"], record["hardware"]
    title = (
        f"{record['model']} shape{which}, random weights, vLLM {hardware['vllm']} on one "
        f"{hardware['gpu']}; {settings['requests']} requests at once, "
        f"`max_num_seqs` {settings['max_num_seqs']} ({_link(file, 'record')}):"
    )
    lines = [title, "", *_head("mode", *(f"in/out {w}" for w in workloads), "alone = in a batch")]
    for mode in modes:
        cells = (_cell(mode, plain, w) for w in workloads)
        lines.append(_row((_name(mode["mode"]), *cells, _equal(mode))))
    if notes := _notes(record, modes):
        lines += ["", *notes]
    return lines


def throughput_table(records: Records) -> str:
    """Markdown tables of throughput records, as ``benchmarks.throughput`` writes them.

    A mode that ended in an error is left out; what a mode lacks is ``MISSING``. ValueError where a
    record has no run of plain vLLM to compare with.
    """
    runs = Counter(record["model"] for record in records.values())
    seen: Counter[str] = Counter()
    lines: list[str] = []
    for file, record in records.items():
        model = record["model"]
        seen[model] += 1
        which = f", run {seen[model]} of {runs[model]}" if runs[model] > 1 else ""
        lines += [*_throughput(file, record, which), ""]
    lines.append(
        "Output tokens/s (share of plain vLLM in the same run). Last column: of 32 prompts at "
        "temperature 0.6, how many have the same tokens, and the same logprobs to the bit, alone "
        "and in a batch of 32."
    )
    return "\n".join(lines)


def _certified_model(record: Record) -> str:
    """The model as the command names it; a certificate itself holds only a hash of its shape."""
    words = record["command"].split()
    return str(words[words.index("certify") + 1])


def _classes(certificate: Record) -> str:
    """How many shape classes each operation has: those with one are counted, others named."""
    rows = certificate["rows"]
    by_number: dict[int, list[str]] = {}
    for claim in rows:
        by_number.setdefault(len(claim["classes"]), []).append(claim["name"])
    single = len(by_number.pop(1, []))
    parts = [f"1: {single} of {len(rows)} operations"] if single else []
    parts += [f"{number}: {', '.join(names)}" for number, names in sorted(by_number.items())]
    parts += [f"depends on place: {c['name']}" for c in rows if c["variant"]]
    return "; ".join(parts)


def _properties(certificate: Record) -> str:
    """How many step properties hold for each operation, and which do not."""
    parts = []
    for operation in dict.fromkeys(claim["operation"] for claim in certificate["steps"]):
        claims = [c for c in certificate["steps"] if c["operation"] == operation]
        broken = [c["name"] for c in claims if not c["holds"]]
        text = f"{operation}: {len(claims) - len(broken)} of {len(claims)}"
        parts.append(text + (f" (not {', '.join(broken)})" if broken else ""))
    return "; ".join(parts)


def _engine_check(certificate: Record) -> str:
    check = certificate["engine"]
    if not check:
        return NOT_CHECKED
    verdict = "equal" if check["equal"] else "differ"
    return f"{check['tokens']:,} tokens, {check['logprobs']:,} logprobs: {verdict}"


def certificate_table(records: Records) -> str:
    """A Markdown table of certificates, as ``corun certify --json`` writes them."""
    lines = _head(
        "model, device",
        "shape classes",
        "step properties that hold",
        "values compared",
        "whole engine",
        "seconds",
        "allowed",
    )
    for file, record in records.items():
        certificate = record["certificate"]
        domain = certificate["domain"]
        dtype = domain["dtype"].removeprefix("torch.")
        values = sum(c["values"] for c in (*certificate["rows"], *certificate["steps"]))
        model = _link(file, _certified_model(record))
        allowed = [f"`{p['policy']}`" for p in record["policies"] if p["allowed"]]
        cells = (
            f"{model}, {dtype}, {domain['device']}",
            _classes(certificate),
            _properties(certificate),
            f"{values:,}",
            _engine_check(certificate),
            f"{record['seconds']:.1f}",
            ", ".join(allowed) or "none",
        )
        lines.append(_row(cells))
    if notes := [f"- {_certified_model(r)}: {r['note']}." for r in records.values() if "note" in r]:
        lines += ["", *notes]
    lines += [
        "",
        "Shape classes: how many sets of row counts with equal bits each operation has, among the "
        "counts that were tried. Seconds: probes and whole-engine check, without starting engines.",
    ]
    return "\n".join(lines)


def _runner(command: str) -> str:
    return next((name for word, name in FIXED_RUNNER.items() if word in command), "vLLM's default")


def _reuse(record: Record) -> str:
    """What the step audit counted, over all engines; older records did not count it."""
    audits = record["audit"]
    if not audits or any("mixed_steps" not in audit for audit in audits):
        return "not counted"
    mixed, preempted, cached = (
        sum(audit[name] for audit in audits)
        for name in ("mixed_steps", "preempted", "cached_tokens")
    )
    return f"{mixed:,} / {preempted:,} / {cached:,}"


def verify_table(records: Records) -> str:
    """A Markdown table of verifications, one line each, as ``corun verify --json`` writes them."""
    lines = _head(
        "policy",
        "model",
        "runner",
        "suite, engines",
        "equal tokens",
        "equal logprobs",
        "mixed steps / preempted / cached tokens",
        "verdict",
    )
    for file, record in records.items():
        total, settings = record["total"], record["settings"]
        cells = (
            f"`{record['policy']}`",
            f"{_link(file, record['model'])}, {record['device']}",
            _runner(record["command"]),
            f"{settings['suite']}, {settings['engines']}",
            f"{total['token_values_equal']:,} of {total['token_values']:,}",
            f"{total['logprob_values_equal']:,} of {total['logprob_values']:,}",
            _reuse(record),
            record["verdict"],
        )
        lines.append(_row(cells))
    noted = [r for r in records.values() if "note" in r]
    notes = [f"- {r['model']}, {_runner(r['command'])}: {r['note']}." for r in noted]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def records_of(directory: Path, benchmark: str) -> dict[str, Record]:
    """The records of one kind under `directory`, by file name and in that order."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    return {name: r for name, r in found.items() if r.get("benchmark") == benchmark}


def parts(directory: Path) -> dict[str, str]:
    """The README's parts that the records under `directory` fill, by the names of their markers."""
    certificates = certificate_table(records_of(directory, "certify"))
    verified = verify_table(records_of(directory, "verify"))
    return {
        "bench": bench_tables(directory, RESULTS),
        "throughput": throughput_table(records_of(directory, "throughput")),
        "certificates": f"{certificates}\n\nWhat `corun verify` found:\n\n{verified}",
    }


def main() -> None:
    """Fill the README."""
    argparse.ArgumentParser(description="Write README.md's tables from the results.").parse_args()
    for name, body in parts(ROOT / RESULTS).items():
        fill_file(ROOT / "README.md", name, body)


if __name__ == "__main__":
    main()
