"""Time the first training steps of ResNet-50 in bfloat16 with compilation: python -m benchmarks.first_step [--peer]

The last line has the seconds at batch 64, then at batch 256 in the same process, as JSON. Triton's cache should be
empty: set TRITON_CACHE_DIR to a new folder. With `--peer`, torchvision's network under torch.compile is timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

BATCHES = (64, 256)


def ours() -> Callable[[int], object]:
    import minidl
    from minidl import models, ops, optim
    from minidl.tensors import Tensor

    model = models.resnet50(dtype=torch.bfloat16)
    optimizer = optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    captured = minidl.capture(step, shapes=len(BATCHES))

    def first(size: int) -> object:
        x = torch.randn(size, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        labels = Tensor(torch.zeros(size, dtype=torch.int64).cuda())
        return captured(Tensor(x.contiguous(memory_format=torch.channels_last)), labels).item()

    return first


def theirs() -> Callable[[int], object]:
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    model.compile(dynamic=False)

    def first(size: int) -> object:
        x = torch.randn(size, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(size, dtype=torch.int64, device="cuda"))
        loss.backward()
        optimizer.step()
        return loss.item()

    return first


def main() -> None:
    first = theirs() if "--peer" in sys.argv else ours()
    torch.zeros(1, device="cuda")
    seconds = []
    for size in BATCHES:
        started = time.perf_counter()
        first(size)
        seconds.append(time.perf_counter() - started)
    print(json.dumps(dict(zip(map(str, BATCHES), seconds, strict=True))))


if __name__ == "__main__":
    main()
