"""Every sampling parameter on a real engine (CPU, V1 runner); no co-runner changes a bit."""

import json

import numpy as np
import pytest
import torch
from conftest import SMALL

pytest.importorskip("vllm")
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from corun.config import CoRunConfig
from corun.engine.sampling.cpu_race import exact_score
from corun.engine.sampling.philox import token_words
from corun.verify.engine import close_engine, open_engine

CHUNK = 64
TOKENS = 6
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Dear customer, " * 40,  # several prefill chunks
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(model_path):
    settings = {**SMALL, "max_num_batched_tokens": CHUNK}
    engine = open_engine(model_path, CoRunConfig("isolate"), **settings)
    yield engine
    close_engine(engine)


def params(**given):
    return SamplingParams(**{"temperature": 1.0, "seed": 11, "max_tokens": TOKENS, **given})


def run(llm, prompts, sampling):
    return llm.generate(prompts, sampling, use_tqdm=False)


def tokens(output):
    return list(output.outputs[0].token_ids)


def bits(value):
    return int(np.float32(value).view(np.uint32))


def table(steps):
    """Every returned logprob, to the bit, in the order in which it is reported."""
    return [
        None if s is None else [(token, bits(lp.logprob), lp.rank) for token, lp in s.items()]
        for s in steps or ()
    ]


def everything(output):
    """All that one request got back."""
    samples = [
        (c.index, c.seed, list(c.token_ids), table(c.logprobs), c.finish_reason)
        for c in output.outputs
    ]
    return samples, table(output.prompt_logprobs)


def count(result):
    samples, prompt = result
    return sum(len(s) for s in prompt if s) + sum(
        len(t) + sum(map(len, lp)) for _, _, t, lp, _ in samples
    )


MIXED = [
    (0, params(temperature=0.0, logprobs=20)),
    (1, params(temperature=0.6, seed=42, logprobs=20)),
    (2, params(top_k=40, logprobs=20, seed=2**63 + 5)),
    (3, params(top_p=0.9, prompt_logprobs=20, seed=-17)),
    (0, params(min_p=0.05, temperature=1.3, logprobs=0)),
    (1, params(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=2)),
    (2, params(top_k=7, top_p=0.8, min_p=0.01, temperature=0.8, logprob_token_ids=[5, 17, 400])),
    (0, params(n=2, temperature=1.5, logprobs=0)),
    (1, params(logit_bias={40: 5.0, 41: -100.0}, min_tokens=4, logprobs=1)),
    (2, params(bad_words=[" the", " a", "self"], logprobs=1)),
    (0, params(allowed_token_ids=[260, 281, 284, 28, 30], logprobs=3)),
    (1, params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=16)),
]


def test_no_co_runner_changes_a_bit(llm):
    """Each kind of request alone, beside all the others, and beside them in the other order."""
    prompts = [PROMPTS[i] for i, _ in MIXED]
    sampling = [s for _, s in MIXED]
    alone = [everything(run(llm, [p], [s])[0]) for p, s in zip(prompts, sampling, strict=True)]
    crowd = [everything(o) for o in run(llm, prompts, sampling)]
    back = [everything(o) for o in run(llm, prompts[::-1], sampling[::-1])][::-1]
    assert crowd == alone
    assert back == alone
    print(f"compared {2 * sum(map(count, alone))} values")
    assert llm.collective_rpc("corun_report")[0]["violation_count"] == 0


def test_greedy_is_the_first_of_the_reported_logprobs(llm):
    output = run(llm, PROMPTS, params(temperature=0.0, logprobs=20, prompt_logprobs=20))
    for o in output:
        assert len(o.prompt_logprobs) == len(o.prompt_token_ids)
        for token, step in zip(tokens(o), o.outputs[0].logprobs, strict=True):
            ranked = sorted(step.values(), key=lambda lp: lp.rank)
            assert [lp.rank for lp in ranked] == list(range(1, 21))
            assert step[token].rank == 1
            falling = [lp.logprob for lp in ranked]
            assert falling == sorted(falling, reverse=True)
            assert 0.0 < sum(np.exp(falling)) <= 1.0 + 1e-5


def test_fewer_logprobs_are_the_head_of_more(llm):
    few, many = (
        run(llm, [PROMPTS[1]], params(temperature=0.7, logprobs=k))[0].outputs[0] for k in (3, 20)
    )
    assert list(few.token_ids) == list(many.token_ids)
    for token, a, b in zip(few.token_ids, few.logprobs, many.logprobs, strict=True):
        head = dict(list(b.items())[: len(a)])
        assert {t: bits(lp.logprob) for t, lp in a.items()} == {
            t: bits(lp.logprob) for t, lp in head.items() if t in a
        }
        assert set(a) - {token} <= {t for t, lp in b.items() if lp.rank <= 3}


def test_chosen_tokens_are_scored_beside_a_neighbour_that_wants_the_top(llm):
    chosen = [5, 17, 400]
    own, top = run(
        llm,
        PROMPTS[:2],
        [params(logprob_token_ids=chosen), params(logprobs=7)],
    )
    for token, step in zip(tokens(own), own.outputs[0].logprobs, strict=True):
        assert set(step) == {token, *chosen}
    for token, step in zip(tokens(top), top.outputs[0].logprobs, strict=True):
        assert {lp.rank for lp in step.values()} >= set(range(1, 8))
        assert token in step


def best_logprobs(llm, n=1, **given):
    """The first sampled token's logprob in each of `n` samples."""
    many = run(llm, [PROMPTS[1]], params(max_tokens=1, n=n, logprobs=0, **given))[0]
    return [c.logprobs[0][c.token_ids[0]] for c in many.outputs]


