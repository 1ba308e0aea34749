"""``corun serve`` and the official client: concurrent or alone, streamed or not, the same bits."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import corun
from corun.contract import float_bits
from corun.list_seeds import member_seed
from corun.seeds import child_seed

openai = pytest.importorskip("openai")

ENGINE_FLAGS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes=512M",
    "--max-model-len=1024",
    "--max-num-seqs=6",
)
WAIT_S = 400
IDS = {"return_token_ids": True}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_up(process, port, log):
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def client(shallow_model, tmp_path_factory):
    """A client of one server for the whole module."""
    log, port = tmp_path_factory.mktemp("serve") / "log", free_port()
    root = str(Path(corun.__file__).parents[1])
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("CORUN_")},
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "VLLM_PLUGINS": "some_other_plugin",  # corun serve adds itself
    }
    command = [sys.executable, "-m", "corun.cli", "serve", shallow_model, *ENGINE_FLAGS]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += ["--policy", "isolate"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=env, start_new_session=True
        )
    try:
        wait_until_up(process, port, log)
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complete(client, prompt, **keys):
    """One completion; returns (headers, answer)."""
    keys = {"max_tokens": 10, "logprobs": 2, "extra_body": IDS, **keys}
    raw = client.completions.with_raw_response.create(model="m", prompt=prompt, **keys)
    return raw.headers, raw.parse()


def chat(client, text, **keys):
    keys = {"max_tokens": 10, "logprobs": True, "top_logprobs": 2, "extra_body": IDS, **keys}
    messages = [{"role": "user", "content": text}]
    raw = client.chat.completions.with_raw_response.create(model="m", messages=messages, **keys)
    return raw.headers, raw.parse()


def completion_bits(choice):
    """Token ids, and every returned logprob as bits."""
    logprobs = choice.logprobs
    values = list(logprobs.token_logprobs)
    values += [v for top in logprobs.top_logprobs for v in top.values()]
    return list(choice.token_ids), [float_bits(v) for v in values]


def chat_bits(choice):
    content = choice.logprobs.content
    values = [c.logprob for c in content] + [t.logprob for c in content for t in c.top_logprobs]
    return list(choice.token_ids), [float_bits(v) for v in values]


def requests():
    """Eight requests, of both endpoints, seeded and with several parameters."""
    asked = []
    for i in range(8):
        keys = {"seed": 100 + i, "temperature": (0.6, 1.0, 0.0)[i % 3], "max_tokens": 8 + i}
        if i % 4 == 1:
            keys.update(top_p=0.8, presence_penalty=0.5)
        text = f"Request {i}: " + "tell me about rivers, " * (1 + 5 * i)
        asked.append((complete if i % 2 else chat, text, keys))
    return asked


def bits_of(client, request):
    ask, text, keys = request
    headers, answer = ask(client, text, **keys)
    assert headers["x-corun-seed"] == str(keys["seed"])
    return (completion_bits if ask is complete else chat_bits)(answer.choices[0])


def test_concurrent_and_alone_give_the_same_bits(client):
    asked = requests()
    alone = [bits_of(client, r) for r in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda r: bits_of(client, r), asked))
        shuffled = list(pool.map(lambda r: bits_of(client, r), asked[::-1]))[::-1]
    compared = sum(len(tokens) + len(values) for tokens, values in alone)
    print(f"\ncompared {2 * compared} token ids and logprobs of {2 * len(asked)} requests")
    assert compared > 300
    assert together == alone
    assert shuffled == alone


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_unseeded_request_replays_with_its_reported_seed(client, ask):
    bits = completion_bits if ask is complete else chat_bits
    seen, clones = set(), 0
    for _ in range(3):
        headers, first = ask(client, "Write a line about winter.", n=2)
        seed = int(headers["x-corun-seed"])
        seen.add(seed)
        _, again = ask(client, "Write a line about winter.", n=2, seed=seed)
        samples = [bits(c) for c in first.choices]
        assert [bits(c) for c in again.choices] == samples
        clones += samples[0] == samples[1]  # both may end at once, by chance
        _, one = ask(client, "Write a line about winter.", seed=child_seed(seed, 1))
        assert bits(one.choices[0]) == samples[1]
    assert len(seen) == 3 and clones < 3


def test_several_prompts_in_one_request(client):
    prompts = ["The sea is"] * 3
    headers, answer = complete(client, prompts)
    seeds = [int(s) for s in headers["x-corun-seed"].split(",")]
    assert seeds == [seeds[0], member_seed(seeds[0], 1), member_seed(seeds[0], 2)]
    samples = [completion_bits(c) for c in sorted(answer.choices, key=lambda c: c.index)]
    assert len({str(s) for s in samples}) == 3
    for seed, sample in zip(seeds, samples, strict=True):
        _, alone = complete(client, prompts[0], seed=seed)
        assert completion_bits(alone.choices[0]) == sample
    headers, answer = complete(client, prompts, seed=5)  # a given seed is every prompt's
    assert headers["x-corun-seed"] == "5"
    assert len({str(completion_bits(c)) for c in answer.choices}) == 1


def test_streams_are_the_same_answers(client):
    stream_keys = {"stream": True, "seed": 9, "max_tokens": 10}
    _, whole = complete(client, "Once there was", seed=9)
    raw = client.completions.with_raw_response.create(
        model="m", prompt="Once there was", logprobs=2, extra_body=IDS, **stream_keys
    )
    assert raw.headers["x-corun-seed"] == "9"
    chunks = [c.choices[0] for c in raw.parse() if c.choices]
    tokens = [t for c in chunks for t in c.token_ids or ()]
    logprobs = [v for c in chunks if c.logprobs for v in c.logprobs.token_logprobs]
    assert tokens == list(whole.choices[0].token_ids)
    expected = whole.choices[0].logprobs.token_logprobs
    assert [float_bits(v) for v in logprobs] == [float_bits(v) for v in expected]

    messages = [{"role": "user", "content": "Name a color."}]
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=messages, stream=True, max_tokens=12
    )
    seed = int(raw.headers["x-corun-seed"])
    text = "".join(c.choices[0].delta.content or "" for c in raw.parse() if c.choices)
    _, whole = chat(client, "Name a color.", seed=seed, max_tokens=12)
    assert text == whole.choices[0].message.content


def test_the_responses_endpoint_reports_seeds_too(client):
    keys = {"model": "m", "input": "Name a river.", "max_output_tokens": 12}
    raw = client.responses.with_raw_response.create(**keys)
    seed = int(raw.headers["x-corun-seed"])
    again = client.responses.create(**keys, extra_body={"seed": seed})
    assert again.output_text == raw.parse().output_text


def test_the_report_and_the_domain(client):
    headers, answer = complete(client, "a")
    report = client.get("../corun/report", cast_to=object)
    assert report["policy"] == headers["x-corun-policy"] == "isolate"
    assert report["domain"] == headers["x-corun-domain"] == answer.system_fingerprint
    worker = report["workers"][0]
    assert worker["violations"] == []
    assert worker["steps"]["decode"] > 100


def test_bad_requests_stay_vllms_own_errors(client):
    for keys in ({"temperature": -1}, {"seed": "x"}, {"max_tokens": 10**6}):
        with pytest.raises(openai.BadRequestError):
            complete(client, "a", **keys)
