"""The process of one mode of ``corun bench steps``: one engine, every shape, one answer file.

Each shape is a turn among the engines that were started together (``corun.bench.turns``).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench.mode_process import config_of, engine_args_of
from corun.bench.records import BESIDE
from corun.bench.turns import Turns
from corun.jobs.files import write_json


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests that decode together. context: as the user gave it; lengths: of their prompts."""

    context: str
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Spec:
    """What one process measures. rows: max_num_seqs. engine_args: more keywords of vLLM's LLM."""

    model: str
    mode: str
    rows: int
    shapes: list[Shape]
    steps: int
    random_weights: bool
    certificate: str | None
    engine_args: dict[str, Any]


def measure(spec: Spec, turns: Turns) -> list[dict[str, Any]]:
    """Measure every shape on one engine, each in its turn; the entries of the file's "steps"."""
    from corun.bench.step_profile import measure_steps
    from corun.verify.engine import close_engine, defaults, open_engine

    if spec.engine_args.get("tensor_parallel_size", 1) != 1:
        raise ValueError("steps are profiled in one process; tensor_parallel_size must be 1")
    config = config_of(spec.mode, spec.certificate)
    keywords = {**defaults(config, spec.rows), **spec.engine_args, **engine_args_of(spec.mode)}
    llm = open_engine(spec.model, config, random_weights=spec.random_weights, **keywords)
    entries = []
    try:
        turns.ready()
        for i, shape in enumerate(spec.shapes):
            with turns.take(i) as beside:
                found = measure_steps(llm, shape.lengths, steps=spec.steps, seed=i)
            entries.append(
                {
                    "mode": spec.mode,
                    "rows": len(shape.lengths),
                    "context": shape.context,
                    BESIDE: beside,
                    "total_us": found.total_us,
                    "wall_us": found.wall_us,
                    "by_type": found.by_type,
                    "unclassified": [
                        {"name": name, "us": us} for name, us in found.unclassified.items()
                    ],
                }
            )
        turns.leave()
    finally:
        close_engine(llm)
    return entries


def main(spec_file: str, answer_file: str, seat_file: str) -> None:
    """Read a Spec and a Seat as JSON, measure, write the entries as JSON."""
    given = json.loads(Path(spec_file).read_text())
    shapes = [Shape(**shape) for shape in given.pop("shapes")]
    write_json(answer_file, measure(Spec(shapes=shapes, **given), Turns.read(seat_file)))


if __name__ == "__main__":
    main(*sys.argv[1:])
