"""Where a checked engine first departs from what the probes found: the module, for the message."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corun.certify.certificate import Certificate, EngineCheck
from corun.config import MEASURE, CoRunConfig
from corun.jobs.files import write_json

MOST_ROWS = 64
APART = "a tensor-parallel engine is not taken apart to find the first module that differs"
NONE = "no module of an eager engine differs, so it lies in graphs, compiled code, or sampling"


@contextmanager
def as_checked(certificate: Certificate) -> Iterator[str]:
    """The path of a file with `certificate` as if its engine had been checked, while it lasts.

    A plan needs a certificate that was checked; this one is about to be, or has just failed.
    """
    with TemporaryDirectory() as directory:
        trial = replace(certificate, engine=EngineCheck(equal=True, tokens=0, logprobs=0))
        path = Path(directory, "trial.json")
        write_json(path, trial.to_mapping())
        yield str(path)


def first_module(
    certificate: Certificate, model: str, engine_args: Mapping[str, Any], random_weights: bool
) -> str:
    """The first module whose bits depend on the batch under `certificate`'s plan, in words.

    Starts an eager engine of its own, as ``corun localize`` does. It does not take a certificate of
    compiled code: then it is held to the same kernel constraints only.
    """
    from corun.verify.localize import LocalizeOptions, localize

    if engine_args.get("tensor_parallel_size", 1) > 1:
        return APART
    args = {n: v for n, v in engine_args.items() if n not in ("enforce_eager", "max_num_seqs")}
    rows = min(int(engine_args.get("max_num_seqs", MOST_ROWS)), MOST_ROWS)
    error = None
    # Without the plan steps may have rows of other classes, which would accuse the wrong module.
    compiled = certificate.domain.get("compiled_for") is not None
    split = "split_decode" in certificate.domain
    with as_checked(certificate) as path:
        for source in (path, MEASURE) if compiled else (path,):
            report = localize(
                LocalizeOptions(
                    model,
                    CoRunConfig("certified", certificate=source, split_decode=split),
                    rows=max(2, rows),
                    random_weights=random_weights,
                    engine_args=args,
                )
            )
            for finding in report.findings:
                if (first := finding.diff.first) is not None:
                    return (
                        f"the first module that differs is {first.module} ({first.kind}) in "
                        f"{first.phase}, {first.differing:,} of {first.elements:,} values"
                    )
            if report.error is None:
                return NONE
            error = error or report.error
    return f"the first module that differs could not be found: {error}"
