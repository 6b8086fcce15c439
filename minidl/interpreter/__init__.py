"""Patch Triton's interpreter so that it is fast enough for real work on a CPU.

Read `patches` first, which installs the rest: `memory` and `gather` (loads and stores), `operators` (NumPy calls),
`libdevice` (functions that the interpreter lacks) and `bfloat16`.
"""
