"""Memory checks for kernels in Triton's interpreter, like compute-sanitizer on a GPU, with the line of each bug.

    with minidl.testing.sanitize():
        my_kernel[grid](x, y, n, BLOCK=128)

The sanitizer finds
- accesses outside the tensor of a pointer, also in gaps between the rows of a view;
- lanes that a load masks off without `other` and that reach a store (they hold NaN; without the sanitizer they hold 0
  in the interpreter and an arbitrary value on a GPU);
- reads of memory that was not written since torch.empty;
- races: elements to which two programs write different values, or that one program writes and another reads;
- lanes that write different values to one element, or that meet in memory without a barrier; misaligned addresses;
- hints (tl.multiple_of, tl.max_contiguous) that are not true.
An access out of bounds is skipped, so that the process continues. Read `patches` first, then `checks` and `order`.

Blocks of one shape have the same lanes. Reductions, scans, products, tl.trans, tl.join, tl.split, tl.gather and atomic
operations on one element are barriers, too. A store after a load at the same position of a block with another shape
(tl.reshape) is assumed to depend on it; a load after a store under another shape needs a barrier, since Triton may
assign such blocks to other threads.
Programs that synchronise by an atomic operation (acquire, release) see each other's earlier accesses. Races are checked
in the order in which the interpreter runs the programs.

It does not find masked lanes in integers of 8 and 16 bits and float8, nor masked lanes after comparisons, sorts,
conditions or integer arithmetic; gaps in views that span more than 2^24 elements; lanes that meet in tensors of more
than 2^28; writes through a raw address (ctypes); unwritten memory that a torch function copied; and other processes,
except with `minidl sanitize`, which checks all processes that a script starts. A torch function that writes part of a
tensor by index counts as writing all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from minidl.runtime import launch
from minidl.testing.sanitizer.checks import Sanitizer
from minidl.testing.sanitizer.findings import KINDS, Finding, Place, SanitizerError

__all__ = ["KINDS", "Finding", "Place", "Sanitizer", "SanitizerError", "sanitize"]


@contextlib.contextmanager
def sanitize(*, stop: bool = False) -> Iterator[Sanitizer]:
    """Return a context in which every interpreted kernel is checked, minidl's and your own.

    Yields a Sanitizer; its `findings` are the bugs found so far. Raises SanitizerError at the end if there are any, or
    at the first bug with `stop`; RuntimeError if kernels are compiled (set TRITON_INTERPRET=1 before Python starts).
    """
    if not launch.INTERPRETED:
        raise RuntimeError(
            "sanitize() checks kernels in Triton's interpreter, but they are compiled in this process; "
            "set TRITON_INTERPRET=1 before starting Python"
        )
    from minidl.testing import memory
    from minidl.testing.sanitizer.patches import checking

    sanitizer = Sanitizer(stop)
    memory.listeners.append(sanitizer.unwritten.add)
    try:
        with sanitizer.unwritten, checking(sanitizer):
            yield sanitizer
    except SanitizerError:
        raise
    except Exception as error:
        if sanitizer.findings:
            raise SanitizerError(sanitizer.findings) from error
        raise
    finally:
        memory.listeners.remove(sanitizer.unwritten.add)
    sanitizer.raise_if_found()
