"""Gradients of gradients: each module defines second derivatives of operations in `minidl.ops`.

Read `linear` first, then `activations` and `layers`.
"""
