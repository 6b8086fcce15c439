"""Pictures from a generator: latents, the passes through the network, files, and how good the pictures are.

Importing this package is cheap: the modules that need torch or numpy are imported by the commands.
"""
