"""Tools that measure and show kernels.

Read `bench` first (minidl and torch side by side), then `tuning` (the search for tiles), `doctor` (checks of this
machine, compilation for other GPUs), `profiling`, `drawing` (graphs of operations) and `sanitizing`.
"""
