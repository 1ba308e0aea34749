"""Stands in for ``corun.bench.run_child``: run files without an engine.

Writes to the file BENCH_CHILD_LOG what it does; fails at the mode, or at the mode, workload and
repeat, that BENCH_CHILD_FAILS_AT names.
"""

import json
import os
import sys
from pathlib import Path

import bench_files

from corun.bench.turns import Turns


def meet(*place):
    """Tell of the place, or fail there."""
    if os.environ.get("BENCH_CHILD_FAILS_AT") == " ".join(place).removeprefix("up "):
        sys.exit(1)
    with open(os.environ["BENCH_CHILD_LOG"], "a") as log:
        log.write(" ".join(place) + "\n")


def main(spec_file, seat_file):
    spec = json.loads(Path(spec_file).read_text())
    turns = Turns.read(seat_file)
    meet("up", spec["mode"])
    turns.ready()
    for index, item in enumerate(spec["items"]):
        with turns.take(index) as beside:
            held = json.loads(Path(item["requests"]).read_text())
            meet(spec["mode"], held["workload"], str(item["repeat"]))
            mapping = bench_files.run(
                spec["mode"],
                held["workload"],
                requests_digest=held["digest"],
                repeat=item["repeat"],
                arrivals=item["arrivals"],
                settings={
                    **bench_files.SETTINGS,
                    "engines_beside": beside,
                    "max_num_seqs": spec["rows"],
                },
            )
            Path(item["out"]).write_text(json.dumps(mapping))
    turns.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
