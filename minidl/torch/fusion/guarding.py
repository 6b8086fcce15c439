"""Guards that Dynamo omits by default: for later hooks of modules, and for a patched forward of their classes.

Dynamo checks empty dicts of hooks only under `skip_nnmodule_hook_guards = False`, and assumes that the methods of
torch's classes do not change. A fused model would ignore a later hook or patch.
"""

from __future__ import annotations

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, TypeSource
from torch._guards import TracingContext


def guard_modules() -> None:
    """Make Dynamo trace the current graph again after a change of a module's hooks or of its class's forward."""
    context = TracingContext.try_get()
    if context is None:  # called without Dynamo
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        source = guard.originating_source
        if guard.create_fn is not GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT or not isinstance(source, AttrSource):
            continue
        guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        if source.member == "_forward_hooks":
            guards.add(AttrSource(TypeSource(source.base), "forward").make_guard(GuardBuilder.FUNCTION_MATCH))
