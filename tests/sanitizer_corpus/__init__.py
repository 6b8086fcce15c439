"""25 kernels of the kinds people write, each with planted bugs and as many correct cases that look suspicious.

Written, and labelled, before any sanitizer ran on it. The kinds of bug are those that public Triton projects report:
masks, strides, tails of loops, int32 offsets, races, scopes, fresh memory, hints that lie, block pointers.
"""

from importlib import import_module

KERNELS = (
    "vector_add", "strided_copy", "transpose", "softmax", "layer_norm", "rms_norm", "matmul", "matmul_blocks",
    "split_k", "histogram", "prefix_sum", "argmax", "embedding", "scatter_add", "cross_entropy", "dropout", "rotary",
    "conv1d", "pooling", "attention", "group_norm", "quantise", "segment_sum", "ring_buffer", "optimiser",
)  # fmt: skip


def all_cases():
    """All cases, in the order of the kernels."""
    return [case for kernel in KERNELS for case in import_module(f"{__name__}.{kernel}").cases]
