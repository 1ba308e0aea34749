"""isolate on a real engine: fixed shapes, inert padding, the audit, refusals."""

import dataclasses

import numpy as np
import pytest
from conftest import SMALL

pytest.importorskip("vllm")
import torch
from vllm import SamplingParams

from corun.config import CoRunConfig
from corun.engine.audit import PlanViolationError
from corun.verify.engine import close_engine, open_engine

ROWS, CHUNK = SMALL["max_num_seqs"], 64


@pytest.fixture(scope="module")
def llm(shallow_model):
    engine = open_engine(
        shallow_model, CoRunConfig("isolate"), **SMALL, max_num_batched_tokens=CHUNK, seed=0
    )
    yield engine
    close_engine(engine)


def runner(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def bits(output):
    sample = output.outputs[0]
    values = [
        step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    return list(sample.token_ids), np.array(values, dtype=np.float32).view(np.uint32).tolist()


def generate(llm, prompts, **params):
    sampling = SamplingParams(**{"temperature": 0.6, "seed": 42, "max_tokens": 12, **params})
    return llm.generate(prompts, sampling, use_tqdm=False)


PROMPTS = [f"Question {i}: " + "how many are there, and where? " * (i * 3) for i in range(10)]


def test_shapes_and_bits(llm):
    """More requests than rows, prompts of several chunks; every step inside the plan."""
    alone = [bits(generate(llm, [p], logprobs=0)[0]) for p in PROMPTS]
    crowd = [bits(o) for o in generate(llm, PROMPTS, logprobs=0)]
    back = [bits(o) for o in generate(llm, PROMPTS[::-1], logprobs=0)][::-1]
    print(f"compared {sum(len(t) for t, _ in alone) * 4} values")
    assert crowd == alone
    assert back == alone
    report = llm.collective_rpc("corun_report")[0]
    assert report["violation_count"] == 0
    assert set(report["rows"]["decode"]) == {str(ROWS)}
    assert max(int(rows) for rows in report["rows"]["prefill"]) == CHUNK
    assert report["most_requests"] == ROWS


def test_padding_rows_write_no_kv(llm):
    """Decode with 1 of 8 rows active: only the active request's own block changes."""
    caches = runner(llm).kv_caches
    generate(llm, PROMPTS)  # every block that will be used has been used
    before = [cache.clone() for cache in caches]
    prompt = PROMPTS[0]
    generate(llm, [prompt], max_tokens=20, ignore_eos=True)
    changed = {
        int(block)
        for cache, old in zip(caches, before, strict=True)
        for block in torch.nonzero((cache != old).flatten(1).any(1)).flatten()
    }
    length = len(llm.get_tokenizer().encode(prompt)) + 20
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    assert 1 <= len(changed) <= -(-length // block_size)
    assert 0 not in changed  # the null block


def test_unseeded_outputs_report_a_seed_that_replays_them(llm):
    sampling = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0)
    first, second = llm.generate([PROMPTS[0]] * 2, sampling, use_tqdm=False)
    assert sampling.seed is None
    seeds = [o.outputs[0].seed for o in (first, second)]
    assert seeds[0] != seeds[1]
    for output, seed in zip((first, second), seeds, strict=True):
        again = generate(llm, [PROMPTS[0]], temperature=1.0, max_tokens=16, logprobs=0, seed=seed)
        assert bits(again[0]) == bits(output)


def test_n_samples_differ_and_replay_alone(llm):
    params = {"temperature": 1.0, "max_tokens": 16, "logprobs": 0, "seed": 7}
    output = generate(llm, [PROMPTS[1]], n=4, **params)[0]
    texts = {tuple(sample.token_ids) for sample in output.outputs}
    assert len(texts) == 4
    for sample in output.outputs:
        alone = generate(llm, [PROMPTS[1]], **{**params, "seed": sample.seed})[0]
        assert tuple(alone.outputs[0].token_ids) == tuple(sample.token_ids)


def test_the_audit_stops_the_engine(llm):
    """Last: it breaks the engine. A decode step that was not padded is named."""
    state = runner(llm).corun
    state.plan = dataclasses.replace(state.plan, decode_rows=ROWS - 1)
    with pytest.raises(PlanViolationError, match=f"decode step of {ROWS - 1} rows"):
        generate(llm, [PROMPTS[0]])