def test_temperature_top_k_top_p_min_p_narrow_the_choice(llm):
    def texts(**given):
        many = run(llm, [PROMPTS[1]], params(max_tokens=3, n=4, **given))[0]
        return {tuple(c.token_ids) for c in many.outputs}

    greedy = tuple(tokens(run(llm, [PROMPTS[1]], params(max_tokens=3, temperature=0.0))[0]))
    assert len(texts()) == 4
    assert texts(top_k=1) == texts(top_p=1e-6) == {greedy}
    # min_p compares with the best token: equal logits (bf16 has many) all stay.
    best = {bits(lp.logprob) for lp in best_logprobs(llm, temperature=0.0)}
    assert {bits(lp.logprob) for lp in best_logprobs(llm, n=6, min_p=1.0)} == best
    assert {bits(lp.logprob) for lp in best_logprobs(llm, n=6, temperature=0.001)} == best


def test_masks_and_biases(llm):
    end = llm.get_tokenizer().eos_token_id
    allowed = [260, 281, 284]
    masked, biased, kept_alive, ended = run(
        llm,
        [PROMPTS[0]] * 4,
        [
            params(allowed_token_ids=allowed),
            params(logit_bias={300: 100.0}),
            params(logit_bias={end: 100.0}, min_tokens=4),
            params(logit_bias={end: 100.0}),
        ],
    )
    assert set(tokens(masked)) <= set(allowed)
    assert set(tokens(biased)) == {300}
    assert tokens(kept_alive).index(end) == 4
    assert tokens(ended) == [end]


def test_bad_words_and_penalties(llm):
    plain = run(llm, [PROMPTS[0]], params(temperature=0.0))[0].outputs[0]
    word = llm.get_tokenizer().decode([plain.token_ids[0]])
    barred = run(llm, [PROMPTS[0]], params(temperature=0.0, bad_words=[word]))[0]
    assert tokens(barred)[0] != plain.token_ids[0]

    pair = {"allowed_token_ids": [260, 281], "temperature": 0.0}
    free, averse = run(
        llm,
        [PROMPTS[1]] * 2,
        [params(**pair, logit_bias={260: 1.0}), params(**pair, frequency_penalty=2.0)],
    )
    assert len(set(tokens(averse))) == 2, "a growing penalty makes two tokens alternate"
    assert set(tokens(free)) <= {260, 281}


def test_structured_output(llm):
    schema = StructuredOutputsParams(json=SCHEMA)
    asked = params(structured_outputs=schema, max_tokens=24, logit_bias={216: -50.0, 198: -50.0})
    beside = params(max_tokens=24, seed=3)
    structured, free = run(llm, [PROMPTS[0], PROMPTS[1]], [asked, beside])
    assert set(json.loads(structured.outputs[0].text)) == {"ok"}
    assert tokens(free) == tokens(run(llm, [PROMPTS[1]], beside)[0])


def test_samples_have_seeds_of_their_own_that_replay_them(llm):
    output = run(llm, [PROMPTS[1]], params(n=4, seed=7))[0]
    assert output.outputs[0].seed == 7
    assert len({c.seed for c in output.outputs}) == 4
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    for sample in output.outputs[::3]:
        assert tokens(run(llm, [PROMPTS[1]], params(seed=sample.seed))[0]) == sample.token_ids


def test_a_request_without_a_seed_gets_its_own(llm):
    shared = SamplingParams(temperature=1.0, max_tokens=TOKENS)
    first, second = run(llm, [PROMPTS[1]] * 2, shared)
    assert shared.seed is None
    seeds = [o.outputs[0].seed for o in (first, second)]
    assert seeds[0] != seeds[1]
    assert tokens(first) != tokens(second)
    for output, seed in zip((first, second), seeds, strict=True):
        assert tokens(run(llm, [PROMPTS[1]], params(seed=seed))[0]) == tokens(output)


def test_a_seed_beyond_64_bits_is_refused_before_the_engine(llm):
    with pytest.raises(ValueError, match="64 bits"):
        run(llm, [PROMPTS[0]], params(seed=2**64))
    assert tokens(run(llm, [PROMPTS[0]], params(seed=2**64 - 5))[0]) == tokens(
        run(llm, [PROMPTS[0]], params(seed=-5))[0]
    )


def test_a_draw_can_be_recomputed_from_its_seed_and_position(llm):
    """Philox at (seed, index in the sequence) over the reported logprobs names the drawn token."""
    temperature, seed = 1.4, -(2**40) + 3
    asked = params(seed=seed, temperature=temperature, top_k=20, logprobs=20, max_tokens=12)
    for output in run(llm, PROMPTS, asked):
        start = len(output.prompt_token_ids)
        for i, (token, step) in enumerate(
            zip(tokens(output), output.outputs[0].logprobs, strict=True)
        ):
            top = torch.tensor([t for t, lp in step.items() if lp.rank <= 20])
            words = token_words(
                torch.full_like(top, seed), torch.full_like(top, start + i), top
            ).tolist()
            scores = {
                t: exact_score(step[t].logprob, temperature, word)
                for t, word in zip(top.tolist(), words, strict=True)
            }
            assert max(scores, key=scores.get) == token


def test_position_counts_from_the_start_of_the_sequence(llm):
    """Going on from prompt + outputs gives the tokens that were to come: same seed, same places."""
    whole = run(llm, [PROMPTS[1]], params(seed=99, max_tokens=10))[0]
    known = list(whole.prompt_token_ids) + tokens(whole)[:4]
    rest = run(llm, [TokensPrompt(prompt_token_ids=known)], params(seed=99, max_tokens=6))[0]
    assert tokens(rest) == tokens(whole)[4:]
