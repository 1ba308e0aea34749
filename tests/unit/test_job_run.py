"""corun.jobs.run and ``corun generate`` with a fake engine: order, errors, resuming."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from corun import cli
from corun.engine import offline
from corun.jobs.lines import Job
from corun.jobs.run import line_params, sample_seeds
from corun.list_seeds import member_seed
from corun.seeds import child_seed


class CrashError(Exception):
    pass


class FakeEngine:
    """Answers in reverse order, one job a step, with tokens that follow from prompt and seed."""

    domain_name = "corun1-a"
    crash_after = None
    violations: tuple = ()
    started = 0
    submitted: ClassVar[list] = []

    def __init__(self, args):
        type(self).started += 1
        self.jobs = []

    def domain(self):
        return self.domain_name

    def report(self):
        if self.domain_name is None:
            return None
        steps = {"prefill": 1, "decode": 2}
        return {"plan": {"policy": "isolate"}, "steps": steps, "violations": self.violations}

    def submit(self, job, params):
        if job.prompt == "too long":
            raise ValueError("the prompt is too long")
        type(self).submitted.append(job.index)
        self.jobs.append((job, params))

    def finished(self):
        for done, (job, params) in enumerate(reversed(self.jobs)):
            if done == self.crash_after:
                raise CrashError
            n = params.get("n", 1)
            refused = job.prompt == "never fits"
            outputs = [
                SimpleNamespace(
                    index=i,
                    token_ids=[params["seed"] % 1009, len(job.prompt), i],
                    text="t",
                    finish_reason="error" if refused else "stop",
                    stop_reason="needs 9 blocks of 5" if refused else None,
                    logprobs=None,
                )
                for i in range(n)
            ]
            yield [(job, SimpleNamespace(prompt_token_ids=[1], outputs=outputs))]


def let_m_pass(monkeypatch):
    """Lets "m" pass for a model."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("corun.commands.generate._settle_memory", lambda engine, flags: None)


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """Runs ``corun generate`` in `tmp_path` on FakeEngine; returns (status, records or None)."""
    monkeypatch.chdir(tmp_path)
    for name in ("crash_after", "violations", "domain_name"):
        monkeypatch.setattr(FakeEngine, name, getattr(FakeEngine, name))
    monkeypatch.setattr(FakeEngine, "started", 0)
    monkeypatch.setattr(FakeEngine, "submitted", [])
    let_m_pass(monkeypatch)
    monkeypatch.setattr(offline, "OfflineEngine", FakeEngine)
    monkeypatch.setattr(offline, "sampling_params", check_range)
    monkeypatch.setattr(offline, "engine_arguments", fake_arguments)
    monkeypatch.setattr(offline, "non_default", lambda args: dict(args.flags))

    def run(*extra, lines=None):
        if lines is not None:
            (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        argv = ["generate", "m", "-i", "in.jsonl", "-o", "out.jsonl", "--json", "s.json", *extra]
        status = cli.main(argv)
        out = tmp_path / "out.jsonl"
        text = out.read_text().splitlines() if out.exists() else None
        return status, text and [json.loads(x) for x in text]

    return run


def check_range(params):
    if params.get("temperature", 0) < 0:
        raise ValueError("temperature must be non-negative")


def fake_arguments(model, flags, settings):
    return SimpleNamespace(
        model=model,
        flags=list(enumerate(flags)),
        additional_config={"corun": {"policy": "auto", **settings}},
    )


LINES = [json.dumps({"id": f"r{i}", "prompt": "p" * (i + 1), "n": 1 + i % 2}) for i in range(7)]


def test_output_is_in_input_order_and_reports_every_seed(generate, tmp_path):
    status, records = generate(lines=LINES)
    assert status == 0
    assert [(r["index"], r["id"]) for r in records] == [(i, f"r{i}") for i in range(7)]
    seeds = [o["seed"] for r in records for o in r["outputs"]]
    assert len(set(seeds)) == len(seeds) == 10
    assert all(r["domain"] == "corun1-a" for r in records)
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["answered"], summary["skipped"], summary["output_tokens"]) == (7, 0, 30)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_every_reported_seed_replays_its_sample(generate, tmp_path):
    _, records = generate(lines=LINES)
    for record, line in zip(records, LINES, strict=True):
        for output in record["outputs"]:
            alone = {**json.loads(line), "n": 1, "seed": output["seed"]}
            _, again = generate("--overwrite", lines=[json.dumps(alone)])
            replayed = again[0]["outputs"][0]
            assert replayed["seed"] == output["seed"]
            if output["index"] == 0:  # the fake engine's tokens hold the line's seed
                assert replayed["digest"] == output["digest"]


