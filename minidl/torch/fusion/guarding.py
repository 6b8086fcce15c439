"""Guards that Dynamo leaves out by default: hooks that modules get later, and another forward of their classes.

Dynamo notes empty dicts of hooks and then checks them only under `skip_nnmodule_hook_guards = False`, and takes the
methods of torch's classes for unchangeable. A fused model would go on without a hook or a patch that came after it.
"""

from __future__ import annotations

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, TypeSource
from torch._guards import TracingContext


def guard_modules() -> None:
    """Have the graph that Dynamo is compiling traced anew where a module's hooks or its class's forward change."""
    context = TracingContext.try_get()
    if context is None:  # a backend that is called without Dynamo
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        source = guard.originating_source
        if guard.create_fn is not GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT or not isinstance(source, AttrSource):
            continue
        guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        if source.member == "_forward_hooks":
            guards.add(AttrSource(TypeSource(source.base), "forward").make_guard(GuardBuilder.FUNCTION_MATCH))
