"""From data to a finished run: settings, the loop, checkpoints, reports, and what reads a run again.

Read `train` and `task` first, then `tasks`, `settings`, `loop`, `run_folder`, `report`, `prediction` and `process`.
Importing this package is cheap: the modules that need torch, numpy or scikit-learn are imported by the commands.
"""
