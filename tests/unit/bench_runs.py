"""`corun bench run` without engines: its arguments, a model to name, stand-ins for processes."""

import argparse
import json
from pathlib import Path

import bench_files

from corun.bench import run as bench_run

SMALL = "--count 2 --max-model-len 64 --workloads 8/4 --modes std,isolate"


def parse(model, out, *flags):
    """The arguments of a small benchmark, and `flags`."""
    parser = argparse.ArgumentParser()
    bench_run.add_arguments(parser)
    return parser.parse_args([str(model), "--out", str(out), *SMALL.split(), *flags])


def write_model(directory):
    """A model's directory, as far as a benchmark without engines looks into it."""
    config = {"model_type": "llama", "vocab_size": 500, "architectures": ["LlamaForCausalLM"]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without_processes(monkeypatch):
    """Writes a run file for each item instead of starting processes; gives the list of specs."""
    specs = []

    def execute(given, timeout_s, outcome):
        for spec in (started.spec for started in given):
            specs.append(spec)
            for item in spec.items:
                digest = json.loads(Path(item.requests).read_text())["digest"]
                mapping = bench_files.run(spec.mode, requests_digest=digest, repeat=item.repeat)
                Path(item.out).write_text(json.dumps(mapping))
                outcome.made += 1

    monkeypatch.setattr(bench_run, "_execute", execute)
    return specs
