"""What a target of the fuzzing is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.trials.fuzz import limits

READERS = (
    "/minidl/data/", "/minidl/training/", "/minidl/generation/", "/minidl/models/", "/minidl/cli/",
    "/minidl/tools/bench/", "/minidl/runtime/tile_tables.py",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader of something a user may be given.

    run        reads one input; a folder of its own is the current one. It raises nothing but `errors`, exactly those.
    seeds      inputs to begin with, most of them good
    words      what an input may have in it, to put elsewhere
    change     another way to change an input than its bytes; raises ValueError where it cannot
    repair     what makes an input's checksums right again, so that what lies behind them is reached
    traced     parts of the paths of the files whose lines are followed
    anywhere   whether an input may name any file, as a command line does
    """

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    errors: tuple[type[BaseException], ...]
    words: Sequence[bytes] = ()
    change: Callable[[Random, bytes], bytes] | None = None
    repair: Callable[[bytes], bytes] | None = None
    memory: int = limits.MEMORY
    traced: tuple[str, ...] = READERS
    anywhere: bool = False


Make = Callable[[Path], Target]


def variants(*choices: Sequence[bytes]) -> list[bytes]:
    """Inputs whose first byte says how they are read: the contents of choice 0, of choice 1, and so on."""
    return [bytes([number]) + content for number, contents in enumerate(choices) for content in contents]


def after_first(change: Callable[[Random, bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    """A change of what follows the first byte."""
    return lambda draw, data: data[:1] + change(draw, data[1:])
