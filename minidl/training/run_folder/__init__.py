"""The folder of a run: creating, locking, checking and reading its files.

Read `folder` and `training_folder` first, then `saved_run`, `manifest`, `checkpoints` and `files`. `provenance` and
`outputs` decide which files may be replaced, `folder_lock` admits one writer, `train_settings` continues a run,
`progress` and `weights` check the content of checkpoints.
"""
