"""Repeat launches without repeating the Python code that planned them.

Read `fast_launch` first (launches a compiled kernel without Triton's lookup), then `replay` (the cache of calls),
`recorder` (what a first call does) and `recorded_call` (the same for other tensors).
"""
