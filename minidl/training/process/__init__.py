"""The process of a command: its device, memory, display and helper processes.

Read `device` first, then `environment`, `memory_limit`, `out_of_memory`, `helpers`, `display` and `compile_ahead`.
"""
