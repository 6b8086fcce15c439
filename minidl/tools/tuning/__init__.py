"""`minidl tune`: search the tiles of this device, and fit the constants of its estimates.

Read `classes` first (rules of a tile table and their problems), then `problem`, `problems`, `space` (candidates),
`check`, `search`, `run` and `files`. For `--estimates` read `trials`, `fit` and `estimates`; `drawn` draws shapes.
"""
