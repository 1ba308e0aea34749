"""Runs the quickstart's workload on one engine and compares each request with itself.

Every request runs alone first, then all of them at once, on the same engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.config import CoRunConfig
from corun.contract import fingerprint
from corun.quickstart.questions import QUESTIONS
from corun.verify.compare import Comparison, compare, total
from corun.verify.drive import Engine, play, sampling_params
from corun.verify.engine import defaults, open_engine
from corun.verify.record import Record
from corun.verify.scenario import Request, alone, at_once

SAMPLING = {"temperature": 0.6, "seed": 42, "logprobs": 5}
# The same for both engines; all prompts together are shorter than max_num_batched_tokens.
SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": 4096, "use_tqdm_on_load": False}


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


def open_for(model: str, policy: str) -> Any:
    """vLLM's LLM for `model` under `policy`, with room for all questions at once."""
    config = CoRunConfig(policy=policy)
    return open_engine(model, config, **(defaults(config, len(QUESTIONS)) | SETTINGS))


def measure(
    model: str,
    policy: str,
    max_tokens: int,
    on_finished: Callable[[str], None] = lambda name: None,
) -> Measured:
    """Starts an engine for `model` under `policy` and runs the workload twice on it."""
    llm = open_for(model, policy)
    tokenizer = llm.get_tokenizer()
    requests = requests_for(tokenizer, max_tokens)
    by_itself, crowd = run(llm.llm_engine, requests, sampling_params, on_finished)
    comparison = total(compare(by_itself[name], crowd[name]) for name in by_itself)
    split = find_split(by_itself, crowd, comparison, lambda ids: str(tokenizer.decode(list(ids))))
    if policy == "off":
        return Measured("off", len(requests), comparison, split, 0, 0, None)
    report = llm.collective_rpc("corun_report")[0]
    return Measured(
        policy=report["plan"]["policy"],
        requests=len(requests),
        comparison=comparison,
        split=split,
        steps=sum(report["steps"].values()),
        violations=len(report["violations"]),
        domain=fingerprint(report["domain"]),
    )
