"""Shapes shared by tests, tuning, the doctor's offline compile and the benchmark: each is written once, here.

A list of cases is named after its use: BENCHMARK (rows of `minidl bench`), TUNED (`minidl tune` for a GPU), INTERPRETED
(`minidl tune` for Triton's interpreter) and COMPILED (`minidl doctor --compile`). Specs hold the small examples of
operations. Read convolutions, then transposed, then matrices.
"""
