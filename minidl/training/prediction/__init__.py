"""Predictions of a finished run: `minidl predict`, `minidl evaluate` and `minidl explain`.

Read `predict` first, then `inputs`, `json_lines`, `multi_gpu`, `explain` and `terms`.
"""
