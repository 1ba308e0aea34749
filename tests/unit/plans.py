"""Plans for tests."""

from corun.plan import Grants, Plan
from corun.rows import Rows


def isolate(
    rows: int, tokens: int = 512, graph: bool = False, prefill_rows: tuple[int, ...] = ()
) -> Plan:
    """An isolate plan of `rows` decode rows."""
    return Plan("isolate", rows, tokens, graph, "test", prefill_rows=prefill_rows)


def certified(step: Rows, sample: Rows, grants: Grants | None = None) -> Plan:
    """A certified plan over these row counts."""
    return Plan(
        "certified",
        sample.largest,
        step.largest,
        False,
        "test",
        grants=grants or Grants.everything(),
        step_rows=step,
        sample_rows=sample,
        certificate="test",
    )
