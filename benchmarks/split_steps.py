"""Decode steps with few long requests, and with many short ones, with and without split decode.

    python -m benchmarks.split_steps --out FILE.json

Plain vLLM, CoRun's ``certified`` policy, and ``certified`` with split decode, each in a process of
its own. Needs a CUDA GPU. No certificate is needed: the engines start as ``corun certify`` starts
them. Weights are random.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import write_config
from corun.bench import machine
from corun.bench.mode_process import SPLIT
from corun.bench.step_child import Shape, Spec
from corun.bench.step_times import measure_apart
from corun.config import MEASURE

CASES = {"1 x 8k": [8192], "1 x 32k": [32_768], "8 x 8k": [8192] * 8, "256 x 1k": [1024] * 256}
ROWS = 256


def main() -> int:
    """Measure every mode and write one file; 1 where a mode failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b:8", help="a name of benchmarks/models.py")
    parser.add_argument("--modes", default=f"std,certified,{SPLIT}")
    parser.add_argument("--steps", type=int, default=16, help="steps to time, and to profile")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a mode may take")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = {**machine.stamp(), "model": args.model, "steps": args.steps, "us": {}, "failed": {}}
    with tempfile.TemporaryDirectory() as directory:
        model = str(write_config(args.model, Path(directory)))
        for mode in args.modes.split(","):
            spec = Spec(
                model=model,
                mode=mode,
                rows=ROWS,
                shapes=[Shape(name, lengths) for name, lengths in CASES.items()],
                steps=args.steps,
                random_weights=True,
                certificate=MEASURE,
                engine_args={"max_model_len": 34_000, "gpu_memory_utilization": 0.85},
            )
            try:
                entries = measure_apart(spec, args.timeout)
            except RuntimeError as e:
                record["failed"][mode] = str(e)
                print(f"{mode}: {e}", file=sys.stderr)
                continue
            record["us"][mode] = {
                e["context"]: {"step": e["wall_us"], "attention": e["by_type"]["attention"]}
                for e in entries
            }
            args.out.write_text(json.dumps(record, indent=1))
            for name, us in record["us"][mode].items():
                shown = ", ".join(f"{what} {value:,.0f} us" for what, value in us.items())
                print(f"{mode}: {name}: {shown}", flush=True)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
