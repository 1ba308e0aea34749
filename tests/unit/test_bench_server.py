"""The server benchmark with vLLM's real client and a server that only pretends."""

import argparse
import gc
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from corun.bench import client, send, server
from corun.bench.requests import BenchRequest, RequestSet, build
from corun.bench.server_process import HOST
from corun.bench.workload import parse_arrivals, parse_workload
from corun.engine import bench_serve as seam

FAKE = Path(__file__).with_name("fake_server.py")


def parse(*flags):
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def model(tmp_path):
    """A directory with a config and a tokenizer of a few words, and no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(100)}
    plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="t0", eos_token="t1").save_pretrained(
        directory
    )
    LlamaConfig(vocab_size=100, hidden_size=8, num_attention_heads=2).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Every mode is served by the pretender; gives the file of what it received."""
    record = tmp_path / "record"
    monkeypatch.setattr(
        server, "serve_command", lambda mode, args: [sys.executable, str(FAKE), str(record)]
    )
    monkeypatch.setattr(server, "_shown", " ".join)
    return record


@pytest.fixture
def client_here(monkeypatch):
    """vLLM's real client, in this process: another would import vLLM anew for each load."""

    def run_client(command, timeout_s):
        assert command[:3] == [sys.executable, "-m", send.CLIENT]
        client.main(command[3:])
        gc.unfreeze()  # vLLM's client freezes all that there is

    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, HOST)
    monkeypatch.setattr(send, "_run_client", run_client)


def test_real_client_sends_the_request_set(model, fake, client_here, tmp_path, capfd):
    out = tmp_path / "results" / "server.json"
    flags = (model, f"--out={out}", "--modes=isolate", "--workloads=8/3", "--count=5")
    assert server.run(parse(*flags, "--arrivals=closed:2,poisson:50", "--warmups=0")) == 0
    given = json.loads(out.read_text())
    assert given["format"] == "corun-bench-server/1" and given["failed"] == {}
    closed, poisson = given["runs"]
    assert (closed["arrivals"], poisson["arrivals"]) == ("closed:2", "poisson:50.0")
    wanted = build(parse_workload("8/3"), count=5, vocabulary=100, seed=0, max_model_len=64)
    for entry in given["runs"]:
        assert entry["mode"] == "isolate" and entry["workload"] == "8/3"
        assert entry["requests_digest"] == wanted.digest
        assert entry["report"] == {"policy": "isolate", "domain": "corun1-x", "violations": 0}
        result = entry["result"]
        assert (result["completed"], result["failed"]) == (5, 0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 15)
        assert result["output_throughput"] > 0 and result["mean_ttft_ms"] > 0
        assert not [name for name, value in result.items() if isinstance(value, list)]
        assert len(set(entry["text_digests"])) == 5
    assert closed["result"]["max_concurrency"] == 2
    received = [json.loads(line) for line in fake.read_text().splitlines()[1:]]
    sent = {(tuple(r["prompt"]), r["max_tokens"], r["seed"]) for r in received}
    assert sent == {(r.prompt_token_ids, r.max_tokens, r.seed) for r in wanted.requests}
    assert len(received) == 2 * 5
    assert {r["temperature"] for r in received} == {0.6} and all(r["ignore_eos"] for r in received)
    assert "5 of 5 texts as in its first run" in capfd.readouterr().out
    assert (out.parent / "server-isolate.log").read_text().startswith("a line of the log")


OWN_DATA = "--dataset-name random --random-input-len 6 --random-output-len 2 --num-prompts 3"


def test_vllms_own_data_sets_in_a_process_of_the_client(model, fake, tmp_path):
    out = tmp_path / "server.json"
    flags = ("--modes=std", "--warmups=2", f"--client-args={OWN_DATA}")
    assert server.run(parse(model, f"--out={out}", *flags)) == 0
    (entry,) = json.loads(out.read_text())["runs"]
    assert entry["result"]["completed"] == 3 and entry["requests_digest"] is None
    assert entry["report"] is None and entry["result"]["total_output_tokens"] == 6


