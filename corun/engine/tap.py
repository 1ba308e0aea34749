"""Seam: a tap on the model. Keeps one request's rows of every module's output, step by step.

For ``corun localize``. Forward hooks see a module's whole output; which rows belong to the watched
request is known to the runner alone: the V1 runner has its ``input_batch`` and ``query_start_loc``,
the V2 runner's ``prepare_inputs`` returns an InputBatch that says it. The tap needs the worker in
the same process and a model that runs eagerly (a compiled model or a graph calls no hooks).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from corun.engine.seams import SeamError

SEAMS = (
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor.forward", ("lm_head",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_inputs", ("scheduler_output",)),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.prepare_inputs", ("scheduler_output",)),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch"),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model", ("scheduler_output",)),
)


@dataclass(frozen=True, slots=True)
class Output:
    """The watched request's part of what one module returned in one step.

    module: its name in the model. kind: its class. call: 0 for its first call in the step.
    position: the request's token position of the first row. shapes: of the whole tensors that the
    module returned. rows: the request's rows of each ([n, ...], on the CPU).
    """

    module: str
    kind: str
    call: int
    position: int
    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class TappedStep:
    """One step in which the watched request took part.

    position: its first token position in the step. tokens: its tokens in it. requests,
    batch_tokens: of the whole step. outputs: in order of completion.
    """

    position: int
    tokens: int
    requests: int
    batch_tokens: int
    outputs: list[Output] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the request sits in the step: its index, its token rows, its first position."""

    index: int
    start: int
    stop: int
    position: int
    requests: int
    batch_tokens: int


class Tap:
    """Attach it to a worker, watch a request, run, read ``steps``, detach."""

    def __init__(self) -> None:
        self.steps: list[TappedStep] = []
        self._request: str | None = None
        self._current: TappedStep | None = None
        self._place: _Place | None = None
        self._located = False
        self._calls: dict[str, int] = {}
        self._batch: Any = None
        self._undo: list[Any] = []

    def attach(self, worker: Any) -> None:
        """Hook the model of `worker` (vLLM's worker object). SeamError if its runner is unknown."""
        self._runner = runner = worker.model_runner
        v2 = bool(getattr(worker, "use_v2_model_runner", False))
        if v2:
            self._wrap(runner, "prepare_inputs", before=None, after=self._keep_batch)
        elif not hasattr(runner, "input_batch") or not hasattr(runner, "query_start_loc"):
            raise SeamError(f"cannot tell requests' rows apart in {type(runner).__name__}")
        self._wrap(worker, "execute_model", before=self._new_step, after=None)
        for name, module in runner.get_model().named_modules():
            hook = functools.partial(self._on_output, name or type(module).__name__)
            self._undo.append(module.register_forward_hook(hook).remove)

    def detach(self) -> None:
        """Remove every hook."""
        while self._undo:
            self._undo.pop()()

    def watch(self, request_id: str) -> None:
        """Keep the outputs of the request with this id (the worker's) from the next step on."""
        self.steps = []
        self._request, self._current, self._place = request_id, None, None

    def _wrap(self, owner: Any, name: str, before: Any, after: Any) -> None:
        wrapped = getattr(owner, name)

        @functools.wraps(wrapped)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = wrapped(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        setattr(owner, name, tapped)
        self._undo.append(functools.partial(delattr, owner, name))

    def _keep_batch(self, batch: Any) -> None:
        self._batch = batch

    def _new_step(self) -> None:
        self._current, self._place, self._located, self._calls = None, None, False, {}

    def _locate(self) -> _Place | None:
        if self._batch is not None:  # V2
            batch = self._batch
            ids, bounds = batch.req_ids, batch.query_start_loc_np
            computed = batch.num_computed_tokens_np
        else:
            batch = self._runner.input_batch
            ids, bounds = batch.req_ids, self._runner.query_start_loc.np
            computed = batch.num_computed_tokens_cpu
        if self._request not in ids:
            return None
        index = ids.index(self._request)
        start, stop = int(bounds[index]), int(bounds[index + 1])
        return _Place(index, start, stop, int(computed[index]), len(ids), int(bounds[len(ids)]))

    def _on_output(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if self._request is None:
            return
        if not self._located:  # the step's batch is laid out by the time the first module returns
            self._place, self._located = self._locate(), True
            if (place := self._place) is not None:
                self._current = TappedStep(
                    place.position, place.stop - place.start, place.requests, place.batch_tokens
                )
                self.steps.append(self._current)
        if self._place is None or self._current is None:
            return
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        place = self._place
        if isinstance(module, LogitsProcessor):  # one row for each request, not for each token
            start, stop, least = place.index, place.index + 1, place.requests
            position = place.position + place.stop - place.start - 1
        else:
            start, stop, least, position = (
                place.start,
                place.stop,
                place.batch_tokens,
                place.position,
            )
        whole = [t for t in _tensors(output) if t.dim() > 0 and t.shape[0] >= least]
        if whole:
            rows = tuple(t[start:stop].detach().to("cpu", copy=True) for t in whole)
            shapes = tuple(tuple(t.shape) for t in whole)
            self._current.outputs.append(
                Output(name, type(module).__name__, call, position, shapes, rows)
            )


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output, in order (fused modules return tuples)."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
