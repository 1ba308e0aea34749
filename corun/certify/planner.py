"""Certificate -> plan: the least restrictive schedule that keeps the contract. Pure Python.

The argument (docs/contract.md): a request's rows keep their bits if every row-wise operation sees
row counts of one class only, and if attention gives a row the same bits in every composition that
a step may have. What a certificate does not show to hold, the plan forbids, one grant at a time.
"""

from dataclasses import dataclass, replace

from corun.certify.certificate import Certificate, RowClaim
from corun.certify.compositions import PACKED
from corun.plan import Grants, Plan
from corun.rows import Rows

ORDER = ("certified", "pack", "isolate")
MOST_PADDING = 2.0  # rows for each token, in steps of LEAST_TOKENS tokens or more
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """What a plan must suit: requests and tokens in a step, and whether decode replays graphs.

    requests: ``max_num_seqs``. tokens: ``max_num_batched_tokens``. sequence: ``max_model_len``.
    """

    requests: int
    tokens: int
    decode_graph: bool
    sequence: int = 0

    @classmethod
    def largest(cls, certificate: Certificate) -> "Engine":
        """The largest engine that `certificate` was measured for, without graphs."""
        requests = max(1, certificate.sample_rows().largest)
        return cls(requests, certificate.largest, False, certificate.sequence)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a policy is allowed, and why or why not, in one sentence."""

    policy: str
    allowed: bool
    reason: str


def grants(certificate: Certificate) -> Grants:
    """What steps may hold under this certificate."""
    # A free cut may leave one token, which runs as a decode row; recomputed and cached tokens were
    # decoded once and prefilled once. Latent attention does the two by different algorithms.
    either_way = (
        certificate.holds("chunks")
        and certificate.holds("decode_is_prefill")
        and not _latent(certificate)
    )
    return Grants(
        mixed=certificate.holds("mixed"),
        batched_prefill=certificate.holds("batched_prefill"),
        free_chunks=either_way,
        prefix_cache=either_way,
        preemption=either_way,
    )


def longest_step(rows: Rows, engine: Engine) -> int | None:
    """The most tokens that a step should hold: the largest count at which no step is padded much.

    None where even ``engine.requests`` tokens would be.
    """
    counts = [n for n in rows if engine.requests <= n <= engine.tokens]
    for longest in reversed(counts):
        if _padding(rows, longest) <= MOST_PADDING:
            return longest
    return None


def _padding(rows: Rows, longest: int) -> float:
    """The most rows for each token among steps of LEAST_TOKENS to `longest` tokens."""
    worst, previous = 1.0, 0
    for first, last in rows.ranges:
        if first > longest:
            break
        # The step that is padded most holds one token more than the range before allows.
        tokens = max(previous + 1, LEAST_TOKENS)
        if tokens < first:
            worst = max(worst, first / tokens)
        previous = last
    return worst


def plan_certified(certificate: Certificate, engine: Engine) -> Plan | str:
    """The plan for ``certified``, or why there is none."""
    rows, sampled = certificate.step_rows(), certificate.sample_rows()
    if engine.requests > 1 and not certificate.holds("decode_rows"):
        return _because(certificate, "decode_rows")
    if engine.tokens > certificate.largest:
        return (
            f"the certificate covers steps of at most {certificate.largest} tokens, not "
            f"{engine.tokens}"
        )
    if why := _too_long(certificate, engine):
        return why
    if sampled.at_least(engine.requests) is None:
        return f"the LM head was certified for {sampled} rows, not {engine.requests}"
    longest = longest_step(rows, engine)
    if longest is None:
        return (
            f"no step of {engine.requests} tokens or more keeps all operations in one shape class "
            f"without much padding (their common class: {_short(rows)})"
        )
    given = grants(certificate)
    if _latent(certificate) and engine.sequence > longest:
        given = replace(given, batched_prefill=False)
    if engine.requests > 1 and certificate.together < longest:
        # Nobody looked at how a long piece fares in company.
        given = replace(given, mixed=False, batched_prefill=False)
    forbidden = [name for name, on in _named(given) if not on]
    return Plan(
        policy="certified",
        decode_rows=engine.requests,
        max_prefill_tokens=longest,
        decode_graph=engine.decode_graph,
        reason=f"measured on this machine: in steps of at most {longest} tokens every operation "
        "has one shape class" + (f"; not allowed: {', '.join(forbidden)}" if forbidden else ""),
        grants=given,
        step_rows=rows & Rows.span(1, longest),
        sample_rows=sampled,
        certificate=certificate.digest,
        class_of=(rows.largest, sampled.largest),
        split_beyond=_split_beyond(certificate),
    )


def plan_pack(certificate: Certificate, engine: Engine) -> Plan | str:
    """The plan for ``pack``, or why there is none."""
    if _split_beyond(certificate):
        return "the certificate was measured with split_decode, which 'pack' does not have"
    fuller = engine.requests > 1 and engine.tokens > certificate.together
    for name in ("decode_rows", PACKED if fuller else "batched_prefill"):
        if not certificate.holds(name):
            return _because(certificate, name)
    if wrong := _varies(certificate, (engine.requests, engine.tokens), (engine.requests,)):
        return wrong
    if why := _too_long(certificate, engine):
        return why
    if _latent(certificate) and engine.sequence > engine.tokens:
        return (
            "vLLM reads the cached context of latent attention (MLA) in parts that depend on the "
            "prompts in a step, and prompts longer than a step have one; raise "
            f"max_num_batched_tokens to max_model_len ({engine.sequence})"
        )
    return Plan(
        policy="pack",
        decode_rows=engine.requests,
        max_prefill_tokens=engine.tokens,
        decode_graph=engine.decode_graph,
        reason=f"rows keep their bits at any place in steps of {engine.tokens} and of "
        f"{engine.requests} rows, measured on this machine",
        grants=Grants(batched_prefill=True),
        certificate=certificate.digest,
    )


def plan_isolate(certificate: Certificate, engine: Engine) -> Plan | str:
    """The plan for ``isolate``, or why there is none.

    It rests on the paper's argument, not on the certificate (on a GPU its GEMMs are not the ones
    that were measured); the certificate can only speak against it.
    """
    for claim in certificate.rows:
        if engine.requests in claim.variant:
            return _place(claim, engine.requests)
    return Plan(
        policy="isolate",
        decode_rows=engine.requests,
        max_prefill_tokens=engine.tokens,
        decode_graph=engine.decode_graph,
        reason=f"no row was seen to depend on its place in decode steps of {engine.requests} rows",
    )


def _split_beyond(certificate: Certificate) -> int:
    """``Plan.split_beyond`` that the certificate was measured with."""
    return int(certificate.domain.get("split_decode", {}).get("beyond", 0))


def _latent(certificate: Certificate) -> bool:
    """Whether the model's attention is latent (MLA).

    vLLM reads what a prompt has in the cache in parts, as long as the number of such prompts in the
    step lets them be: steps may hold one at most, or none must have any.
    """
    return bool(certificate.domain.get("latent_attention", False))


PLANNERS = {"certified": plan_certified, "pack": plan_pack, "isolate": plan_isolate}


def verdicts(certificate: Certificate, engine: Engine) -> list[Verdict]:
    """Whether each policy is allowed, the least restrictive first."""
    found = [(policy, _allowed(certificate, engine, policy)) for policy in ORDER]
    return [
        Verdict(policy, False, plan)
        if isinstance(plan, str)
        else Verdict(policy, True, plan.reason)
        for policy, plan in found
    ]


def plan(certificate: Certificate, engine: Engine, policy: str = "auto") -> Plan:
    """The plan for `policy` (auto: the first that is allowed). ValueError says why there is none.

    ``certified`` also needs the loaded engine's own check to have found every bit equal.
    """
    reasons: list[str] = []
    for name in ORDER if policy == "auto" else (policy,):
        found = _allowed(certificate, engine, name)
        if isinstance(found, Plan):
            if reasons:  # say why it is not the less restrictive one
                found = replace(found, reason=f"{found.reason}; not {'; not '.join(reasons)}")
            return found
        reasons.append(f"{name}: {found}")
    raise ValueError(f"the certificate does not allow {'; '.join(reasons)}")


def _allowed(certificate: Certificate, engine: Engine, policy: str) -> Plan | str:
    found = PLANNERS[policy](certificate, engine)
    if isinstance(found, Plan) and policy == "certified":
        if certificate.engine is None:
            return "the certificate was not checked on the loaded engine"
        if not certificate.engine.equal:
            return _engine_differs(certificate)
    return found


def _named(given: Grants) -> list[tuple[str, bool]]:
    return [
        ("mixed steps", given.mixed),
        ("batched prefill", given.batched_prefill),
        ("free chunks", given.free_chunks),
        ("prefix caching", given.prefix_cache),
        ("preemption", given.preemption),
    ]


def _varies(certificate: Certificate, step: tuple[int, ...], sample: tuple[int, ...]) -> str | None:
    """Which operation depends on a row's place or neighbors at one of these row counts."""
    for claim in certificate.rows:
        known = Rows.of([n for c in claim.classes for n in c])
        for n in sample if claim.sampled else step:
            if n in claim.variant:
                return _place(claim, n)
            if n not in known:
                return f"{claim.name} was not measured at {n} rows"
    return None


def _place(claim: RowClaim, n: int) -> str:
    return f"{claim.name} depends on a row's place at {n} rows; choose another number"


def _too_long(certificate: Certificate, engine: Engine) -> str | None:
    """Why requests of the engine's length are not covered, or None."""
    if engine.sequence <= certificate.sequence:
        return None
    return (
        f"attention was tried with requests of at most {certificate.sequence} tokens, and this "
        f"engine's may have {engine.sequence} (max_model_len)"
    )


def _because(certificate: Certificate, name: str) -> str:
    claim = next((c for c in certificate.steps if c.name == name and not c.holds), None)
    if claim is None:
        return f"{name.replace('_', ' ')} was not measured"
    return f"{name.replace('_', ' ')} does not hold for {claim.operation}: {claim.example}"


def _engine_differs(certificate: Certificate) -> str:
    assert certificate.engine is not None
    return f"the loaded engine disagreed with the probes: {certificate.engine.example}"


def _short(rows: Rows) -> str:
    text = str(rows)
    return text if len(text) < 120 else text[:120].rsplit(",", 1)[0] + ", ..."
