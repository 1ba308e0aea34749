"""Output tokens/s of plain vLLM, batch-invariant vLLM and CoRun, side by side on one machine.

    python benchmarks/throughput.py --model qwen3-8b --modes std,bi,isolate --out result.json

Each mode runs in a process of its own, with the same memory limits and the same requests: random
token ids, all submitted at once, no early stop, temperature 0.6, no seeds from the user (plain vLLM
is fastest so). The weights are random, N(0, 0.02). `mode@runner` picks the model runner (std@v1).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROWS, TOKENS = 256, 8192


def _child_environment(mode: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CORUN_") or k == "CORUN_CACHE"}
    env |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONUNBUFFERED": "1",
    }
    name, _, runner = mode.partition("@")
    if runner:
        env["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[runner]
    if name == "bi":
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env


def _engine(mode: str, model_dir: str, args: argparse.Namespace):
    from corun.config import CoRunConfig
    from corun.verify.engine import open_engine

    policy = mode.partition("@")[0]
    plain = policy in ("std", "bi")
    return open_engine(
        model_dir,
        CoRunConfig("off" if plain else policy, certificate=None if plain else args.certificate),
        random_weights=args.random_weights,
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.tokens,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
    )


def measure(mode: str, model_dir: str, args: argparse.Namespace) -> None:
    """One mode, all workloads, in this process; writes ``args.out`` after each measurement."""
    import numpy as np
    import torch
    from vllm import SamplingParams

    started = time.perf_counter()
    llm = _engine(mode, model_dir, args)
    result: dict = {"mode": mode, "start_s": time.perf_counter() - started, "workloads": {}}
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    for workload in args.workloads.split(","):
        n_in, n_out = map(int, workload.split("/"))
        rng = np.random.default_rng(0)
        prompts = [
            {"prompt_token_ids": rng.integers(10, vocabulary - 10, n_in).tolist()}
            for _ in range(args.requests)
        ]
        params = SamplingParams(
            temperature=0.6, max_tokens=n_out, ignore_eos=True, detokenize=False
        )
        warm = SamplingParams(temperature=0.6, max_tokens=8, ignore_eos=True, detokenize=False)
        llm.generate(prompts[: args.rows], warm, use_tqdm=False)
        torch.cuda.synchronize()
        seconds = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        assert tokens == args.requests * n_out, tokens
        result["workloads"][workload] = {
            "output_tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / min(seconds),
        }
        print(mode, workload, f"{tokens / min(seconds):.0f} tok/s", flush=True)
        args.out.write_text(json.dumps(result))
    if args.check:
        result["determinism"] = check(llm, vocabulary)
        print(mode, result["determinism"], flush=True)
    if mode.partition("@")[0] not in ("std", "bi"):
        report = llm.collective_rpc("corun_report")[0]
        del report["rows"], report["violations"]  # one line for each prompt length
        result["report"] = report
    args.out.write_text(json.dumps(result))


def check(llm, vocabulary: int) -> dict:
    """The paper's suite (V-B) on this engine: 32 prompts alone and in a batch of 32, bit by bit."""
    import numpy as np
    from vllm import SamplingParams

    from corun.verify.compare import compare, total
    from corun.verify.record import record_of

    rng = np.random.default_rng(1)
    prompts = [
        {"prompt_token_ids": rng.integers(10, vocabulary - 10, n).tolist()}
        for n in rng.integers(8, 400, 32)
    ]
    params = SamplingParams(
        temperature=0.6, seed=42, max_tokens=48, logprobs=0, ignore_eos=True, detokenize=False
    )
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    batch = llm.generate(prompts, params, use_tqdm=False)
    found = total(
        compare(record_of(str(i), 42, a), record_of(str(i), 42, b))
        for i, (a, b) in enumerate(zip(alone, batch, strict=True))
    )
    names = ("requests", "tokens_equal", "logprobs_equal", "token_values", "logprob_values")
    return {name: getattr(found, name) for name in names}


def hardware() -> dict:
    """What it ran on."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": version("vllm"),
        "python": platform.python_version(),
    }


def main() -> None:
    """Run every mode and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a name of benchmarks/models.py")
    parser.add_argument("--modes", default="std,bi,isolate")
    parser.add_argument("--workloads", default="1024/128,256/512", help="in/out tokens")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument(
        "--certificate", help="a certificate's file; 'measure': unproven; default: the kept one"
    )
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--check", action="store_true", help="also compare alone and in a batch")
    parser.add_argument("--no-random-weights", dest="random_weights", action="store_false")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.child, args.model, args)
        return
    from benchmarks.models import write_config

    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(write_config(args.model, Path(directory)))
        modes = []
        for mode in args.modes.split(","):
            part = Path(directory, "part.json")
            part.unlink(missing_ok=True)
            flags = [a for a in sys.argv[1:] if a]
            command = [sys.executable, "-m", "benchmarks.throughput", *flags]
            command += ["--model", model_dir, "--out", str(part), "--child", mode]
            failed = None
            try:
                subprocess.run(
                    command, env=_child_environment(mode), timeout=args.timeout, check=True
                )
            except subprocess.TimeoutExpired:
                failed = f"the limit of {args.timeout:.0f} s stopped this process"
            except subprocess.CalledProcessError as e:
                failed = f"this process ended with exit status {e.returncode}"
            if part.exists():
                modes.append(json.loads(part.read_text()))
                if failed:
                    modes[-1]["note"] = f"{failed} after these measurements"
            else:
                modes.append({"mode": mode, "error": failed})
            record = {
                "benchmark": "throughput",
                "model": args.model,
                "command": "python -m benchmarks.throughput " + " ".join(sys.argv[1:]),
                "settings": {
                    "requests": args.requests,
                    "max_num_seqs": args.rows,
                    "max_num_batched_tokens": args.tokens,
                    "weights": "random N(0, 0.02)" if args.random_weights else "as given",
                    "temperature": 0.6,
                },
                "hardware": hardware(),
                "date": time.strftime("%Y-%m-%d"),
                "modes": modes,
            }
            args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
