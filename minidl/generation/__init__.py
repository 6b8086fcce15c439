"""Pictures from a generator: latents, passes through the network, files, and the quality of the pictures.

Read `generate` first, then `latents`, `passes`, `writing`, `folder` and `sharing`; `evaluate` uses `quality`.
Importing this package imports neither torch nor NumPy.
"""
