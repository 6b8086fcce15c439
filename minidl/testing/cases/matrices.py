"""Matrix products by (M, N, K), and matrices of text."""

from __future__ import annotations

BENCHMARK = (
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024),
    (1024, 128, 32768), (32768, 128, 1024), (128, 32768, 1024),
)  # fmt: skip
# A layer of few outputs and its gradients: M, N or K is small.
THIN_TUNED = (1024, 16, 128), (16, 1024, 128)
THIN_COMPILED = (
    (1024, 4, 128), (1024, 128, 4), (4, 128, 1024), (517, 9, 77), (517, 77, 9), (9, 77, 517), (1, 1, 1),
)  # fmt: skip
# (M, N, K) of a matrix times a column and of a row times a matrix.
VECTORS_COMPILED = (1000, 1, 776), (1000, 1, 77), (1, 1000, 776), (1, 1000, 77)
# Documents, terms in each, and terms of the vocabulary.
DOCUMENTS, DOCUMENTS_INTERPRETED = (1024, 65, 32754), (64, 20, 1000)
