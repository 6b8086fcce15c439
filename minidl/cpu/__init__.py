"""Compile kernels for the CPU: a kernel's TTIR, which Triton makes without a GPU, becomes C.

Read `ttir`, `values` and `loops`; then `operations`, `blocks`, `products`, `folds` and `control`, which `translate`
joins; then `build` and `run`. `prelude.h` has the functions of elements, `threads.c` runs programs on threads.
"""
