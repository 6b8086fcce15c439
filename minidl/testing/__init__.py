"""Checks for kernels, operations and models, yours included: gradients, error bounds, memory.

    check_grads(function, x)         gradients against central differences, in float64, on the kernels that really run
    error_bound(ops.softmax, x)      how far each element of a result may be off, from the arithmetic
    assert_within(y, exact, bound)   compares, and says where and by how much
    GuardedAllocations()             finds writes outside a buffer and reads of memory that nothing has written
    sanitize()                       checks each load and store of interpreted kernels, and says which line is wrong

None of it is used while a model is trained.
"""

from minidl.testing.compare import assert_not_vacuous, assert_within, error_bound
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
    "error_bound",
    "guarded",
    "poisoned_memory",
    "sanitize",
]
