"""Compile kernels for the CPU: a kernel's TTIR, which Triton makes without a GPU, becomes C."""
