"""Seam: the worker on a CPU. Importing vLLM's CPU worker needs vLLM's CPU build."""

from vllm.v1.worker.cpu_worker import CPUWorker

from corun.engine.worker import CoRunWorkerMixin


class CoRunCPUWorker(CoRunWorkerMixin, CPUWorker):
    """CoRun on a CPU."""
