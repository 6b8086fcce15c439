"""A gradient that touches few rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RowGrad:
    """The gradient of a matrix [R, H] that is zero outside the rows it names.

    rows    int32 [U], distinct, each in [0, R); or -1, any number of times: room that was not needed
    values  [U, H], the gradient of those rows; 0 where a row is -1
    """

    rows: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, int]
    _shown: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> torch.Tensor:
        """The whole gradient [R, H], with zeros in the other rows; the same tensor at every call."""
        if not self._shown:
            # One row more, which -1 names.
            full = torch.zeros(self.shape[0] + 1, self.shape[1], dtype=self.values.dtype, device=self.values.device)
            self._shown.append(full.index_put_((self.rows.long(),), self.values)[: self.shape[0]])
        return self._shown[0]

    def changed(self) -> bool:
        """Whether the tensor that `dense` gave was changed in place since: then it is the gradient."""
        # Filled with zeros it had version 0, and 1 with the rows.
        return bool(self._shown) and self._shown[0]._version > 1
