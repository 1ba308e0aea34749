import argparse
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from corun.bench import step_child, step_profile, step_times
from corun.bench.kernel_types import TYPES
from corun.bench.operator_records import read_step_times
from corun.bench.step_child import Shape, Spec
from corun.bench.step_profile import WARM_STEPS, StepTimes, measure_steps
from corun.bench.step_times import parse_context, shapes_of
from corun.bench.turns import Seat, Turns
from corun.engine import arguments


class Engine:
    """Prefills one request a step, then decodes all: with one matmul and one softmax a step."""

    def __init__(self, rows=8, model_len=500, blocks=100, stalls=False):
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=64),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=blocks),
            model_config=SimpleNamespace(max_model_len=model_len, get_vocab_size=lambda: 100),
        )
        self.stalls = stalls
        self.queued, self.running, self.prompts, self.matmuls = [], {}, [], 0

    def add_request(self, name, prompt, params):
        self.queued.append((name, params.max_tokens))
        self.prompts.append(prompt["prompt_token_ids"])
        assert params.ignore_eos and params.seed is None

    def abort_request(self, names):
        self.queued = []
        self.running = {}

    def has_unfinished_requests(self):
        return bool(self.queued or self.running)

    def step(self):
        if self.queued:
            name, left = self.queued.pop(0)
            self.running[name] = left
            rows = [name]
        else:
            rows = list(self.running)[: 1 if self.stalls else None]
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            torch.softmax(torch.ones(len(rows), 64), dim=-1)
            torch.i0(torch.ones(4))
            self.matmuls += 1
        for name in rows:
            self.running[name] -= 1
            assert self.running[name] >= 0
        return [SimpleNamespace(request_id=name, outputs=[None]) for name in rows]


def profiled(engine, lengths, steps):
    return measure_steps(SimpleNamespace(llm_engine=engine), lengths, steps=steps)


def test_decode_steps_are_timed_and_sorted():
    engine = Engine()
    found = profiled(engine, [10, 20, 30], steps=4)
    assert engine.matmuls == 1 + WARM_STEPS + 4 + 4
    assert [len(p) for p in engine.prompts] == [10, 20, 30]
    assert min(min(p) for p in engine.prompts) >= 10 and max(map(max, engine.prompts)) < 90
    assert not engine.has_unfinished_requests()
    assert set(found.by_type) == set(TYPES) and found.wall_us > 0
    assert found.by_type["matmul"] > 0 and found.by_type["sampling"] > 0
    assert found.by_type["norm"] == found.by_type["moe"] == found.by_type["attention"] == 0
    assert 0 < found.unclassified["aten::i0"] <= found.by_type["other"]
    assert found.total_us >= max(found.wall_us, sum(found.by_type.values()))


def test_the_total_holds_idle_time_and_every_operator():
    assert StepTimes(10.0, {"a": 3.0, "b": 4.0}, {}).total_us == 10.0
    assert StepTimes(5.0, {"a": 3.0, "b": 4.0}, {}).total_us == 7.0


@pytest.mark.parametrize(
    ("engine", "lengths", "what"),
    [
        (Engine(rows=2), [5, 5, 5], "max_num_seqs=2"),
        (Engine(model_len=50), [5, 45], "max_model_len=50"),
        (Engine(blocks=9), [40, 40, 40], "has 9 blocks"),
    ],
)
def test_what_does_not_fit_is_refused(engine, lengths, what):
    with pytest.raises(ValueError, match=what):
        profiled(engine, lengths, steps=2)
    assert not engine.prompts


def test_requests_that_never_decode_together_are_an_error():
    engine = Engine(stalls=True)
    with pytest.raises(RuntimeError, match="2 requests did not decode together"):
        profiled(engine, [5, 5], steps=2)
    assert not engine.has_unfinished_requests()


def test_a_profiler_that_sees_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr("corun.bench.step_profile._host_times", lambda profiler, steps: [])
    with pytest.raises(RuntimeError, match="saw nothing"):
        profiled(Engine(), [5, 5], steps=2)


def test_small_chunks_take_more_steps_to_start():
    engine = Engine()
    engine.vllm_config.scheduler_config.max_num_scheduled_tokens = 4
    few = step_profile._steps_to_start(Engine().vllm_config, [40, 50])
    assert step_profile._steps_to_start(engine.vllm_config, [40, 50]) == few + 45 - 2


def test_contexts():
    assert parse_context("1024", 3) == [1024] * 3
    assert parse_context("128-8192", 4) == [128, 512, 2048, 8192]
    assert parse_context("100-200", 1) == [100]
    for bad in ("", "x", "0", "9-3", "5-", "-5"):
        with pytest.raises(ValueError, match="context"):
            parse_context(bad, 2)
    assert shapes_of("1,2", "8,4-16") == [
        Shape("8", [8]),
        Shape("4-16", [4]),
        Shape("8", [8, 8]),
        Shape("4-16", [4, 16]),
    ]
    for bad in ("", "1,x", "0"):
        with pytest.raises(ValueError, match="--requests"):
            shapes_of(bad, "8")


