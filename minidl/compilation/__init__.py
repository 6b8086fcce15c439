"""Compile kernels before they are launched, and capture steps as CUDA graphs.

Read `job` (one kernel to compile), `launch_jobs` (jobs from launches), `compiler_processes` and `server`, then
`rehearsal` (which kernels a step launches), `step_inputs`, `capture`, `cuda_graph` and `first_call`. `fake_torch` and
`command_kernels` make commands start faster.
"""
