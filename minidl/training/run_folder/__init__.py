"""The folder of a run: its files, and how they are created, locked, checked and read again.

Read `file_names` and `files` first, then `create`, `saved_run`, `manifest`, `checkpoints` and `progress`; `provenance`
and `outputs` decide which files may be replaced, `folder_lock` admits one writer, `weights` loads saved weights.
"""
