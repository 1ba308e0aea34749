"""The first difference between two taps of one request: alone, and beside others. Bitwise.

Rows are matched by the request's token position, so that the two runs may cut the prompt into
different chunks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from corun.engine.tap import Output, TappedStep

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first module output that differs.

    module, kind: its name and class. step: engine step of the request (0 is its first). phase:
    "prefill" or "decode". position: token position of the first row that differs. tensor: which of
    the tensors that the module returned. alone_shape, crowd_shape: of that whole tensor in the two
    runs. differing, elements: elements of the request's rows that differ, of how many.
    max_abs_difference: the largest difference, in float64 (NaN where one side is NaN).
    """

    module: str
    kind: str
    step: int
    phase: str
    position: int
    tensor: int
    alone_shape: tuple[int, ...]
    crowd_shape: tuple[int, ...]
    differing: int
    elements: int
    max_abs_difference: float

    @property
    def share(self) -> float:
        """Differing elements as a fraction."""
        return self.differing / self.elements

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """What was compared, and the first difference or None.

    elements, outputs, steps: compared; steps of the crowded run.
    """

    first: ModuleDifference | None
    elements: int
    outputs: int
    steps: int


def unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ in any bit (bool, same shape)."""
    integer = _INTEGERS[a.element_size()]
    return a.contiguous().view(integer) != b.contiguous().view(integer)


def first_difference(
    alone: Sequence["TappedStep"], crowd: Sequence["TappedStep"], agreed: int, prompt_tokens: int
) -> TraceDiff:
    """Walk the crowded run in execution order up to the first output that differs from `alone`.

    agreed: positions below it had the same input tokens in both runs; later ones are not compared.
    prompt_tokens: positions below it are prefill.
    """
    reference = _Reference(alone)
    elements = outputs = steps = 0
    for number, step in enumerate(crowd):
        if step.position >= agreed:
            break
        steps += 1
        for output in step.outputs:
            outputs += 1
            for tensor, rows in enumerate(output.rows):
                kept = rows[: max(0, agreed - output.position)]
                found = reference.rows(output, tensor, kept.shape[0])
                if found is None:
                    continue
                expected, shape = found
                if expected.shape != kept.shape or expected.dtype != kept.dtype:
                    raise RuntimeError(
                        f"{output.module} returned {tuple(expected.shape)} {expected.dtype} alone "
                        f"but {tuple(kept.shape)} {kept.dtype} beside others"
                    )
                elements += kept.numel()
                where = unequal(expected, kept)
                if where.any():
                    row = int(where.reshape(where.shape[0], -1).any(dim=1).nonzero()[0, 0])
                    apart = (expected[where].double() - kept[where].double()).abs().max()
                    position = output.position + row
                    difference = ModuleDifference(
                        module=output.module,
                        kind=output.kind,
                        step=number,
                        phase="prefill" if position < prompt_tokens else "decode",
                        position=position,
                        tensor=tensor,
                        alone_shape=shape,
                        crowd_shape=output.shapes[tensor],
                        differing=int(where.sum()),
                        elements=where.numel(),
                        max_abs_difference=float(apart),
                    )
                    return TraceDiff(difference, elements, outputs, steps)
    return TraceDiff(None, elements, outputs, steps)


class _Reference:
    """Rows of the run alone, by module output and position."""

    def __init__(self, steps: Iterable["TappedStep"]) -> None:
        self._parts: dict[tuple, list[tuple[int, torch.Tensor, tuple[int, ...]]]] = {}
        for step in steps:
            for output in step.outputs:
                for tensor, rows in enumerate(output.rows):
                    key = (output.module, output.call, tensor)
                    part = (output.position, rows, output.shapes[tensor])
                    self._parts.setdefault(key, []).append(part)

    def rows(
        self, output: "Output", tensor: int, count: int
    ) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """The rows at `count` positions from the output's first, and the whole tensor's shape."""
        parts = self._parts.get((output.module, output.call, tensor), [])
        first, found, shape = output.position, [], None
        for start, rows, whole in parts:
            low, high = max(first, start), min(first + count, start + rows.shape[0])
            if low < high:
                found.append(rows[low - start : high - start])
                shape = whole if shape is None else shape
        if shape is None or sum(rows.shape[0] for rows in found) != count:
            return None
        return (found[0] if len(found) == 1 else torch.cat(found)), shape
