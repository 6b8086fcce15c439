"""Measurements of shapes drawn from a seed, of whole networks, and of models in torch: `python -m benchmarks.bench`."""
