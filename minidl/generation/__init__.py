"""Pictures from a generator: latents, passes through the network, files, and the quality of the pictures.

Read `generate` first, then `model`, `latents`, `passes`, `writing` and `output`; `evaluate` and `quality` score them.
Importing this package is cheap: the modules that need torch or numpy are imported by the commands.
"""