def test_an_interrupted_run_goes_on_with_the_same_seeds(generate, tmp_path, capsys):
    FakeEngine.crash_after = 3
    assert generate(lines=LINES) == (2, None)
    message = capsys.readouterr().err
    assert "3 of 7 lines are saved" in message
    assert "starting the engine" in message
    FakeEngine.crash_after, FakeEngine.submitted = None, []
    status, records = generate()
    assert status == 0
    assert FakeEngine.submitted == [0, 1, 2, 3]  # the fake engine had finished the last three
    base = json.loads((tmp_path / "s.json").read_text())
    assert base["resumed"] == 3
    assert base["seconds"] >= 0 and base["start_seconds"] >= 0  # the engine's start by itself
    with_seeds = [
        json.dumps({**json.loads(x), "seed": r["outputs"][0]["seed"]})
        for x, r in zip(LINES, records, strict=True)
    ]
    _, at_once = generate("--overwrite", lines=with_seeds)
    assert [r["outputs"] for r in at_once] == [r["outputs"] for r in records]
    assert base["digest"] == json.loads((tmp_path / "s.json").read_text())["digest"]


def test_a_finished_partial_needs_no_engine(generate, tmp_path, monkeypatch):
    from corun.jobs.partial import Partial

    monkeypatch.setattr(Partial, "finish", lambda self, output: (_ for _ in ()).throw(CrashError()))
    assert generate(lines=LINES) == (2, None)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    let_m_pass(monkeypatch)
    monkeypatch.setattr(offline, "sampling_params", check_range)
    monkeypatch.setattr(offline, "engine_arguments", fake_arguments)
    monkeypatch.setattr(offline, "non_default", lambda args: dict(args.flags))
    monkeypatch.setattr(offline, "OfflineEngine", None)
    status, records = generate()
    assert status == 0
    assert len(records) == 7


@pytest.mark.parametrize(
    ("extra", "differs"),
    [
        (["--temperature", "0.5"], "sampling flags: temperature is 0.5, was "),
        (["--policy", "isolate"], "CoRun settings: policy is 'isolate', was "),
        (["--dtype", "float32"], "engine flags: "),
    ],
)
def test_another_run_is_refused(generate, tmp_path, capsys, extra, differs):
    FakeEngine.crash_after = 1
    generate(lines=LINES)
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    capsys.readouterr()
    assert generate(*extra) == (2, None)
    message = capsys.readouterr().err
    assert f"belongs to another run (it differs in: {differs}" in message
    assert "--overwrite" in message
    assert "goes on from there" not in message
    assert "starting the engine" not in message
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before


def test_another_input_or_domain_is_refused(generate, capsys):
    FakeEngine.crash_after = 1
    generate(lines=LINES)
    assert generate(lines=[*LINES[1:], LINES[0]]) == (2, None)
    assert "it differs in: input" in capsys.readouterr().err
    generate(lines=LINES)
    FakeEngine.domain_name = "corun1-b"
    assert generate(lines=LINES) == (2, None)
    assert "started in the domain corun1-a" in capsys.readouterr().err
    FakeEngine.crash_after = None
    status, records = generate("--overwrite")
    assert (status, records[0]["domain"]) == (0, "corun1-b")


def test_what_a_run_left_that_was_killed_at_its_very_end_goes(generate, tmp_path, monkeypatch):
    partial = tmp_path / "out.jsonl.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, **_: (_ for _ in ()).throw(CrashError()))
        status, first = generate(lines=LINES)
    assert status == 2 and len(first) == 7 and partial.exists()
    damaged = partial.read_bytes()
    partial.write_bytes(damaged.replace(b'"r3"', b'"r8"'))
    assert generate()[0] == 2 and partial.exists()  # not what the output holds: it stays
    partial.write_bytes(damaged)
    assert generate() == (2, first)
    assert not partial.exists()
    assert (tmp_path / "out.jsonl").exists()


