"""How fast a device can be, as far as it was measured: the floor under the time of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from minidl.workbench.bench.measure import COPY_BYTES_PER_MS, MATRIX_FLOP_PER_MS
from minidl.workbench.profiling.work import Work


@dataclass(frozen=True)
class Rates:
    """Bytes per microsecond of a copy, and operations per microsecond by the name of `Work.rate`; empty if unknown."""

    copy: float | None = None
    matrix: dict[str, float] = field(default_factory=dict)

    def floor_us(self, work: Work) -> float | None:
        """The larger of the times to move the bytes and to do the operations, None where one of them is unknown."""
        if work.bytes is None or self.copy is None:
            return None
        if work.flop is None:
            return work.bytes / self.copy
        rate = self.matrix.get(work.rate or "")
        return None if rate is None else max(work.bytes / self.copy, work.flop / rate)


def rates_of(device: str | None) -> Rates:
    """Those of a CUDA device by its name: known for an H200, on which `minidl.workbench.bench` measured them."""
    if device is None or "H200" not in device:
        return Rates()
    tf32 = MATRIX_FLOP_PER_MS["tf32"] / 1e3
    matrix = {
        "float16": MATRIX_FLOP_PER_MS["float16"] / 1e3,
        "bfloat16": MATRIX_FLOP_PER_MS["bfloat16"] / 1e3,
        "tf32": tf32,
        "tf32x3": tf32 / 3,  # three products for one
        "ieee": MATRIX_FLOP_PER_MS["float32"] / 1e3,
    }
    return Rates(COPY_BYTES_PER_MS / 1e3, matrix)
