"""Certificates for tests, and strategies that draw them."""

from hypothesis import strategies as st

from corun.certify.certificate import Certificate, EngineCheck, RowClaim, StepClaim
from corun.certify.compositions import WORDS
from corun.rows import Rows

DOMAIN = {"model": "m", "dtype": "torch.bfloat16", "device": "d", "threads": 2, "software": {}}
SEQUENCE = 4096
EQUAL = EngineCheck(equal=True, tokens=256, logprobs=300)
DIFFERS = EngineCheck(False, 256, 300, "request 3, output 7, token: 5 alone, 6 in company")


def row_claim(name, classes, variant=(), sampled=False):
    """A claim of these classes (iterables of counts)."""
    return RowClaim(
        name, sampled, tuple(Rows.of(c) for c in classes), Rows.of(variant), 1_000_000, 1.5
    )


def step_claims(broken=(), operation="attention"):
    """A claim for each property, those of `broken` not holding."""
    return [
        StepClaim(operation, name, name not in broken, 24, 200_000, *(["!"] * (name in broken)))
        for name in WORDS
    ]


def certificate(*, largest=64, requests=8, broken=(), engine=EQUAL, step=None, sample=None, **more):
    """One linear operation, one LM head, one attention; one class each unless given."""
    rows = (
        row_claim("linear", step or [range(1, largest + 1)]),
        row_claim("head", sample or [range(1, requests + 1)], sampled=True),
    )
    domain = more.pop("domain", DOMAIN)
    more.setdefault("sequence", SEQUENCE)
    more.setdefault("together", largest)
    return Certificate(domain, rows, tuple(step_claims(broken)), largest, 12.5, engine, **more)


@st.composite
def row_claims(draw, name, largest, sampled, good):
    """Any claim that a search up to `largest` can end with; good: its first class is large.

    Every count is in one class, or in `variant`, or was not reached; the largest was. The first
    class holds the largest count of all classes.
    """
    labels = st.sampled_from([0] * (9 if good else 2) + [1, 2, "variant", "unreached"])
    runs = draw(st.lists(st.tuples(labels, st.integers(1, largest)), min_size=1, max_size=6))
    counts = {}
    for label, length in runs:
        for _ in range(length):
            if len(counts) < largest:
                counts[len(counts) + 1] = label
    for n in range(len(counts) + 1, largest + 1):
        counts[n] = runs[-1][0]
    if counts[largest] == "unreached":
        counts[largest] = 0 if good else "variant"
    groups = [{n for n in counts if counts[n] == label} for label in (0, 1, 2)]
    classes = sorted((g for g in groups if g), key=max, reverse=True)
    return row_claim(name, classes, {n for n in counts if counts[n] == "variant"}, sampled)


@st.composite
def certificates(draw, largest=48, requests=12, good=False):
    """Any certificate: several operations, any classes, any properties, checked or not.

    good: with everything that ``certified`` needs but, sometimes, a large enough common class.
    """
    least = 1 if good else 0
    linears, heads = draw(st.integers(least, 3)), draw(st.integers(least, 2))
    rows = [draw(row_claims(f"linear {i}", largest, False, good)) for i in range(linears)]
    rows += [draw(row_claims(f"head {i}", requests, True, good)) for i in range(heads)]
    names = sorted(set(WORDS) - ({"decode_rows"} if good else set()))
    some = st.sets(st.sampled_from(names), max_size=2)
    steps = []
    operations = st.sampled_from(["attention", "window", "model"])
    for operation in sorted(draw(st.sets(operations, min_size=least))):
        missing = draw(some)
        steps += [c for c in step_claims(draw(some), operation) if c.name not in missing]
    engine = draw(st.sampled_from([None, EQUAL, DIFFERS]))
    more = {
        "sequence": draw(st.sampled_from([0, SEQUENCE])),
        "together": draw(st.sampled_from([0, largest // 2, largest, largest])),
    }
    return Certificate(dict(DOMAIN), tuple(rows), tuple(steps), largest, 12.5, engine, **more)
