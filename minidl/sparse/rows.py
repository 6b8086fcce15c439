"""A gradient with few non-zero rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RowGrad:
    """The gradient of a matrix [R, H] that is zero outside the listed rows.

    rows    int32 [U], distinct, each in [0, R); or -1, any number of times, for unused capacity
    values  [U, H], the gradient of these rows; 0 where a row is -1
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
        """Return the dense gradient [R, H], with zeros in the other rows; every call returns the same tensor."""
        if not self._shown:
            # One extra row, for the index -1.
            full = torch.zeros(self.shape[0] + 1, self.shape[1], dtype=self.values.dtype, device=self.values.device)
            self._shown.append(full.index_put_((self.rows.long(),), self.values)[: self.shape[0]])
        return self._shown[0]

    def changed(self) -> bool:
        """Return whether the tensor from `dense` was changed in place; it then is the gradient."""
        # `dense` creates it with version 0, and writes the rows with version 1.
        return bool(self._shown) and self._shown[0]._version > 1
