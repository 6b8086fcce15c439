"""Training on several processes, with the same bits on any number of them.

    distributed.init()                              # reads torchrun's environment
    parallel = distributed.DataParallel(model)
    for x, y in batches:                            # complete batches, the same in every process
        loss = parallel(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()

A batch is cut into virtual shards, independently of the number of processes. Each process computes the gradients of
some consecutive shards, one shard at a time, and the gradients of all shards are added in one fixed binary tree.
torch.distributed moves bytes, a Triton kernel adds. So no bit depends on the number of processes.

Read `parts` first (shards), then `group`, `sums` (the tree), `parallel` and `zero`; `workers` starts processes.
Importing this package imports neither torch nor Triton: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidl.distributed.group import init as init
    from minidl.distributed.parallel import DataParallel as DataParallel
    from minidl.distributed.parts import Shards as Shards
    from minidl.distributed.parts import shards as shards
    from minidl.distributed.sums import all_reduce_fixed as all_reduce_fixed
    from minidl.distributed.sums import broadcast as broadcast
    from minidl.distributed.zero import shard_optimizer as shard_optimizer

_MODULES = {
    "DataParallel": "parallel", "Shards": "parts", "all_reduce_fixed": "sums", "broadcast": "sums", "init": "group",
    "shard_optimizer": "zero", "shards": "parts",
}  # fmt: skip
__all__ = ["DataParallel", "all_reduce_fixed", "broadcast", "init", "shard_optimizer", "shards"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'minidl.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"minidl.distributed.{_MODULES[name]}"), name)
