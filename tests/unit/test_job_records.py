"""corun.jobs.records: the output's lines."""

import json
from types import SimpleNamespace

import numpy as np

from corun.contract import digest, float_bits
from corun.jobs import records
from corun.jobs.lines import BadLine, Job


def logprob(value, rank):
    return SimpleNamespace(logprob=float(np.float32(value)), rank=rank)


def completion(index, tokens, logprobs=None, stop_reason=None):
    return SimpleNamespace(
        index=index,
        token_ids=tokens,
        text="t",
        finish_reason="length",
        stop_reason=stop_reason,
        logprobs=logprobs,
    )


def output(*completions, prompt_logprobs=None):
    return SimpleNamespace(
        prompt_token_ids=[5, 6, 7], outputs=list(completions), prompt_logprobs=prompt_logprobs
    )


JOB = Job(3, "x", "prompt", "p", {})


def test_samples_come_in_order_with_their_own_seeds():
    record = records.answer(
        JOB, {"seed": 1, "n": 2}, output(completion(1, [9]), completion(0, [8])), [10, 11], "d"
    )
    assert [(o["index"], o["seed"], o["token_ids"]) for o in record["outputs"]] == [
        (0, 10, [8]),
        (1, 11, [9]),
    ]
    assert record["outputs"][0]["digest"] == digest([8])
    assert (record["index"], record["id"], record["prompt_tokens"]) == (3, "x", 3)
    assert "logprobs" not in record["outputs"][0]


def test_logprobs_survive_json_to_the_bit():
    values = np.random.default_rng(0).normal(-8, 6, 2000).astype(np.float32)
    positions = [{4: logprob(v, 2), 2: logprob(0.0, 1)} for v in values]
    done = output(completion(0, [4] * len(values), positions))
    record = records.answer(JOB, {"seed": 1, "logprobs": 1}, done, [1], None)
    back = json.loads(records.encode(record))["outputs"][0]
    assert [float_bits(v) for v in back["logprobs"]] == values.view(np.uint32).tolist()
    assert [top[0][0] for top in back["top_logprobs"]] == [2] * len(values)
    assert back["digest"] == digest([4] * len(values), values.tolist())


def test_what_json_has_no_number_for():
    positions = [{1: logprob(-np.inf, 1)}]
    record = records.answer(
        JOB, {"seed": 1, "logprobs": 1}, output(completion(0, [1], positions)), [1], None
    )
    back = json.loads(records.encode(record))["outputs"][0]
    assert back["logprobs"] == ["-inf"]
    assert float(back["logprobs"][0]) == -np.inf


def test_prompt_logprobs_start_at_the_second_token():
    prompt = [None, {6: logprob(-1, 1)}, {7: logprob(-2, 2), 1: logprob(-1, 1)}]
    done = output(completion(0, [1]), prompt_logprobs=prompt)
    record = records.answer(JOB, {"seed": 1, "prompt_logprobs": 1}, done, [1], None)
    assert record["prompt_logprobs"] == [None, -1.0, -2.0]
    assert record["prompt_top_logprobs"][2] == [[1, -1.0], [7, -2.0]]
    assert record["prompt_digest"] == digest([6, 7], [-1.0, -2.0])


def test_request_digest_names_prompt_and_parameters():
    digests = {
        records.request_digest([1, 2], {"seed": 1, "top_k": 2}),
        records.request_digest([1, 3], {"seed": 1, "top_k": 2}),
        records.request_digest([1, 2], {"seed": 2, "top_k": 2}),
    }
    assert len(digests) == 3
    assert records.request_digest([1, 2], {"top_k": 2, "seed": 1}) in digests


def test_digest_of_all_sees_every_output_and_every_error():
    def record(index, *digests):
        outputs = [{"index": i, "digest": d} for i, d in enumerate(digests)]
        return {"index": index, "outputs": outputs}

    base = records.digest_of_all([record(0, "a", "b"), record(1, "c")])
    assert base == records.digest_of_all([record(0, "a", "b"), record(1, "c")])
    changed = [
        [record(0, "a", "x"), record(1, "c")],
        [record(0, "a"), record(1, "b", "c")],
        [record(0, "a", "b"), records.failure(BadLine(1, None, "r"))],
        [{**record(0, "a", "b"), "prompt_digest": "p"}, record(1, "c")],
    ]
    assert len({base, *(records.digest_of_all(c) for c in changed)}) == 5
