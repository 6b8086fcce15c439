"""Checks of gradients, error bounds and memory for kernels, operations and models, also your own.

    check_grads(function, x)         compares gradients with central differences in float64, on the real kernels
    error_bound(ops.softmax, x)      the largest error of each element that the arithmetic allows
    assert_within(y, exact, bound)   compares, and reports the worst element and its error
    GuardedAllocations()             finds writes outside a buffer and reads of unwritten memory
    sanitize()                       checks each load and store of interpreted kernels, and names the faulty line
    compiled(kernel)[grid](...)      compiles any Triton kernel for the CPU, and launches it

Training does not use this package. Read `specs` first, then `compare`, `gradients`, `memory`, `compiled_kernels` and
`sanitizer`.
"""

from minidl.testing.compare import assert_not_vacuous, assert_within, error_bound
from minidl.testing.compiled_kernels import compiled
from minidl.testing.gradients import GradientError, check_grads
from minidl.testing.memory import GuardedAllocations, MemoryGuardError, guarded, poisoned_memory
from minidl.testing.sanitizer import Finding, Sanitizer, SanitizerError, sanitize

__all__ = [
    "Finding",
    "GradientError",
    "GuardedAllocations",
    "MemoryGuardError",
    "Sanitizer",
    "SanitizerError",
    "assert_not_vacuous",
    "assert_within",
    "check_grads",
    "compiled",
    "error_bound",
    "guarded",
    "poisoned_memory",
    "sanitize",
]
