"""Constants for estimates of a launch's time, one JSON file per device in `constants/`.

Read `devices` first (the constants and their meaning), then `selection` (which device's constants are in use).
"""
