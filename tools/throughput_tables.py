"""Tables of the older throughput records, of before ``corun bench run`` (throughput-*.json)."""

from collections import Counter

from recorded import Record, Records
from table_lines import head, notes, row

PLAIN, BATCH_INVARIANT = "std", "bi"
NAMES = {PLAIN: "plain vLLM", BATCH_INVARIANT: "`VLLM_BATCH_INVARIANT=1`"}
MISSING = "not measured"


def throughput_table(records: Records, link: str) -> str:
    """A table for each record. link: what their directory is called in links.

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
        lines += [*_table(f"[record]({link}/{file})", record, which), ""]
    lines.append(
        "Output tokens/s (share of plain vLLM in the same run). Last column: of 32 prompts at "
        "temperature 0.6, how many have the same tokens, and the same logprobs to the bit, alone "
        "and in a batch of 32."
    )
    return "\n".join(lines)


def _table(source: str, record: Record, which: str) -> list[str]:
    modes = [mode for mode in record["modes"] if "error" not in mode]
    plain = next((mode for mode in modes if mode["mode"] == PLAIN), None)
    if plain is None:
        raise ValueError(f"the throughput record of {record['model']} has no plain vLLM in it")
    workloads = list(dict.fromkeys(w for mode in (plain, *modes) for w in mode["workloads"]))
    settings, hardware = record["settings"], record["hardware"]
    title = (
        f"{record['model']} shape{which}, random weights, vLLM {hardware['vllm']} on one "
        f"{hardware['gpu']}; {settings['requests']} requests at once, "
        f"`max_num_seqs` {settings['max_num_seqs']} ({source}):"
    )
    lines = [title, "", *head("mode", *(f"in/out {w}" for w in workloads), "alone = in a batch")]
    for mode in modes:
        cells = (_cell(mode, plain, w) for w in workloads)
        lines.append(row((_name(mode["mode"]), *cells, _equal(mode))))
    return [*lines, *notes(_told(record, modes))]


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


def _told(record: Record, modes: list[Record]) -> list[str]:
    """What a record says about itself."""
    told = [f"{_name(mode['mode'])}: {mode['note']}." for mode in modes if mode.get("note")]
    return [*told, f"{record['note']}."] if record.get("note") else told
