"""The suites of ``corun verify``: which requests are compared, and beside what. Pure Python.

paper: Section V-B of the paper. 32 prompts, each alone and then in a batch of 32, temperature 0.6,
seed 42, the sampled tokens' logprobs. (The paper stops after 8 tokens; here that is a parameter.)

adversarial: prompts of 1 to a few thousand tokens with mixed sampling parameters, among other
co-runners, staggered, shuffled, with neighbors aborted in flight, in crowds that cross the row
counts at which kernels are known to switch, and after engine restarts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from corun.verify.prompts import PromptSource
from corun.verify.sampling_mix import Mix, mixes_for, params_for
from corun.verify.scenario import (
    Arrival,
    Request,
    Scenario,
    alone,
    at_once,
    staggered,
    with_aborts,
)

ROW_THRESHOLDS = (8, 64, 256)
"""Concurrent rows at which vLLM's samplers, norms and graphs are known to take other paths."""

LONG_RUN = 2000
"""At least one request grows past this many tokens, where the model can hold it."""

PAPER_PROMPTS, PAPER_TEMPERATURE, PAPER_SEED = 32, 0.6, 42

_LENGTHS = (1, 2, 3, 9, 16, 17, 31, 40, 64, 65, 100, 129, 200, 257, 384, 511, 700, 1025, 1500, 3000)
_QUICK_LENGTHS = (1, 2, 17, 65, 130, 300)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold.

    rows: max_num_seqs. model_len: longest request in tokens. kv_tokens: tokens that the KV cache
    holds, or None where unknown. has_tokenizer: whether the engine has one. long_run: tokens that
    one request is to grow past.
    """

    rows: int
    model_len: int
    kv_tokens: int | None
    has_tokenizer: bool
    long_run: int = LONG_RUN

    def holds(self, request: Request) -> bool:
        """Whether `request` alone fits."""
        longest = len(request.prompt) + int(request.params["max_tokens"])
        return longest <= self.model_len and request.most_tokens <= (self.kv_tokens or 1 << 62)


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite.

    targets: each is run alone on the first engine; that output is its reference. scenarios: then
    played on the first engine. restarts: for each later engine, the scenarios played on it.
    left_out: what the engine cannot hold or do, and why, in words.
    """

    name: str
    targets: tuple[Request, ...]
    scenarios: tuple[Scenario, ...]
    restarts: tuple[tuple[Scenario, ...], ...]
    left_out: tuple[str, ...]


def paper_suite(
    source: PromptSource,
    limits: Limits,
    *,
    max_tokens: int = 48,
    prompts: int = PAPER_PROMPTS,
    restarts: int = 0,
) -> Suite:
    """Section V-B, with the batch in a second order and, where asked for, after restarts."""
    params = {
        "temperature": PAPER_TEMPERATURE,
        "seed": PAPER_SEED,
        "max_tokens": max_tokens,
        "logprobs": 0,
    }
    room = limits.model_len - max_tokens
    if room < 1:
        raise ValueError(
            f"the engine holds {limits.model_len} tokens a request, too few for {max_tokens} "
            f"output tokens; lower --max-tokens or raise max_model_len"
        )
    targets = tuple(
        Request(f"paper-{i}", source.question(f"paper-{i}")[-room:], params) for i in range(prompts)
    )
    rng = Random("paper")
    left_out = []
    if limits.rows < prompts:
        left_out.append(
            f"the batch of {prompts} runs {limits.rows} at a time (max_num_seqs); "
            f"give --rows {prompts} to run it at once"
        )
    return Suite(
        "paper",
        targets,
        (
            at_once(f"batch of {prompts}", targets),
            at_once(f"batch of {prompts}, shuffled", _shuffled(targets, rng)),
        ),
        tuple(
            (at_once(f"batch of {prompts}, shuffled", _shuffled(targets, rng)),)
            for _ in range(restarts)
        ),
        tuple(left_out),
    )


