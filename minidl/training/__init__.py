"""Training, from data to a finished run, and predictions of finished runs.

Read `train` and `task` first, then `tasks`, `settings`, `loop`, `run_folder`, `report`, `prediction` and `process`.
Importing this package is cheap: the modules that need torch, numpy or scikit-learn are imported by the commands.
"""
