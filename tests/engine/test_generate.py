"""``corun generate`` on a real engine: killed half-way and resumed, it gives the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import corun
from corun import cli
from corun.contract import float_bits

ENGINE_FLAGS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes=512M",
    "--max-model-len=1024",
    "--max-num-seqs=4",
)
WAIT_S = 400
LINES = 10


def environment():
    root = str(Path(corun.__file__).parents[1])
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("CORUN_")},
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }


def start(model, folder, *extra):
    """``corun generate`` in a process group of its own, its output in `folder`/log."""
    command = [sys.executable, "-m", "corun.cli", "generate", model, "-i", "in.jsonl"]
    command += ["-o", "out.jsonl", "--json", "summary.json", *ENGINE_FLAGS, *extra]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )


def kill(process):
    """SIGKILL for the command and whatever it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(model, folder, *extra):
    """Run to the end; returns (status, records or None, log)."""
    (folder / "log").unlink(missing_ok=True)
    process = start(model, folder, *extra)
    try:
        status = process.wait(timeout=WAIT_S)
    finally:
        kill(process)
    out = folder / "out.jsonl"
    records = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else None
    return status, records, (folder / "log").read_text()


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def lines():
    """A mixed job: every kind of prompt, several parameters, most lines without a seed."""
    job = []
    for i in range(LINES):
        line = {"id": f"line-{i}", "max_tokens": 8 + 3 * (i % 4), "logprobs": i % 3}
        if i % 3 == 0:
            line["prompt"] = "A story about the number " + " and ".join(map(str, range(i + 1)))
        elif i % 3 == 1:
            line["messages"] = [{"role": "user", "content": f"What is {i} times {i}?"}]
        else:
            line["prompt_token_ids"] = [(7 * i + j) % 40000 + 20 for j in range(3 + 5 * i)]
        if i % 4 == 0:
            line["params"] = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
        if i == 5:
            line.update(n=3, top_k=40)
        if i == 6:
            line["seed"] = 42
        if i == 7:
            line["prompt_logprobs"] = 1
        job.append(line)
    return job


def floats(record):
    """Every logprob of a record, as bits."""
    values = list(record.get("prompt_logprobs", [])[1:])
    for output in record["outputs"]:
        values += output["logprobs"]
        values += [v for top in output.get("top_logprobs", []) for _, v in top]
    return [float_bits(float(v)) for v in values]


def tokens(record):
    return [o["token_ids"] for o in record["outputs"]]


@pytest.fixture(scope="module")
def resumed(shallow_model, tmp_path_factory):
    """The job, killed half-way and resumed; returns (records, summary, lines saved at the kill)."""
    folder = tmp_path_factory.mktemp("resumed")
    write(folder, lines())
    process = start(shallow_model, folder)
    partial = folder / "out.jsonl.partial"
    try:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and process.poll() is None:
            if partial.exists() and partial.read_bytes().count(b"\n") >= 4:
                break
            time.sleep(0.02)
    finally:
        kill(process)
    assert not (folder / "out.jsonl").exists(), "it finished before it was killed"
    saved = [
        json.loads(x) for x in partial.read_bytes().splitlines(keepends=True)[1:] if x[-1:] == b"\n"
    ]
    assert 3 <= len(saved) < LINES, (folder / "log").read_text()[-3000:]
    status, records, log = finish(shallow_model, folder)
    assert status == 0, log[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == [
        "in.jsonl",
        "log",
        "out.jsonl",
        "summary.json",
    ]
    return records, summary, saved


def test_resumed_output_keeps_order_and_what_was_saved(resumed):
    records, summary, saved = resumed
    assert [(r["index"], r["id"]) for r in records] == [(i, f"line-{i}") for i in range(LINES)]
    assert summary["resumed"] >= len(saved)
    for record in saved:
        assert records[record["index"]] == record
    assert (summary["answered"], summary["skipped"]) == (LINES, 0)
    assert summary["policy"] == "isolate"
    assert summary["violations"] == []
    assert {r["domain"] for r in records} == {summary["domain"]}
    assert summary["domain"].startswith("corun1-")


@pytest.fixture(scope="module")
def replayed(resumed, shallow_model, tmp_path_factory):
    """The job again, unbroken, in another order and with the seeds that were reported.

    Behind it the three samples of line 5, each by its own seed with n=1, between lines that fail.
    Returns (records of the job, records behind it, log).
    """
    folder = tmp_path_factory.mktemp("replayed")
    records, _, _ = resumed
    job = [
        {**line, "seed": r["outputs"][0]["seed"]} for line, r in zip(lines(), records, strict=True)
    ]
    alone = [{**lines()[5], "n": 1, "seed": o["seed"]} for o in records[5]["outputs"]]
    bad = [{"prompt": 1}, {"prompt": "x", "top_p": 7}, {"prompt_token_ids": [5] * 5000}]
    never = [{"prompt": "x", "bad_words": "y", "max_tokens": 4, "id": "fine"}]
    write(folder, [*job[::-1], alone[0], *bad, alone[1], *never, alone[2]])
    status, again, log = finish(shallow_model, folder, "--on-error", "skip")
    assert status == 0, log[-3000:]
    return again[:LINES][::-1], again[LINES:], log.replace("\r", "\n")


def test_the_reported_seeds_give_the_same_bits_in_one_go(resumed, replayed):
    records, summary, _ = resumed
    again = replayed[0]
    assert [r["id"] for r in again] == [r["id"] for r in records]
    compared = 0
    for before, after in zip(records, again, strict=True):
        assert tokens(after) == tokens(before)
        assert floats(after) == floats(before)
        for name in ("seed", "digest", "text", "finish_reason"):
            assert [o[name] for o in after["outputs"]] == [o[name] for o in before["outputs"]]
        assert after["request_digest"] == before["request_digest"]
        compared += len(floats(after))
    assert {r["domain"] for r in again} == {summary["domain"]}
    print(f"\ncompared {compared} logprobs of {LINES} requests, bit for bit")
    assert compared > 200


def test_a_sample_replays_alone_and_bad_lines_are_skipped(resumed, replayed):
    samples = resumed[0][5]["outputs"]
    _, again, text = replayed
    assert len({o["seed"] for o in samples}) == 3
    assert len({o["digest"] for o in samples}) == 3
    assert ["error" in r for r in again] == [False, True, True, True, False, False, False]
    assert again[1]["error"].startswith(f"line {LINES + 2}: ")
    assert "top_p" in again[2]["error"]
    assert "1024" in again[3]["error"]
    for record, sample in zip((again[0], again[4], again[6]), samples, strict=True):
        assert record["outputs"][0]["digest"] == sample["digest"]
        assert record["outputs"][0]["seed"] == sample["seed"]
    assert f"in.jsonl, line {LINES + 2}: 'prompt' must be a string" in text
    assert f"in.jsonl, line {LINES + 3}: " in text


WRONG = {
    "in.jsonl, line 2: top_p must be in (0, 1]": ({"prompt": "x", "top_p": 7}, ()),
    "unrecognized arguments: --max-num-seqq 3": ({"prompt": "x"}, ("--max-num-seqq", "3")),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_stops_before_the_engine(
    shallow_model, tmp_path, monkeypatch, capsys, message
):
    monkeypatch.chdir(tmp_path)
    line, flags = WRONG[message]
    write(tmp_path, [{"prompt": "x"}, line])
    argv = ["generate", shallow_model, "-i", "in.jsonl", "-o", "out.jsonl", *ENGINE_FLAGS, *flags]
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