@pytest.fixture
def args(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    parser = argparse.ArgumentParser()
    step_times.add_arguments(parser)

    def parse(*flags):
        return parser.parse_args([str(tmp_path), f"--out={tmp_path / 'steps.json'}", *flags])

    return parse


def entry(spec):
    by_type = {name: 10.0 * i for i, name in enumerate(TYPES)}
    return {
        "mode": spec.mode,
        "rows": len(spec.shapes[0].lengths),
        "context": spec.shapes[0].context,
        "total_us": 200.0,
        "wall_us": 200.0,
        "by_type": by_type,
        "unclassified": [{"name": "odd", "us": 50.0}],
    }


def test_modes_end_in_one_file_that_reads_back(args, monkeypatch, tmp_path, capsys):
    asked = []

    def measure_apart(specs, timeout_s):
        (spec,) = specs
        asked.append(spec)
        return ["no such kernels" if spec.mode == "bi" else [entry(spec)]]

    monkeypatch.setattr(step_times, "measure_apart", measure_apart)
    flags = ("--modes=std@v1,bi,isolate", "--requests=4", "--context=8-64", "--certificate=c")
    assert step_times.run(args(*flags, "--engine-arg", "max_model_len=128")) == 2
    given = read_step_times(tmp_path / "steps.json")
    assert [(s.mode, s.rows, s.context, s.total_us) for s in given.steps] == [
        ("std@v1", 4, "8-64", 200.0),
        ("isolate", 4, "8-64", 200.0),
    ]
    raw = json.loads((tmp_path / "steps.json").read_text())
    assert raw["failed"] == {"bi": "no such kernels"} and raw["settings"]["max_num_seqs"] == 4
    assert [s.rows for s in asked] == [4, 4, 4]
    assert asked[0].engine_args == {"max_model_len": 128} and asked[0].certificate == "c"
    assert "bi: no such kernels" in capsys.readouterr().err


def test_nothing_measured_writes_nothing(args, monkeypatch, tmp_path):
    def measure_apart(specs, timeout_s):
        return ["no"]

    monkeypatch.setattr(step_times, "measure_apart", measure_apart)
    with pytest.raises(RuntimeError, match="nothing was written"):
        step_times.run(args())
    assert not (tmp_path / "steps.json").exists()
    with pytest.raises(ValueError, match="no mode 'fast'"):
        step_times.run(args("--modes=fast"))
    with pytest.raises(ValueError, match="--steps"):
        step_times.run(args("--steps=0"))


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Gives a function that puts a module in the child's place."""

    def put(source):
        (tmp_path / "stand_in.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        monkeypatch.setattr(step_times, "CHILD", "stand_in")

    return put


SPEC = Spec("m", "bi", 4, [Shape("8", [8, 8])], 2, False, None, {"dtype": "half"})


def test_a_mode_runs_in_a_process_of_its_own(child):
    child(
        "import json, os, sys\n"
        "given = json.load(open(sys.argv[1]))\n"
        "given['env'] = [os.environ[n] for n in"
        " ('VLLM_BATCH_INVARIANT', 'VLLM_ENABLE_V1_MULTIPROCESSING')]\n"
        "json.dump([given], open(sys.argv[2], 'w'))\n"
    )
    ((given,),) = step_times.measure_apart([SPEC], 60)
    assert given.pop("env") == ["1", "0"]
    given["shapes"] = [Shape(**shape) for shape in given["shapes"]]
    assert Spec(**given) == SPEC


def test_modes_are_up_together_and_measured_in_turn(child, tmp_path):
    child(
        "import json, sys, time\n"
        "from corun.bench.turns import Turns\n"
        "given, turns = json.load(open(sys.argv[1])), Turns.read(sys.argv[3])\n"
        "if given['mode'] == 'isolate': sys.exit(4)\n"
        "turns.ready()\n"
        "found = []\n"
        "for i, shape in enumerate(given['shapes']):\n"
        "    with turns.take(i) as beside:\n"
        "        began = time.monotonic()\n"
        "        time.sleep(0.05)\n"
        "        found.append([began, time.monotonic(), beside])\n"
        "turns.leave()\n"
        "json.dump(found, open(sys.argv[2], 'w'))\n"
    )
    shapes = [Shape(str(n), [n]) for n in (8, 16, 32)]
    specs = [replace(SPEC, mode=mode, shapes=shapes) for mode in ("std", "isolate", "bi")]
    std, isolate, bi = step_times.measure_apart(specs, 60)
    assert isolate == "its process ended with status 4, see above"
    order = [std[0], bi[0], bi[1], std[1], bi[2], std[2]]  # rounds: s i b, i b s, b s i
    assert all(a[1] <= b[0] for a, b in pairwise(order))
    assert [beside for *_, beside in order] == [1] * 6


@pytest.mark.parametrize(
    ("source", "what"), [("raise SystemExit(5)", "status 5"), ("while True: pass", "within 1 s")]
)
def test_a_child_that_fails_or_hangs(child, source, what):
    child(source)
    (why,) = step_times.measure_apart([SPEC], 1 if "True" in source else 60)
    assert what in why


def test_groups_start_together(args, monkeypatch, tmp_path):
    asked = []

    def measure_apart(specs, timeout_s):
        asked.append([spec.mode for spec in specs])
        return [[{**entry(spec), "engines_beside": len(specs) - 1}] for spec in specs]

    monkeypatch.setattr(step_times, "measure_apart", measure_apart)
    assert step_times.run(args("--modes=std,bi,isolate", "--together", "2")) == 0
    assert asked == [["std", "bi"], ["isolate"]]
    (note,) = read_step_times(tmp_path / "steps.json").notes
    assert note.startswith("2 engines were up together")
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(ValueError, match=r"^3 engines .*kv_cache_memory_bytes"):
        step_times.run(args("--together"))
    assert len(asked) == 2


def test_tensor_parallelism_is_refused():
    spec = Spec("m", "std", 4, [], 2, False, None, {"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1"):
        step_child.measure(spec, Turns(Seat("", 0, [], 0, 0)))
