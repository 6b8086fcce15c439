"""Compile kernels for the CPU: a kernel's TTIR, which Triton makes without a GPU, becomes C.

Read `ttir`, `values`, `code`, `loops` and `operations`; then `translator` and `deferral`, and `blocks`, `products`,
`folds` and `control`, which `translate` joins; then `build` and `run`. `prelude.h` has functions of elements, and
`threads.c` runs the programs.
"""
