"""Settings of commands, each declared once with its type, range, default and help.

Read `declaration` first (how a class of settings becomes options), then `fields`, `command` and `text_defaults`.
"""
