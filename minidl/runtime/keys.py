"""The names of kernels in Triton's cache do not depend on what a process compiled before.

Triton adds a function's global constants to the key of its caller before it has looked for them: a kernel that is the
first to use a helper has another key than one whose helper is known. So a kernel from another process, as `ahead` and
`minidl doctor --warm` make them, was not found: 72 of 378 kernels of the usual commands.
"""

from typing import Any

from triton.runtime.jit import DependenciesFinder


def make_unique() -> None:
    """Look for a helper's constants before they are added to the key of its caller."""
    update = DependenciesFinder._update_hash

    def after_key(self: Any, func: Any) -> None:
        _ = func.cache_key
        update(self, func)

    DependenciesFinder._update_hash = after_key
