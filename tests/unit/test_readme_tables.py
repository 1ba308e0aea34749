"""The tables of README.md and docs/results.md are what benchmarks/results say, and nothing else."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import certificate_tables  # noqa: E402
import markers  # noqa: E402
import readme_tables  # noqa: E402
import recorded  # noqa: E402
import verify_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def claim(name, classes, variant=()):
    return {"name": name, "classes": [[[n, n]] for n in classes], "variant": variant, "values": 10}


def certified(rows, held, engine, **more):
    steps = [
        {"operation": "model", "name": name, "holds": holds, "values": 1}
        for name, holds in held.items()
    ]
    domain = {"dtype": "torch.bfloat16", "device": "cpu x86_64 AVX512 amx l2:1"}
    measured = {"domain": domain, "rows": rows, "steps": steps, "engine": engine, "together": 9}
    return {
        "command": "corun certify M --budget 3",
        "certificate": measured,
        "policies": [
            {"policy": "certified", "allowed": True, "reason": "as seen; not allowed: free chunks"},
            {"policy": "pack", "allowed": False, "reason": "the LM head differs"},
            {"policy": "isolate", "allowed": True, "reason": "as seen"},
        ],
        "seconds": 12.34,
        **more,
    }


ALLOWED = "`certified` (without free chunks), `isolate`"


def test_a_certificate_is_told_in_one_line():
    rows = [claim("A", [1]), claim("B", [1, 2]), claim("C", [1, 2, 3], [[4, 4]]), claim("D", [1])]
    held = {"decode_rows": True, "mixed": False}
    engine = {"equal": True, "tokens": 1000, "logprobs": 20}
    given = {"c.json": certified(rows, held, engine), "d.json": certified(rows[:1], held, None)}
    table = certificate_tables.certificate_table(given, "results")
    first, second = table.splitlines()[2:4]
    assert first == (
        "| [M](results/c.json), bfloat16, cpu x86_64 AVX512 amx l2:1 | 1: 2 of 4 operations; 2: B; "
        "3: C; depends on place: C | model: 1 of 2 (not mixed) | 42 | "
        f"1,000 tokens, 20 logprobs: equal | 12.3 | {ALLOWED} |"
    )
    assert (
        "| 1: 1 of 1 operations | model: 1 of 2 (not mixed) | 12 | not checked | 12.3 |" in second
    )
    engine["equal"] = False
    given["d.json"]["note"] = "beside others"
    table = certificate_tables.certificate_table(given, "results")
    assert "20 logprobs: differ |" in table and "\n- M: beside others.\n" in table


def test_a_certificate_in_short():
    held = {"decode_rows": True}
    forced = "VLLM_USE_V2_MODEL_RUNNER=0 corun certify N"
    none = [{"policy": "isolate", "allowed": False, "reason": "differs"}]
    given = {
        "c.json": certified([claim("A", [1])], held, None, note="beside others"),
        "d.json": certified([claim("A", [1])], held, None, command=forced, policies=none),
    }
    split = {"dtype": "torch.float16", "device": "G H I J", "split_decode": {}}
    given["d.json"]["certificate"]["domain"] = split
    lines = certificate_tables.certificate_summary(given).splitlines()
    assert lines[2:] == [
        f"| M | bfloat16 | cpu x86_64 AVX512 | {ALLOWED} | 12 |",
        "| N, split decode, V1 runner | float16 | G H I J | none | 12 |",
    ]


VERIFIED = {
    "command": "corun verify M",
    "policy": "certified",
    "model": "m",
    "device": "G",
    "settings": {"suite": "paper", "engines": 1},
    "total": {
        "token_values": 3000,
        "token_values_equal": 2999,
        "logprob_values": 50,
        "logprob_values_equal": 49,
    },
    "audit": [
        {"mixed_steps": 1, "preempted": 2, "cached_tokens": 1000},
        {"mixed_steps": 1, "preempted": 0, "cached_tokens": 1},
    ],
    "verdict": "broke",
}


def test_a_verification_is_told_in_one_line():
    older = {**VERIFIED, "command": "VLLM_USE_V2_MODEL_RUNNER=0 corun verify M", "audit": [{}]}
    given = {"v.json": VERIFIED, "w.json": older}
    first, second = verify_tables.verify_table(given, "results").splitlines()[2:]
    assert first == (
        "| `certified` | [m](results/v.json), G | vLLM's default | paper, 1 | "
        "2,999 of 3,000 | 49 of 50 | 2 / 2 / 1,001 | broke |"
    )
    assert "| V1 |" in second and "| not counted | broke |" in second


def test_verifications_are_added_up_by_policy():
    whole = {
        f"{what}_values{equal}": 7 for what in ("token", "logprob") for equal in ("", "_equal")
    }
    kept = {"total": whole, "verdict": "kept", "settings": {"suite": "all", "engines": 3}}
    given = {
        "a.json": VERIFIED,
        "b.json": {**VERIFIED, **kept, "device": "H"},
        "c.json": {**VERIFIED, **kept, "policy": "isolate"},
    }
    assert verify_tables.verify_summary(given).splitlines()[2:] == [
        "| `certified` | G; H | 2 | 4 | 3,006 of 3,007 | 56 of 57 | broke, kept |",
        "| `isolate` | G | 1 | 3 | 7 of 7 | 7 of 7 | kept |",
    ]


@pytest.mark.parametrize(
    ("document", "parts", "by_hand"),
    [
        ("README.md", readme_tables.readme_parts, ["quickstart"]),
        (readme_tables.PAGE, readme_tables.page_parts, []),
    ],
)
def test_the_documents_are_up_to_date(document, parts, by_hand):
    for benchmark in ("certify", "verify"):
        assert recorded.records_of(RESULTS, benchmark)
    text = (ROOT / document).read_text()
    made = parts(RESULTS)
    assert sorted(markers.names(text)) == sorted([*by_hand, *made])
    for name, body in made.items():
        assert markers.fill(text, name, body) == text


def test_every_record_is_on_the_page():
    page = ROOT / readme_tables.PAGE
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    named = {(page.parent / link).resolve() for link in links}
    assert all(path.exists() for path in named)
    assert set(RESULTS.glob("*.json")) <= named
