"""Training, from data to a finished run, and predictions of finished runs.

Read `train` and `task` first, then `settings`, `tasks`, `loop`, `run_folder`, `report`, `prediction` and `process`.
Importing this package is fast: the commands import the modules that need torch, numpy or scikit-learn.
"""
