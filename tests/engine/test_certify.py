"""``corun certify`` on real vLLM, and what it allows: caching, preemption, mixed steps."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL

pytest.importorskip("vllm")
from vllm import SamplingParams

from corun.certify import planner, store
from corun.certify.certificate import Certificate
from corun.cli import main
from corun.config import MEASURE, CoRunConfig
from corun.contract import fingerprint
from corun.verify.engine import close_engine, open_engine

# A quarter longer than max_model_len is tried: well below where the kernel changes.
BF16 = {**SMALL, "dtype": "bfloat16", "block_size": 32, "max_model_len": 1024}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A place of its own for this module's certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def certified(cache, model_path, tmp_path_factory):
    """The report of one ``corun certify``."""
    path = tmp_path_factory.mktemp("certify") / "report.json"
    flags = [f"--engine-arg={k}={v}" for k, v in BF16.items() if k != "enforce_eager"]
    given = ["certify", model_path, "--budget", "8", "--json", str(path)]
    assert main([*given, *flags]) == 0
    return json.loads(path.read_text())


def test_the_certificate_says_what_is_known_of_this_stack(certified):
    certificate = Certificate.from_mapping(certified["certificate"])
    print(f"compared {sum(c.values for c in (*certificate.rows, *certificate.steps))} values")
    assert certificate.engine.equal and certificate.engine.logprobs > 200
    assert min(claim.values for claim in certificate.steps) >= 100_000
    split = [claim for claim in certificate.rows if len(claim.classes) > 1]
    assert split, "vLLM's CPU linears have several shape classes in bf16"
    assert {v["policy"]: v["allowed"] for v in certified["policies"]} == {
        "certified": True,
        "pack": True,
        "isolate": True,
    }


def test_a_certificate_is_found_again_and_no_other_is_taken(certified, model_path, tmp_path):
    kept = Certificate.from_mapping(json.loads(Path(certified["file"]).read_text()))
    assert store.load(kept.domain) == kept
    foreign = {**certified["certificate"], "domain": {**kept.domain, "device": "another"}}
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps(foreign))
    with pytest.raises(ValueError, match=r"of another engine.*device"):
        open_engine(model_path, CoRunConfig("certified", certificate=str(path)), **BF16)


def answers(llm, prompts):
    params = SamplingParams(
        temperature=0.6, seed=7, max_tokens=32, logprobs=2, ignore_eos=True, detokenize=False
    )
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        sample = output.outputs[0]
        values = [v.logprob for step in sample.logprobs for v in step.values()]
        bits = np.array(values, dtype=np.float32).view(np.uint32).tolist()
        found.append((list(sample.token_ids), bits))
    return found


SHORT = {**BF16, "max_model_len": 384}
SHARED = "The quick brown fox jumps over the lazy dog. " * 14
PROMPTS = [SHARED + f"Question {i}: " + "why? " * (7 * i % 20) for i in range(8)]


@pytest.fixture(scope="module")
def played(certified, model_path):
    """Answers alone, in a crowd and in another order, of an engine with room for few tokens.

    Then, of the same engine, the prompt logprobs of one prompt, asked for twice.
    """
    llm = open_engine(model_path, CoRunConfig("auto"), **SHORT, num_gpu_blocks_override=15)
    try:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        crowd = answers(llm, PROMPTS)
        again = answers(llm, PROMPTS[::-1])[::-1]
        report = llm.collective_rpc("corun_report")[0]
        return alone, crowd, again, report, prompt_logprobs(llm)
    finally:
        close_engine(llm)


def test_auto_caches_mixes_and_preempts_and_keeps_every_bit(played):
    """Room for fewer tokens than eight requests need: some lose their KV cache half-way."""
    alone, crowd, again, report, _ = played
    print(f"compared {sum(len(t) + len(b) for t, b in alone) * 2} values")
    assert crowd == alone and again == alone
    assert report["plan"]["policy"] == "certified"
    assert report["violation_count"] == 0
    print({name: report[name] for name in ("preempted", "cached_tokens", "mixed_steps")})
    assert report["preempted"] > 0 and report["cached_tokens"] > 0 and report["mixed_steps"] > 0


def test_an_engine_of_other_sizes_is_in_the_same_domain_and_gives_the_same_bits(played, model_path):
    alone, _, _, report, _ = played
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 33}
    llm = open_engine(model_path, CoRunConfig("auto"), **{**SHORT, **sizes})
    try:
        other = answers(llm, PROMPTS)
        other_report = llm.collective_rpc("corun_report")[0]
    finally:
        close_engine(llm)
    print(f"compared {sum(len(t) + len(b) for t, b in alone)} values")
    assert other == alone
    assert fingerprint(other_report["domain"]) == fingerprint(report["domain"])
    assert other_report["plan"]["decode_rows"] != report["plan"]["decode_rows"]
    assert other_report["violation_count"] == 0


def prompt_logprobs(llm):
    """The bits of one prompt's logprobs, twice, and how many of its tokens were in the cache."""
    prompt = "A new prompt: " + "the quick brown fox jumps over the lazy dog. " * 10
    asked = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=1, skip_reading_prefix_cache=False)
    found = []
    for _ in range(2):
        output = llm.generate([prompt], asked, use_tqdm=False)[0]
        values = [v.logprob for step in output.prompt_logprobs[1:] for v in step.values()]
        found.append(np.array(values, dtype=np.float32).view(np.uint32).tolist())
    before = llm.collective_rpc("corun_report")[0]["cached_tokens"]
    llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    return *found, llm.collective_rpc("corun_report")[0]["cached_tokens"] - before


def test_prompt_logprobs_never_start_behind_a_cache_hit(played):
    """vLLM would return memory that nobody wrote for the positions behind the hit."""
    first, second, cached = played[-1]
    assert cached > 0  # there was a hit to be had
    print(f"compared {len(first)} values")
    assert first == second and len(first) > 90


def test_a_linear_that_is_wrong_in_one_of_500_values_is_caught(cache, shallow_model):
    """At one row count in seven; the whole model's own linear is tampered with."""
    llm = open_engine(
        shallow_model,
        CoRunConfig("certified", certificate=MEASURE),
        **BF16,
        max_num_batched_tokens=64,
    )

    def tamper(worker):
        layer = worker.model_runner.get_model().model.layers[0].self_attn.qkv_proj
        apply = layer.quant_method.apply

        def wrong(module, x, bias=None):
            y = apply(module, x, bias)
            if module is layer and len(x) % 7 == 3:
                y = y.clone()
                y.flatten()[::500] *= 1.01
            return y

        layer.quant_method.apply = wrong

    try:
        llm.collective_rpc(tamper)
        given = llm.collective_rpc("corun_measure", args=({"test": "tampered"}, 4.0))[0]
    finally:
        close_engine(llm)
    claim = next(c for c in Certificate.from_mapping(given).rows if c.name.startswith("QKV"))
    print(f"compared {claim.values} values")
    bad = [n for n in range(1, 65) if n % 7 == 3]
    assert not any(n in claim.same() for n in bad)
    assert any(n in claim.same() for n in range(1, 65))
    plan = planner.plan_certified(Certificate.from_mapping(given), planner.Engine(8, 64, False))
    assert isinstance(plan, str) or not any(n in plan.step_rows for n in bad)