def adversarial_suite(
    source: PromptSource,
    limits: Limits,
    *,
    max_tokens: int = 48,
    seed: int = 0,
    restarts: int = 2,
    quick: bool = False,
) -> Suite:
    """Everything that a co-runner might do to a request; see the module's text."""
    make = _Maker(source, limits, max_tokens, seed)
    targets, left_out = make.targets(_QUICK_LENGTHS if quick else _LENGTHS)
    few = targets[:3]
    half = max(4, len(targets) // 2)
    rng = Random(f"{seed}:adversarial")
    scenarios = [
        at_once("together", targets),
        make.aborts("neighbors aborted", targets, half),
    ]
    if not quick:
        strangers = make.strangers("shuffled", half)
        scenarios += [
            staggered("shuffled among others", targets, strangers, rng, gap=0),
            staggered("staggered", targets, make.strangers("staggered", half), rng, gap=3),
        ]
    scenarios += [make.crowd(t, targets) for t in ROW_THRESHOLDS if t <= limits.rows]
    scenarios += [alone(target, "alone again") for target in few]
    later = []
    for r in range(1, restarts + 1):
        beside = make.strangers(f"restart-{r}", half)
        later.append(
            (
                *(alone(target, "alone, fresh engine") for target in few),
                staggered("staggered, fresh engine", targets, beside, rng, gap=2),
            )
        )
    return Suite("adversarial", targets, tuple(scenarios), tuple(later), left_out)


class _Maker:
    """Makes requests that fit one engine."""

    def __init__(self, source: PromptSource, limits: Limits, max_tokens: int, seed: int) -> None:
        self.source, self.limits, self.max_tokens, self.seed = source, limits, max_tokens, seed
        self.mixes: Sequence[Mix] = mixes_for(limits.has_tokenizer)

    def targets(self, lengths: Sequence[int]) -> tuple[tuple[Request, ...], tuple[str, ...]]:
        """Requests to compare: every length and every way to sample at least once."""
        chosen, left_out = [], []
        for i in range(max(len(lengths), len(self.mixes))):
            length, mix = lengths[i % len(lengths)], self.mixes[i % len(self.mixes)]
            request = self._request(f"target-{i}", length, mix, self.max_tokens)
            if self.limits.holds(request):
                chosen.append(request)
            else:
                left_out.append(f"{mix.name}, prompt of {length} tokens: longer than {self._size}")
        long_run = self._long_run()
        if self.limits.holds(long_run):
            chosen.append(long_run)
        else:
            past = self.limits.long_run
            left_out.append(f"a request past {past} tokens: longer than {self._size}")
        missing = {m.name for m in mixes_for(True)} - {m.name for m in self.mixes}
        left_out += [f"{name}: needs a tokenizer" for name in sorted(missing)]
        if not chosen:
            raise ValueError(
                f"no request fits {self._size}; lower --max-tokens or raise max_model_len"
            )
        return tuple(chosen), tuple(left_out)

    def strangers(self, tag: str, count: int) -> tuple[Request, ...]:
        """Co-runners that are not compared; a quarter of them has no seed."""
        rng = Random(f"{self.seed}:{tag}")
        made = []
        for i in range(count):
            longest = rng.choice((40, 40, 40, 300, 300, 1500))
            mix = rng.choice(self.mixes)
            most = rng.randint(4, 2 * self.max_tokens)
            length = rng.randint(1, longest)
            lives = rng.random() < 0.5
            made.append(
                self._stranger(f"{tag}-{i}", rng, mix, length=length, max_tokens=most, lives=lives)
            )
        return tuple(request for request in made if self.limits.holds(request))

    def aborts(self, name: str, targets: Iterable[Request], count: int) -> Scenario:
        """Targets and strangers staggered; two of three strangers are aborted in some state."""
        rng = Random(f"{self.seed}:{name}")
        strangers = self.strangers(name, count)
        victims = [s.name for i, s in enumerate(strangers) if i % 3]
        scene = staggered(name, targets, strangers, rng, gap=2)
        return with_aborts(scene, victims, rng, within=self.max_tokens // 2)

    def crowd(self, rows: int, targets: Sequence[Request]) -> Scenario:
        """More requests than `rows`, arriving over a few steps so that the count climbs past it."""
        rng = Random(f"{self.seed}:crowd-{rows}")
        size = rows + max(2, rows // 4)
        mine = rng.sample(targets, min(len(targets), max(2, size // 2)))
        # Strangers that live long enough for the last arrival to find the first still running.
        plain = [m for m in self.mixes if "stop" not in m.name and "structured" not in m.name]
        lives = max(16, self.max_tokens)
        strangers = [
            self._stranger(
                f"crowd-{i}",
                rng,
                rng.choice(plain),
                length=rng.randint(1, 48),
                max_tokens=lives,
                lives=True,
            )
            for i in range(size - min(len(mine), size // 4))
        ]
        order = [*mine, *filter(self.limits.holds, strangers)]
        rng.shuffle(order)
        events = tuple(Arrival(4 * i // len(order), request) for i, request in enumerate(order))
        return Scenario(f"crowd past {rows} rows", events, tuple(r.name for r in mine))

    def _request(self, name: str, length: int, mix: Mix, max_tokens: int) -> Request:
        rng = Random(f"{self.seed}:{name}")
        seed = rng.getrandbits(32)
        params = params_for(mix, rng, self.source.vocab_size, max_tokens, seed)
        return Request(name, self.source.prompt(name, length), params)

    def _stranger(
        self, name: str, rng: Random, mix: Mix, *, length: int, max_tokens: int, lives: bool
    ) -> Request:
        params = dict(params_for(mix, rng, self.source.vocab_size, max_tokens, rng.getrandbits(32)))
        if rng.random() < 0.25:
            del params["seed"]
        if lives:
            params["ignore_eos"] = True
        # Logprobs of a long prompt cost [prompt, vocabulary] floats and add no new path.
        most = 200 if "prompt_logprobs" in params else self.limits.model_len // 2
        length = max(1, min(length, most))
        return Request(name, self.source.prompt(name, length), params)

    def _long_run(self) -> Request:
        length = self.limits.long_run - self.max_tokens // 2
        request = self._request("long-run", length, self.mixes[0], self.max_tokens)
        return Request(request.name, request.prompt, {**request.params, "ignore_eos": True})

    @property
    def _size(self) -> str:
        kv = "" if self.limits.kv_tokens is None else f" and {self.limits.kv_tokens} KV tokens"
        return f"the engine's {self.limits.model_len} tokens a request{kv}"


def _shuffled(requests: Sequence[Request], rng: Random) -> tuple[Request, ...]:
    order = list(requests)
    rng.shuffle(order)
    return tuple(order)
