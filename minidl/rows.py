"""A gradient that touches few rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowGrad:
    """The gradient of a matrix [R, H] that is zero outside the rows it names.

    rows    int32 [U], distinct, each in [0, R)
    values  [U, H], the gradient of those rows
    """

    rows: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> torch.Tensor:
        """The whole gradient [R, H], with zeros in the other rows."""
        full = torch.zeros(self.shape, dtype=self.values.dtype, device=self.values.device)
        return full.index_copy_(0, self.rows.long(), self.values)
