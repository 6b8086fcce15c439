"""Constants for estimates of a launch's time, one JSON file per device in `constants/`.

Read `schema` first (the constants and their meaning), then `devices` (their files) and `selection` (which are in use).
"""