def test_prompts_are_not_overwritten_by_their_answers(generate, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("\n".join(LINES) + "\n")
    argv = ["generate", "m", "-i", "in.jsonl", "-o", "./in.jsonl", "--overwrite"]
    assert cli.main(argv) == 2
    assert "in.jsonl is the input" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text().splitlines() == LINES


def test_an_output_that_another_run_finished_meanwhile_is_kept(generate, tmp_path, monkeypatch):
    from corun.jobs import run as module

    def finished_meanwhile(path):
        (tmp_path / "out.jsonl").write_text('"theirs"\n')
        return partial(path)

    partial = module.Partial
    monkeypatch.setattr(module, "Partial", finished_meanwhile)
    assert generate(lines=LINES) == (2, ["theirs"])
    assert not (tmp_path / "out.jsonl.partial").exists()
    assert FakeEngine.started == 0


def test_an_existing_output_is_kept(generate, capsys):
    _, first = generate(lines=LINES)
    status, second = generate()
    assert (status, second) == (2, first)
    assert "--overwrite" in capsys.readouterr().err


BAD = [LINES[0], '{"prompt": 1}', '{"prompt": "x", "temperature": -1}', LINES[1], "", LINES[2]]


def test_bad_lines_stop_before_the_engine(generate, tmp_path, capsys):
    assert generate(lines=BAD) == (2, None)
    message = capsys.readouterr().err
    assert "in.jsonl, line 2: 'prompt' must be a string" in message
    assert "in.jsonl, line 5: empty" in message
    assert "2 bad line(s) in in.jsonl; nothing was run" in message
    assert generate(lines=[LINES[0], BAD[2]]) == (2, None)
    assert "line 2: temperature must be" in capsys.readouterr().err
    assert FakeEngine.started == 0
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_skipped_lines_get_an_error_record(generate, tmp_path):
    too_long = json.dumps({"id": 9, "prompt": "too long"})
    status, records = generate("--on-error", "skip", lines=[*BAD, too_long])
    assert status == 0
    assert [r["index"] for r in records] == list(range(7))
    assert [i for i, r in enumerate(records) if "error" in r] == [1, 2, 4, 6]
    assert records[6] == {"index": 6, "id": 9, "error": "line 7: the prompt is too long"}
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["answered"], summary["skipped"]) == (3, 4)


def test_a_line_that_the_model_cannot_take_stops_before_any_work(generate, tmp_path, capsys):
    assert generate(lines=[*LINES, '{"prompt": "too long"}']) == (2, None)
    message = capsys.readouterr().err
    assert "line 8: the prompt is too long (--on-error skip goes on without such lines)" in message
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_line_that_the_scheduler_refuses(generate, tmp_path, capsys):
    lines = [LINES[0], '{"prompt": "never fits"}', LINES[2]]
    assert generate(lines=lines) == (2, None)
    message = capsys.readouterr().err
    assert "line 2: needs 9 blocks of 5 (--on-error skip" in message
    assert "1 of 3 lines are saved" in message
    status, records = generate("--on-error", "skip")
    assert status == 0
    assert [r.get("error") for r in records] == [None, "line 2: needs 9 blocks of 5", None]


def test_a_step_outside_the_plan_is_status_1(generate, capsys):
    FakeEngine.violations = ("CoRun: step 3 was odd",)
    status, records = generate(lines=LINES)
    assert (status, len(records)) == (1, 7)
    assert "step 3 was odd" in capsys.readouterr().err


def test_policy_off_has_no_domain_and_says_so(generate, capsys):
    FakeEngine.domain_name = None
    status, records = generate("--policy", "off", "--seed", "5", lines=LINES)
    assert status == 0
    assert records[0]["domain"] is None
    assert [o["seed"] for o in records[1]["outputs"]] == [5, 6]  # vLLM's own rule
    assert "no contract holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-i", "in.jsonl", "-o", "o"], "which model?"),
        (["--dtype", "float32", "m", "-i", "in.jsonl", "-o", "o"], "which model?"),
        (["m", "-i", "absent.jsonl", "-o", "o"], "absent.jsonl: No such file"),
        (["m", "-i", "in.jsonl", "-o", "absent/o"], "absent is not a directory"),
        (["m", "-i", "empty.jsonl", "-o", "o"], "empty.jsonl has no lines"),
        (["m", "-i", "in.jsonl", "-o", "o", "--temperature", "nan"], "must be a number"),
    ],
)
def test_what_cannot_run_is_status_2(generate, tmp_path, capsys, argv, message):
    (tmp_path / "in.jsonl").write_text(LINES[0])
    (tmp_path / "empty.jsonl").write_text("\n")
    assert cli.main(["generate", *argv]) == 2
    assert message in capsys.readouterr().err
    assert FakeEngine.started == 0


def test_seeds_of_lines_and_samples():
    job = Job(4, None, "prompt", "p", {"n": 3})
    assert line_params(job, 9) == {"n": 3, "seed": member_seed(9, 4)}
    for unseeded in (None, -1):
        same = Job(4, None, "prompt", "p", {"seed": unseeded})
        assert line_params(same, 9)["seed"] == member_seed(9, 4)
    assert line_params(Job(4, None, "prompt", "p", {"seed": 0}), 9)["seed"] == 0
    assert sample_seeds(7, 1, True) == [7]
    assert sample_seeds(7, 3, True) == [child_seed(7, i) for i in range(3)]
    assert sample_seeds(7, 3, False) == [7, 8, 9]


def test_no_two_samples_of_a_job_share_a_seed():
    seeds = [seed for index in range(500) for seed in sample_seeds(member_seed(0, index), 8, True)]
    assert len(set(seeds)) == len(seeds) == 4000
