"""A process that takes turns with an engine that is only said to be there; it tells what it does.

Run as a module with a spec, and its seat (``corun.bench.mode_child``). spec: log, the file that
every event goes to as "CHILD EVENT ..."; start_s and turn_s, how long things take; ends: the event
at which it ends badly ("start", or a turn's index); hangs: at which it stops answering.
"""

import json
import os
import sys
import time
from pathlib import Path

from corun.bench.turns import Turns


def main(spec_file, seat_file):
    spec, seat = (json.loads(Path(name).read_text()) for name in (spec_file, seat_file))
    turns = Turns.read(seat_file)

    def tell(*event):
        line = " ".join(map(str, (seat["child"], *event))) + "\n"
        with open(spec["log"], "a") as log:  # one write in append mode: lines stay whole
            log.write(line)

    def meet(place):
        if spec.get("hangs") == place:
            tell("hangs")
            time.sleep(3600)
        if spec.get("ends") == place:
            tell("ends")
            sys.exit(7)

    tell("pid", os.getpid())
    meet("start")
    time.sleep(spec.get("start_s", 0))
    tell("up")
    try:
        turns.ready()
        for index, number in enumerate(seat["turns"]):
            with turns.take(index) as beside:
                tell("begins", number, beside)
                time.sleep(spec.get("turn_s", 0))
                meet(index)
                tell("ended", number)
        turns.leave()
    finally:
        tell("closes")


if __name__ == "__main__":
    main(*sys.argv[1:])
