"""A KV cache with room for one longest request: the others wait, and nothing is preempted."""

import numpy as np
import pytest
from conftest import SMALL

pytest.importorskip("vllm")
from vllm import SamplingParams

from corun.config import CoRunConfig
from corun.verify.engine import close_engine, open_engine

BLOCKS, LONGEST = 5, 512  # one of the blocks (of 128 tokens) is vLLM's null block


@pytest.fixture(scope="module")
def llm(shallow_model):
    settings = {
        **SMALL,
        "max_num_seqs": 4,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": BLOCKS,
    }
    engine = open_engine(shallow_model, CoRunConfig("isolate"), **settings)
    yield engine
    close_engine(engine)


def answer(llm, prompts):
    params = SamplingParams(temperature=0.6, seed=3, max_tokens=16, logprobs=0, ignore_eos=True)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        sample = output.outputs[0]
        values = [s[t].logprob for t, s in zip(sample.token_ids, sample.logprobs, strict=True)]
        bits = np.array(values, dtype=np.float32).view(np.uint32).tolist()
        found.append((list(sample.token_ids), bits))
    return found


def test_requests_that_must_wait_for_room_keep_their_bits(llm):
    prompts = [f"Item {i}: " + "the long and winding road " * (8 * (i % 4)) for i in range(7)]
    alone = [answer(llm, [p])[0] for p in prompts]
    crowd = answer(llm, prompts)
    print(f"compared {sum(len(t) for t, _ in alone) * 2} values")
    assert crowd == alone
    report = llm.collective_rpc("corun_report")[0]
    assert report["violation_count"] == 0
    assert report["most_requests"] > 1
