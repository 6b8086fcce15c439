"""Sparse matrices and gradients: `csr` holds matrices by rows, `rows` gradients that touch few rows."""
