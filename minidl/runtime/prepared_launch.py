"""A launch without its tensors, the part of a plan that is cached."""

import functools
from typing import Any, NamedTuple

from minidl.runtime import kernel_launch
from minidl.runtime.descriptors import Box, ConcatPair
from minidl.runtime.launch_tape import note_indirect


class Prepared(NamedTuple):
    """A launch without its tensors, which are the kernel's first arguments; `boxes` makes descriptors of the first
    tensors (None: pass the tensor itself)."""

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    meta: dict[str, Any]
    boxes: tuple[Box | None, ...] = ()

    def run(self, *tensors: Any) -> None:
        """Launch with these tensors; raises the errors of `launch.run`."""
        if self.boxes:
            boxed = [x if box is None else box.of(x) for box, x in zip(self.boxes, tensors, strict=False)]
            kernel_launch.run(self.kernel, self.grid, *boxed, *tensors[len(boxed) :], *self.scalars, **self.meta)
            for x in tensors[: len(boxed)]:
                if isinstance(x, ConcatPair):
                    note_indirect(functools.partial(tuple, x))  # the distance holds for these two alone
        else:
            kernel_launch.run(self.kernel, self.grid, *tensors, *self.scalars, **self.meta)
