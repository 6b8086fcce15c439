"""Pictures from a generator: latents, the passes through the network, files, and how good the pictures are.

Read `generate` first, then `model`, `latents`, `passes`, `writing` and `output`; `evaluate` and `quality` score them.
Importing this package is cheap: the modules that need torch or numpy are imported by the commands.
"""