def test_requests_that_fail_are_no_result(model, fake, client_here, tmp_path, capfd):
    unlucky = OWN_DATA + " --extra-body '{\"seed\": 666}'"
    bad = tmp_path / "bad.json"
    with pytest.raises(RuntimeError, match="no mode could be measured"):
        server.run(
            parse(model, f"--out={bad}", "--modes=std", "--warmups=0", f"--client-args={unlucky}")
        )
    assert not bad.exists()
    assert "std: 3 requests failed" in capfd.readouterr().err


def test_the_flags_of_an_arrival_process():
    flags = {
        name: client.flags_of(parse_arrivals(name)) for name in ("all", "closed:4", "poisson:2")
    }
    assert flags == {
        "all": ["--no-self-timed"],
        "closed:4": ["--no-self-timed", "--max-concurrency", "4"],
        "poisson:2": ["--self-timed"],
    }


def test_client_requests_are_the_sets():
    one = BenchRequest("0", (11, 12), 3, 77)
    requests = RequestSet("w", "s", 4, (one, BenchRequest("1", (13,), 2, 78)))
    poisson = parse_arrivals("poisson:3")
    sent = client.client_requests(requests, poisson, seeded=True)
    assert [r.arrival_s for r in sent] == poisson.times(2, 4)
    assert sent[0] == seam.ClientRequest((11, 12), 3, 0.0, {"seed": 77})
    plain = client.client_requests(requests, parse_arrivals("closed:1"), seeded=False)
    assert plain[1] == seam.ClientRequest((13,), 2, 0.0, {})


def test_the_seam_is_put_back(monkeypatch):
    from vllm.benchmarks import serve

    read, seen = serve.get_samples, []

    def main(args):
        seen.extend(serve.get_samples(args, None))
        raise ValueError("no server")

    monkeypatch.setattr(serve, "main", main)
    with pytest.raises(ValueError, match="no server"):
        seam.bench_serve(["--self-timed"], [seam.ClientRequest((5, 6), 4, 1.5, {"seed": 9})])
    assert serve.get_samples is read
    (sample,) = seen
    assert (sample.prompt, sample.prompt_len, sample.expected_output_len) == ([5, 6], 2, 4)
    assert (sample.timestamp, sample.request_overrides) == (1.5, {"seed": 9})


def test_serve_commands_name_the_policy():
    flags = ("m", "--out=x", "--certificate=c.json", "--server-args=--max-num-seqs 4 --dtype half")
    commands = {mode: server.serve_command(mode, parse(*flags)) for mode in ("bi", "certified@v1")}
    rest = ["--max-num-seqs", "4", "--dtype", "half"]
    assert commands["bi"][2:] == ["corun.cli", "serve", "m", "--policy", "off", *rest]
    assert commands["certified@v1"][4:] == [
        "m",
        "--policy",
        "certified",
        "--certificate",
        "c.json",
        *rest,
    ]
    assert server._shown(commands["bi"]).startswith("corun serve m --policy off")
    drawn = server.serve_command("std", parse("m", "--out=x", "--random-weights"))
    assert drawn[4:] == ["m", "--policy", "off", "--load-format", "corun_random"]


def test_what_cannot_be_served_is_refused(model, tmp_path):
    for bad in (("--modes=nosplit",), ("--modes=fast",), ("--arrivals=late",), ("--workloads=x",)):
        with pytest.raises(ValueError, match="choose"):
            server.run(parse(model, f"--out={tmp_path / 'x'}", *bad))


def test_equal_texts_compare_a_mode_with_itself():
    def entry(mode, digest, *texts):
        return {"mode": mode, "requests_digest": digest, "text_digests": list(texts)}

    runs = [
        entry("std", "d", "a", "b", "c"),
        entry("isolate", "d", "a", "x", "c"),
        entry("std", "d", "a", "b", "z"),
        entry("std", "e", "a", "b", "c"),
        entry("std", None, "a"),
        entry("std", None, "a"),
    ]
    found = [server.equal_texts(runs, i) for i in range(len(runs))]
    assert found == [None, None, (2, 3), None, None, None]


def test_a_client_that_fails_or_hangs_is_an_error():
    with pytest.raises(send.ClientError, match="status 7"):
        send._run_client([sys.executable, "-c", "raise SystemExit(7)"], 60)
    with pytest.raises(send.ClientError, match="did not end within 1 s"):
        send._run_client([sys.executable, "-c", "import time; time.sleep(60)"], 1)
