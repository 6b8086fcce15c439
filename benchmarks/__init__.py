"""Measurements for developers of minidl: run `python -m benchmarks.NAME` in the root of the repository.

Read `bench` first (drawn shapes, networks, models in torch), then `commands` (complete commands), `launch_cost` and
`scaling`. `results/` has the measured times, `notes.md` the experiments.
"""
