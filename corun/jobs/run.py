"""One run of ``corun generate``: from checked lines to a finished output."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from corun.jobs import records
from corun.jobs.lines import BadLine, Job
from corun.jobs.partial import Header, Partial, check_absent, difference, partial_path
from corun.list_seeds import member_seed
from corun.seeds import child_seed, draw_seed
from corun.starting import say_starting


def line_params(job: Job, base_seed: int) -> dict[str, Any]:
    """The sampling parameters of `job`, with a seed: its own, or one derived from `base_seed`."""
    if job.params.get("seed") not in (None, -1):  # vLLM reads -1 as no seed
        return job.params
    return {**job.params, "seed": member_seed(base_seed, job.index)}


def sample_seeds(seed: int, n: int, corun: bool) -> list[int]:
    """The seed of each of a line's `n` samples. Without CoRun, vLLM counts up from `seed`."""
    if n == 1:
        return [seed]
    return [child_seed(seed, i) if corun else seed + i for i in range(n)]


class JobRun:
    """Answers `lines` and writes `output`.

    engine_args: vLLM's EngineArgs with CoRun's config inside. identity: what else must be equal for
    a later run to go on from this one's partial output. stop: whether a line that the engine cannot
    take ends the run before any work. overwrite: start again whatever is there.
    """

    def __init__(
        self,
        *,
        lines: Sequence[Job | BadLine],
        output: Path,
        engine_args: Any,
        identity: Mapping[str, Any],
        stop: bool,
        overwrite: bool,
    ) -> None:
        self.lines = lines
        self.output = output
        self.engine_args = engine_args
        self.config = engine_args.additional_config["corun"]
        self.stop = stop
        self.overwrite = overwrite
        # Read before the engine starts: vLLM and CoRun settle these arguments in place.
        self._job = self._describe(identity)
        self._corun = self.config["policy"] != "off"
        self._resumable = False  # whether what is saved is this run's
        self._start_s = 0.0

    def run(self) -> dict[str, Any]:
        """Do it; returns the summary. ValueError: could not run; what was saved stays."""
        self.partial = Partial(partial_path(self.output))
        try:
            return self._run()
        except BaseException:
            if self._resumable and (saved := len(self.partial.done)):
                print(
                    f"corun generate: {saved} of {len(self.lines)} lines are saved in "
                    f"{self.partial.path}; the same command goes on from there",
                    file=sys.stderr,
                )
            raise
        finally:
            self.partial.discard_if_empty()
            self.partial.close()

    def _run(self) -> dict[str, Any]:
        if not self._corun:
            print("corun generate: policy off, so no contract holds", file=sys.stderr)
        if self.overwrite:
            self.partial.clear()
        else:  # looked for again: another run may have finished it meanwhile
            check_absent(self.output)
        self._check_job()
        self._resumable = True
        resumed = len(self.partial.done)
        report = None
        if self.partial.header is None or resumed < len(self.lines):
            report = self._generate()
        summary = self._summary(resumed, report)
        self.partial.finish(self.output)
        return summary

    def _describe(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        from corun.engine.offline import non_default

        return {
            **identity,
            "model": self.engine_args.model,
            "CoRun settings": self.config,
            "engine flags": non_default(self.engine_args),
            "lines": len(self.lines),
        }

    def _check_job(self) -> None:
        if self.partial.header is None:
            return
        if differs := difference(self.partial.header.job, self._job):
            raise ValueError(
                f"{self.partial.path} belongs to another run (it differs in: {differs}). Give the "
                "command that it was started with, another -o, or lose it with --overwrite"
            )

    def _begin(self, domain: str | None) -> Header:
        header = self.partial.header
        if header is None:
            # Drawn once and saved: a resumed run gives the bits that this one would have given.
            header = Header(job=self._job, base_seed=draw_seed(), domain=domain)
            self.partial.begin(header)
        elif header.domain != domain:
            raise ValueError(
                f"{self.partial.path} was started in the domain {header.domain}, this machine and "
                f"software are {domain}: their outputs cannot be mixed. Resume it where it was "
                "started, or start again with --overwrite"
            )
        return header

    def _generate(self) -> dict[str, Any] | None:
        """Answer what is not done; returns the engine's report (None without CoRun)."""
        from corun.engine.offline import OfflineEngine

        say_starting("generate")
        began = time.monotonic()
        engine = OfflineEngine(self.engine_args)
        self._start_s = time.monotonic() - began
        header = self._begin(engine.domain())
        done = self.partial.done
        todo = [line for line in self.lines if line.index not in done]
        failed = [line for line in todo if isinstance(line, BadLine)]
        params: dict[int, dict[str, Any]] = {}
        for job in (line for line in todo if isinstance(line, Job)):
            params[job.index] = line_params(job, header.base_seed)
            try:
                engine.submit(job, params[job.index])
            except ValueError as e:
                if self.stop and not done:
                    self.partial.clear()  # nothing was run, so nothing stays behind
                failed.append(BadLine(job.index, job.id, str(e)))
                self._refused(failed[-1])
        if failed:
            self.partial.append([records.failure(line) for line in failed])
        with tqdm(total=len(self.lines), initial=len(done) + len(failed), unit="line") as bar:
            for answers in engine.finished():
                self.partial.append(
                    [self._record(job, params[job.index], output) for job, output in answers]
                )
                bar.update(len(answers))
        return engine.report()

    def _record(self, job: Job, params: Mapping[str, Any], output: Any) -> dict[str, Any]:
        for completion in output.outputs:
            if completion.finish_reason == "error":  # refused by the scheduler, which says why
                return self._refused(BadLine(job.index, job.id, str(completion.stop_reason)))
        seeds = sample_seeds(params["seed"], params.get("n", 1), self._corun)
        assert self.partial.header is not None
        return records.answer(job, params, output, seeds, self.partial.header.domain)

    def _refused(self, bad: BadLine) -> dict[str, Any]:
        if self.stop:
            raise ValueError(f"{bad} (--on-error skip goes on without such lines)")
        print(f"corun generate: {bad}", file=sys.stderr)
        return records.failure(bad)

    def _summary(self, resumed: int, report: Mapping[str, Any] | None) -> dict[str, Any]:
        answered = skipped = prompt_tokens = output_tokens = 0
        for record in self.partial.records():
            if "error" in record:
                skipped += 1
                continue
            answered += 1
            prompt_tokens += record["prompt_tokens"]
            output_tokens += sum(len(o["token_ids"]) for o in record["outputs"])
        assert self.partial.header is not None
        return {
            "model": self.engine_args.model,
            "policy": report["plan"]["policy"] if report else self.config["policy"],
            "domain": self.partial.header.domain,
            "lines": len(self.lines),
            "answered": answered,
            "skipped": skipped,
            "resumed": resumed,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "digest": records.digest_of_all(self.partial.records()),
            "steps": report["steps"] if report else None,
            "start_seconds": round(self._start_s, 3),
            "violations": list(report["violations"]) if report else [],
        }
