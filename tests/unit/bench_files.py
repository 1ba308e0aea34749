"""Small recorded files for tests of the benchmark's reading side."""

import copy
import json

from corun.bench.records import FORMAT

HARDWARE = {"device": "NVIDIA H200", "cores": 16}
VERSIONS = {"vllm": "0.25.0", "torch": "2.11.0"}
SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8192,
    "max_model_len": 4096,
    "kv_cache_tokens": 100_000,
    "dtype": "bfloat16",
    "weights": "random N(0, 0.02)",
    "temperature": 0.6,
    "seeded": True,
    "logprobs": True,
}

# Two requests: 5 tokens between 1.0 s and 3.0 s, 1 token at 2.0 s.
REQUESTS = [
    {"id": "0", "n_in": 10, "n_out": 5, "arrival_s": 0.0, "first_token_s": 1.0, "finish_s": 3.0},
    {"id": "1", "n_in": 20, "n_out": 1, "arrival_s": 0.5, "first_token_s": 2.0, "finish_s": 2.0},
]
# Two prefills by themselves, then two decode steps of four rows, of which two hold a token.
STEPS = {
    "end_s": [1.0, 2.0, 3.0, 4.0],
    "prefill_tokens": [10, 20, 0, 0],
    "decode_rows": [0, 0, 2, 2],
    "rows_run": [10, 20, 4, 4],
    "running": [1, 2, 2, 1],
    "waiting": [1, 0, 0, 0],
    "kv_used": [0.1, 0.3, 0.4, 0.2],
}


def run(mode="std", workload="1024/128", *, digests=("a", "b"), slots=4, **changed):
    """A run file's JSON: 6 output tokens in 4 seconds, 1.5 tokens/s."""
    record = {
        "format": FORMAT,
        "mode": mode,
        "workload": workload,
        "source": f"made of {workload}",
        "arrivals": "all",
        "requests_digest": f"set-{workload}",
        "count": 2,
        "order_seed": 0,
        "repeat": 0,
        "model": "tiny",
        "command": f"corun bench run tiny --modes {mode}",
        "date": "2026-11-30",
        "settings": {**SETTINGS, "max_num_seqs": slots},
        "hardware": HARDWARE,
        "versions": VERSIONS,
        "domain": None,
        "policy": {"name": mode, "reason": "asked for"},
        "start_s": 20.0,
        "warmup_s": 1.0,
        "wall_s": 4.0,
        "requests": [{**r, "digest": d} for r, d in zip(REQUESTS, digests, strict=True)],
        "steps": STEPS,
        "report": None,
    }
    return copy.deepcopy({**record, **changed})


def operators(**changed):
    """An operator file's JSON: a MatMul grid of 2 x 2 less one shape, and RMSNorm at two rows."""
    shapes = [(512, 512, 10.0, 20.0), (512, 1024, 20.0, 30.0), (1024, 512, 20.0, 250.0)]
    measured = [
        {
            "operator": "matmul",
            "rows": 32,
            "n": n,
            "k": k,
            "standard_us": std,
            "batch_invariant_us": bi,
        }
        for k, n, std, bi in shapes
    ]
    measured += [
        {
            "operator": "rmsnorm",
            "rows": rows,
            "n": 4096,
            "k": None,
            "standard_us": 4.0,
            "batch_invariant_us": 4.0 * rows,
        }
        for rows in (2, 8)
    ]
    return _measured("corun-bench-operators/1", **{"operators": measured, **changed})


def step_times(**changed):
    """A step file's JSON: 2 of plain vLLM's 10 ms, and 1 of batch-invariant's 20, in no kernel."""
    steps = [
        {
            "mode": mode,
            "rows": 32,
            "context": "1024",
            "total_us": total,
            "by_type": {"matmul": matmul, "attention": 3000.0, "moe": 0.0},
        }
        for mode, total, matmul in (("bi", 20_000.0, 16_000.0), ("std", 10_000.0, 5_000.0))
    ]
    return _measured("corun-bench-steps/1", model="tiny", steps=steps, **changed)


def server(**changed):
    """A server file's JSON: two runs of each of two modes; plain vLLM changed one of two texts."""
    texts = {"std": (["a", "b"], ["a", "x"]), "isolate": (["a", "b"], ["a", "b"])}
    result = {
        "output_throughput": 1234.5,
        "request_throughput": 2.5,
        **{f"{s}_ttft_ms": 30.0 for s in ("mean", "p50", "p99")},
        **{f"{s}_tpot_ms": 7.25 for s in ("mean", "p50", "p99")},
    }
    runs = [
        {
            "mode": mode,
            "workload": "1024/128",
            "arrivals": arrivals,
            "requests_digest": "set",
            "text_digests": digests,
            "result": result,
        }
        for mode, both in texts.items()
        for arrivals, digests in zip(("all", "closed:4"), both, strict=True)
    ]
    failed = {"pack": "no memory"}
    return _measured("corun-bench-server/1", model="tiny", runs=runs, failed=failed, **changed)


def _measured(format_, **changed):
    record = {"format": format_, "hardware": HARDWARE, "versions": VERSIONS, "date": "2026-11-30"}
    return {**record, "command": "corun bench measure", **changed}


def write(directory, *records):
    """Write each record to a file of its own; returns the directory."""
    directory.mkdir(exist_ok=True, parents=True)
    for i, record in enumerate(records):
        (directory / f"record-{i}.json").write_text(json.dumps(record))
    return directory
