"""The suites: what they hold, and that they fit what the engine can hold."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import certified

from corun.engine.split_schedule import SPLIT_BEYOND
from corun.rows import Rows
from corun.verify.engine import limits_of
from corun.verify.prompts import RandomPrompts, TextPrompts, question, words_of
from corun.verify.sampling_mix import MIXES, mixes_for
from corun.verify.scenario import Abort, Arrival
from corun.verify.workload import (
    LONG_RUN,
    ROW_THRESHOLDS,
    Limits,
    adversarial_suite,
    paper_suite,
)

SOURCE = RandomPrompts(vocab_size=1000, seed=0)
ROOMY = Limits(rows=256, model_len=8192, kv_tokens=1 << 20, has_tokenizer=True)


class WordTokenizer:
    """A token a word."""

    chat_template = None

    def encode(self, text, add_special_tokens=True):
        return [hash_word(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def hash_word(word: str) -> int:
    return int.from_bytes(word.encode()[:6].ljust(6, b"_"), "little") % 50000


def test_the_papers_suite_is_the_papers():
    suite = paper_suite(SOURCE, ROOMY)
    assert len(suite.targets) == 32
    for target in suite.targets:
        assert target.params["temperature"] == 0.6
        assert target.params["seed"] == 42
        assert target.params["max_tokens"] == 48
        assert target.params["logprobs"] == 0
    batch, shuffled = suite.scenarios
    assert batch.targets == tuple(t.name for t in suite.targets)
    assert {e.step for e in batch.events} == {0}
    assert sorted(shuffled.targets) == sorted(batch.targets) and shuffled.targets != batch.targets
    assert len({t.prompt for t in suite.targets}) == 32
    assert suite.restarts == () and suite.left_out == ()
    assert len(paper_suite(SOURCE, ROOMY, restarts=2).restarts) == 2


def test_too_few_rows_for_the_papers_batch_are_said():
    suite = paper_suite(SOURCE, replace(ROOMY, rows=8))
    assert "8 at a time" in suite.left_out[0]
    with pytest.raises(ValueError, match="max_model_len"):
        paper_suite(SOURCE, replace(ROOMY, model_len=48))


def test_with_split_decode_the_long_run_has_rows_of_both_kinds():
    arguments = pytest.importorskip("corun.engine.arguments")
    for split in (0, SPLIT_BEYOND):
        plan = replace(certified(Rows.span(1, 64), Rows.span(1, 8)), split_beyond=split)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=1 << 16, block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=256),
            additional_config={arguments.PLAN_KEY: plan.to_mapping()},
        )
        model = SimpleNamespace(max_model_len=8192, skip_tokenizer_init=True)
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), model_config=model)
        limits = limits_of(llm)
        assert (limits.long_run == LONG_RUN) == (split == 0)
        for tokens in (16, 48, 600):  # as in quick runs, by default, and long
            suite = adversarial_suite(SOURCE, limits, max_tokens=tokens, quick=True)
            target = next(t for t in suite.targets if t.name == "long-run")
            assert target.params["max_tokens"] == tokens
            if split:
                assert len(target.prompt) < split < len(target.prompt) + tokens - 1


def test_the_adversarial_suite_covers_what_it_promises():
    suite = adversarial_suite(SOURCE, ROOMY, max_tokens=48)
    lengths = {len(t.prompt) for t in suite.targets}
    assert {1, 2, 3} <= lengths and max(lengths) >= 3000
    assert any(len(t.prompt) + t.params["max_tokens"] > LONG_RUN for t in suite.targets)
    params = [t.params for t in suite.targets]
    for name in (
        "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "bad_words", "min_tokens", "prompt_logprobs", "structured_outputs",
        "allowed_token_ids", "stop",
    ):  # fmt: skip
        assert any(name in p for p in params), name
    assert any(p["temperature"] == 0.0 for p in params)
    assert any(p.get("n") == 2 for p in params)
    assert any(p["logprobs"] == 20 for p in params)
    assert all("seed" in p for p in params)
    assert len({t.name for t in suite.targets}) == len(suite.targets)
    everything = [*suite.scenarios, *(s for later in suite.restarts for s in later)]
    strangers = [
        r for s in everything for r in s.requests if r.name not in {t.name for t in suite.targets}
    ]
    assert any("seed" not in r.params for r in strangers)
    assert any(isinstance(e, Abort) for s in everything for e in s.events)
    assert any(len({e.step for e in s.events}) > 10 for s in everything)
    assert len(suite.restarts) == 2
    assert suite.left_out == ()


@pytest.mark.parametrize("rows", ROW_THRESHOLDS)
def test_crowds_climb_past_each_threshold_that_the_rows_allow(rows):
    suite = adversarial_suite(SOURCE, replace(ROOMY, rows=rows))
    crowds = {s.name: s for s in suite.scenarios if s.name.startswith("crowd")}
    assert list(crowds) == [f"crowd past {t} rows" for t in ROW_THRESHOLDS if t <= rows]
    for threshold in ROW_THRESHOLDS:
        if threshold > rows:
            continue
        crowd = crowds[f"crowd past {threshold} rows"]
        assert len(crowd.requests) > threshold
        assert sum(e.step == 0 for e in crowd.events) < threshold
        assert crowd.targets
        strangers = [r for r in crowd.requests if r.name not in crowd.targets]
        assert all(r.params["ignore_eos"] and r.params["max_tokens"] >= 16 for r in strangers)


def test_without_a_tokenizer_nothing_asks_for_one():
    suite = adversarial_suite(SOURCE, replace(ROOMY, has_tokenizer=False))
    everything = [*suite.scenarios, *(s for later in suite.restarts for s in later)]
    asked = {name for s in everything for r in s.requests for name in r.params}
    assert not asked & {"bad_words", "structured_outputs", "stop"}
    assert sum("needs a tokenizer" in text for text in suite.left_out) == 3
    assert len(mixes_for(True)) == len(MIXES)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([8, 33, 256]),
    st.integers(100, 5000),
    st.none() | st.integers(500, 20000),
    st.booleans(),
    st.booleans(),
)
def test_everything_fits_the_engine_and_repeats_from_its_seed(
    rows, model_len, kv, tokenizer, quick
):
    limits = Limits(rows, model_len, kv, tokenizer)
    suite = adversarial_suite(SOURCE, limits, max_tokens=16, quick=quick)
    assert suite == adversarial_suite(SOURCE, limits, max_tokens=16, quick=quick)
    for scene in (*suite.scenarios, *(s for later in suite.restarts for s in later)):
        for event in scene.events:
            if isinstance(event, Arrival):
                assert limits.holds(event.request)
                assert len(event.request.prompt) >= 1
    if model_len < LONG_RUN:
        assert any(str(LONG_RUN) in text for text in suite.left_out)


def test_an_engine_that_holds_nothing_is_an_error():
    with pytest.raises(ValueError, match="no request fits"):
        adversarial_suite(SOURCE, Limits(8, 40, None, True), max_tokens=48)


def test_prompts_have_the_length_asked_for_and_follow_their_key():
    text = TextPrompts(WordTokenizer(), 50000, seed=3)
    for source in (text, SOURCE):
        for tokens in (1, 2, 17, 700):
            assert len(source.prompt("a", tokens)) == tokens
        assert source.prompt("a", 40) == source.prompt("a", 40) != source.prompt("b", 40)
        assert source.question("a") == source.question("a") != source.question("b")
        assert len(source.question("a")) >= 16
    assert text.prompt("a", 40) != TextPrompts(WordTokenizer(), 50000, seed=4).prompt("a", 40)
    assert len({question(Random(i)) for i in range(50)}) == 50


def test_a_chat_template_is_used_where_there_is_one():
    class Chat(WordTokenizer):
        chat_template = "{}"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            assert add_generation_prompt and not tokenize
            return f"<user> {messages[0]['content']} <assistant>"

    ids = TextPrompts(Chat(), 50000, 0).question("a")
    assert (ids[0], ids[-1]) == (hash_word("<user>"), hash_word("<assistant>"))


def test_words_of_tokens():
    assert words_of(None, [1, 2]) == "<1> <2>"
    assert words_of(WordTokenizer(), (1, 2)) == "1 2"
