"""`minidl bench`: minidl and torch side by side on a GPU.

Read `measure` first (how a row is timed), then `matrix_rows`, `image_rows` and `generator_rows` (the rows), `sides` and
`peers` (the calls of torch and of other projects), `goals`, `run`, `results` and `chart`.
"""
