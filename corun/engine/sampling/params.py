"""RowParams: the sampling parameters of N rows, as tensors."""

from dataclasses import dataclass, fields

import numpy as np
import torch

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a temperature below it means greedy


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on `device` without waiting for it: through pinned memory where it is a GPU."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def top_k_of(top_k: np.ndarray, off: int, vocab: int) -> np.ndarray:
    """vLLM's top_k values, where `off` (its vocabulary size) is off, for logits [*, vocab].

    The two sizes differ where a model computes logits for padding entries.
    """
    return np.where(top_k >= off, vocab, np.minimum(top_k, vocab))


@dataclass(frozen=True, slots=True)
class RowParams:
    """One value per row, on the device of the logits.

    temperature: [N] fp32; below ``GREEDY_BELOW`` the row is greedy and all the rest is ignored.
    top_k: [N] int32, 1 to V; V is off. top_p: [N] fp32, above 0; 1 is off. min_p: [N] fp32; 0 is
    off. seeds: [N] int64, any bits.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def build(
        cls,
        rows: int,
        vocab: int,
        device: torch.device,
        *,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        seeds: np.ndarray,
    ) -> "RowParams":
        """`rows` rows on `device` from host arrays of at most `rows` values each.

        The rest are neutral: greedy, no filter, so that they draw nothing.
        """
        columns = (
            (temperature, np.float32, 0.0),
            (top_k, np.int32, vocab),
            (top_p, np.float32, 1.0),
            (min_p, np.float32, 0.0),
            (seeds, np.int64, 0),
        )
        tensors = []
        for values, dtype, neutral in columns:
            column = np.full(rows, neutral, dtype)
            column[: len(values)] = values
            tensors.append(to_device(column, device))
        return cls(*tensors)

    def select(self, rows: torch.Tensor) -> "RowParams":
        """The parameters of the rows with the given indices [M] int64."""
        return RowParams(*(getattr(self, f.name)[rows] for f in fields(self)))

    def random(self) -> torch.Tensor:
        """Which rows draw at random: [N] bool."""
        return self.temperature >= GREEDY_BELOW

    def filtered(self, vocab: int) -> torch.Tensor:
        """Which rows draw from a part of the vocabulary only: [N] bool."""
        return self.random() & ((self.top_k < vocab) | (self.top_p < 1.0) | (self.min_p > 0.0))
