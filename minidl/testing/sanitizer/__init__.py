"""Memory checks for kernels in Triton's interpreter, as compute-sanitizer's on a GPU, with the line of each bug.

    with minidl.testing.sanitize():
        my_kernel[grid](x, y, n, BLOCK=128)

Found are accesses outside of the tensor that a pointer belongs to (also in gaps between the rows of a view), lanes
that a load masks off without `other` and that reach a store (they hold NaN, where the interpreter gives 0 and a GPU
whatever was there), reads of memory that nothing has written since torch.empty, elements that two programs write or
that one program writes and another reads, lanes that write different values to one element, and misaligned addresses.
An access out of bounds is left out, so that the process goes on.

Programs that meet at an atomic operation (acquire, release) may see one another's writes before it; what a program
does after its atomic operation counts as done before it. Races are judged in the order in which the interpreter ran
the programs.

Not seen are masked lanes in integers of 8 and 16 bits and float8, and those that went through comparisons, sorts,
integer arithmetic or additions and multiplications in bfloat16, whose bits the interpreter takes for integers; gaps of
views that reach over more than 2^24 elements; writes through a bare address (ctypes); what a function of torch read
unwritten and copied; other processes. A function of torch that writes part of a tensor by index counts as writing all
of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from minidl.kernels import launch
from minidl.testing.sanitizer.checks import Sanitizer
from minidl.testing.sanitizer.findings import KINDS, Finding, Place, SanitizerError

__all__ = ["KINDS", "Finding", "Place", "Sanitizer", "SanitizerError", "sanitize"]


@contextlib.contextmanager
def sanitize(*, stop: bool = False) -> Iterator[Sanitizer]:
    """A context in which every interpreted kernel is checked, minidl's and your own.

    Yields a Sanitizer, whose `findings` lists what was found so far. Raises SanitizerError at the end if anything was
    found, at the first bug with `stop`; RuntimeError where kernels are compiled (set TRITON_INTERPRET=1 before Python
    starts).
    """
    if not launch.INTERPRETED:
        raise RuntimeError(
            "sanitize() checks kernels in Triton's interpreter, but they are compiled in this process; "
            "set TRITON_INTERPRET=1 before starting Python"
        )
    from minidl.testing import memory
    from minidl.testing.sanitizer.patches import checking

    sanitizer = Sanitizer(stop)
    memory.told.append(sanitizer.unwritten.add)
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
        memory.told.remove(sanitizer.unwritten.add)
    sanitizer.raise_if_found()
