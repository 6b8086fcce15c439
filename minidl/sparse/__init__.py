"""Sparse matrices and gradients: `csr` has matrices in CSR format, `rows` gradients of few rows."""
