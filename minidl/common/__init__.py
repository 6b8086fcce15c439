"""Helpers without torch and Triton that every other folder may import.

Read `read_files` and `write_files` first (how minidl reads and writes its own files), then `console` (what commands
print), `timing`, `locks`, `import_lock`, `suggestions` (errors for names that minidl lacks) and `einops_backend`.
"""
