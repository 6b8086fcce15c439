"""Compile kernels before they are launched, and capture steps as CUDA graphs.

Read `job` (one kernel to compile), `launch_jobs` (jobs from launches), `processes` and `server` (who compiles), then
`rehearsal` (which kernels a step launches), `capture` and `first_call`. `fake_torch` and
`command_kernels` save seconds.
"""
