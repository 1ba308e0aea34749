"""Writes the tables of recorded results: all of them into docs/results.md, and README.md's.

python tools/readme_tables.py

The tables are made from benchmarks/results, and stand between markers (see ``markers``). Nothing in
them is typed by hand.
"""

import argparse
from pathlib import Path

from certificate_tables import certificate_summary, certificate_table
from markers import fill_file
from readme_bench import bench_summary, bench_tables
from recorded import records_of
from verify_tables import verify_summary, verify_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
PAGE = "docs/results.md"


def readme_parts(directory: Path) -> dict[str, str]:
    """README.md's parts that the records under `directory` fill, by the names of their markers."""
    return {
        "certificates": certificate_summary(records_of(directory, "certify")),
        "verifications": verify_summary(records_of(directory, "verify")),
        "bench": bench_summary(directory, PAGE),
    }


def page_parts(directory: Path) -> dict[str, str]:
    """The same of docs/results.md."""
    link = f"../{RESULTS}"
    return {
        "certificates": certificate_table(records_of(directory, "certify"), link),
        "verifications": verify_table(records_of(directory, "verify"), link),
        "bench": bench_tables(directory, link),
    }


def main() -> None:
    """Fill both documents."""
    argparse.ArgumentParser(description=f"Write the tables of README.md and {PAGE}.").parse_args()
    results = ROOT / RESULTS
    for document, parts in (("README.md", readme_parts(results)), (PAGE, page_parts(results))):
        for name, body in parts.items():
            fill_file(ROOT / document, name, body)


if __name__ == "__main__":
    main()
