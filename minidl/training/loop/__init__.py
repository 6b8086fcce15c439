"""Training loops: epochs of steps, validation, checkpoints.

Read `trainer` first (what loops share), then `epochs` and `supervised` (classification and regression), `targets`,
`forward`, `averages`, and for GANs `gan` and `adversaries`.
"""
