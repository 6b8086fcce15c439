"""Training loops: epochs of steps, validation, checkpoints.

Read `trainer` first (the base of all loops), then `learner`, `epochs` and `supervised` (classification and
regression), `targets`, `optimizers`, `forward`, `averages`, and for GANs `gan` and `adversaries`.
"""
