"""Trains for many steps and tells what has grown: memory of the process, Python's allocations, objects, cycles.

    python -m tests.trials.growth [--steps 1000] [--kind text ...]

Ends with 1 where something has grown by more than LIMITS. A step is a trainer's own, on a tiny network and the data of
tests/old; `tests/training/test_growth.py` runs few of them.
"""

import argparse
import contextlib
import gc
import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from minidl import random
from minidl.autograd import Function
from minidl.compilation.capture import capture
from minidl.tensors import Tensor, default_device
from minidl.training.loop.adversaries import Adversaries
from minidl.training.run_folder.folder import RunFolder
from minidl.training.tasks import TASKS
from minidl.training.tasks.gan import model_settings

OLD = Path(__file__).parents[1] / "old" / "formats-1"
KINDS = ("text", "table", "images", "gan")
# Steps until the memory of the process stays as it is: allocators, and caches of the interpreter.
WARM_UP = {"text": 400, "table": 400, "images": 300, "gan": 100}
KB = 1024


@dataclass(frozen=True)
class Growth:
    """What came to what was there after the warm-up; `cycles` are objects of ours, or tensors, that only the collector
    of cycles would free."""

    resident: int
    traced: int
    objects: int
    cycles: int


# Pages that allocators still touch after the warm-up; one tensor a step would leave far more objects.
LIMITS = Growth(resident=256 * KB, traced=64 * KB, objects=12, cycles=0)
TRACED_STEPS = 30


def steps(kind: str, captured: bool = False) -> Iterator[None]:
    """One step of training at every `next`, for ever: batches of all epochs one after the other."""
    with contextlib.chdir(OLD):
        config = RunFolder(Path(f"{kind}-stopped")).read().settings()
        dataset = TASKS[kind].load(config)
    step: Callable[..., object]
    if kind == "gan":
        random.manual_seed(config.seed)
        networks = Adversaries(model_settings(config, dataset), 8, config.lr, config.seed, captured)
        x = Tensor(torch.rand(8, 1, 8, 8).to(default_device()))
        while True:
            networks.step(x)
            yield
    learner = TASKS[kind].prepare(config, dataset).learner()
    step = capture(learner.step, shapes=2) if captured else learner.step
    learner.model.train()
    for epoch in itertools.count():
        for x, y in learner.batches.epoch(epoch):
            if len(y) == learner.batches.batch_size:
                step(x.to(default_device()) if not isinstance(x, torch.Tensor) else Tensor(x), Tensor(y))
                learner.schedule.step()
                yield


def measure(kind: str, count: int, warm_up: int, traced_steps: int = TRACED_STEPS) -> Growth:
    """What `count` steps leave behind after `warm_up` others; `traced` is of `traced_steps` of them."""
    run = steps(kind)
    for _ in range(warm_up):
        next(run)
    gc.collect()
    gc.disable()
    try:
        next(run)
        cycles = _cycles()
    finally:
        gc.enable()
    resident, objects = _grown(run, count, lambda: (_resident(), len(gc.get_objects())))
    if not traced_steps:
        return Growth(resident, 0, objects, cycles)
    # It makes every step several times as long.
    tracemalloc.start()
    try:
        (traced,) = _grown(run, min(count, traced_steps), lambda: tracemalloc.get_traced_memory()[:1])
    finally:
        tracemalloc.stop()
    return Growth(resident, traced, objects, cycles)


def _grown(run: Iterator[None], count: int, look: Callable[[], tuple[int, ...]]) -> list[int]:
    """By how much what `look` gives is more after `count` steps. What cycles hold is not counted: Triton's interpreter
    makes some at every launch."""
    look()  # takes memory itself, of which the process keeps some
    for _ in range(3):
        next(run)
    gc.collect()
    before = look()
    for _ in range(count):
        next(run)
    gc.collect()
    return [now - then for now, then in zip(look(), before, strict=True)]


def _cycles() -> int:
    """Objects of the graph that are there only because of a cycle."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        ours = [o for o in gc.garbage if isinstance(o, torch.Tensor | Tensor | Function) or _is_ours(o)]
        return len(ours)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _is_ours(thing: object) -> bool:
    return type(thing).__module__.startswith("minidl.")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated; default: all")
    given = parser.parse_args()
    failed = False
    for kind in given.kind or KINDS:
        started = time.monotonic()
        found = measure(kind, given.steps, WARM_UP[kind])
        wrong = [name for name, most in vars(LIMITS).items() if getattr(found, name) > most]
        failed |= bool(wrong)
        seconds = time.monotonic() - started
        print(f"{kind:7} {given.steps} steps, {seconds:.0f} s: {found}" + " TOO MUCH" * bool(wrong), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
