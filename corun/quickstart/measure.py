"""Runs the quickstart's workload on one engine and compares each request with itself.

Every request runs alone first, then all of them at once, on the same engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.quickstart.questions import QUESTIONS
from corun.verify.compare import Comparison, compare, total
from corun.verify.drive import Engine, play, sampling_params
from corun.verify.record import Record
from corun.verify.scenario import Request, alone, at_once

SAMPLING = {"temperature": 0.6, "seed": 42, "logprobs": 5}
CPU_KV_BYTES = 1 << 30
MODEL_LEN = 1024  # tokens a request: questions and answers are short


@dataclass(frozen=True, slots=True)
class Split:
    """Where one request's two texts part.

    question: the prompt as asked. token: 1-based number of the first different output token.
    before: the text up to it. alone, crowd: how each of the two goes on from there.
    """

    question: str
    token: int
    before: str
    alone: str
    crowd: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine did.

    policy: the policy in force ("off" for plain vLLM). comparison: every request alone against
    itself in the crowd. split: the earliest difference in text, if any. steps, violations: the step
    audit's counts (zero steps for plain vLLM, which has no audit). domain: the fingerprint or None.
    """

    policy: str
    requests: int
    comparison: Comparison
    split: Split | None
    steps: int
    violations: int
    domain: str | None

    @property
    def kept(self) -> bool:
        """Whether every bit was equal and every step inside the plan."""
        return self.comparison.identical and self.violations == 0


def requests_for(tokenizer: Any, max_tokens: int) -> tuple[Request, ...]:
    """The questions as requests: through the model's chat template where it has one."""
    params = {**SAMPLING, "max_tokens": max_tokens}
    made = []
    for number, question in enumerate(QUESTIONS):
        if getattr(tokenizer, "chat_template", None) is None:
            ids = tokenizer.encode(f"Question: {question}\nAnswer:")
        else:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        made.append(Request(f"question-{number}", tuple(ids), params))
    return tuple(made)


def run(
    engine: Engine,
    requests: Sequence[Request],
    make_params: Callable[[Mapping[str, Any]], Any],
    on_finished: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Record], dict[str, Record]]:
    """Each request alone, then all at once; both by request name."""
    by_itself: dict[str, Record] = {}
    for request in requests:
        by_itself |= play(engine, alone(request), make_params, on_finished).records
    crowd = play(engine, at_once("crowd", requests), make_params, on_finished).records
    return by_itself, crowd


def find_split(
    by_itself: Mapping[str, Record],
    crowd: Mapping[str, Record],
    comparison: Comparison,
    decode: Callable[[Sequence[int]], str],
) -> Split | None:
    """The earliest place where two texts part, in words; None where no token differed."""
    first = comparison.first_token
    if first is None:
        return None
    ours, theirs = (side[first.request].samples[first.sample] for side in (by_itself, crowd))
    before = decode(ours.token_ids[: first.step])

    def after(ids: Sequence[int]) -> str:
        # Decoded together with what came before: a token's text may depend on its neighbors.
        text = decode(ids)
        return text[len(before) :] if text.startswith(before) else decode(ids[first.step :])

    question = QUESTIONS[int(first.request.rpartition("-")[2])]
    return Split(question, first.step + 1, before, after(ours.token_ids), after(theirs.token_ids))


def engine_settings() -> dict[str, Any]:
    """Keywords of vLLM's LLM: the same for both engines, small on a CPU."""
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {
        "max_num_seqs": len(QUESTIONS),
        "max_model_len": MODEL_LEN,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        settings |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
    return settings


def start(model: str, policy: str) -> Any:
    """A vllm.LLM for "off", which overrules CORUN_POLICY; else a corun.LLM."""
    if policy == "off":
        import vllm

        return vllm.LLM(model, additional_config={"corun": {"policy": "off"}}, **engine_settings())
    import corun

    return corun.LLM(model, corun=policy, **engine_settings())


def measure(
    model: str,
    policy: str,
    max_tokens: int,
    on_finished: Callable[[str], None] = lambda name: None,
) -> Measured:
    """Starts an engine for `model` under `policy` and runs the workload twice on it."""
    llm = start(model, policy)
    tokenizer = llm.get_tokenizer()
    requests = requests_for(tokenizer, max_tokens)
    by_itself, crowd = run(llm.llm_engine, requests, sampling_params, on_finished)
    comparison = total(compare(by_itself[name], crowd[name]) for name in by_itself)
    split = find_split(by_itself, crowd, comparison, lambda ids: str(tokenizer.decode(list(ids))))
    if policy == "off":
        return Measured("off", len(requests), comparison, split, 0, 0, None)
    report = llm.corun_report()
    return Measured(
        policy=report["plan"]["policy"],
        requests=len(requests),
        comparison=comparison,
        split=split,
        steps=sum(report["steps"].values()),
        violations=len(report["violations"]),
        domain=llm.domain,
    )
