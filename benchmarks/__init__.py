"""Measurements that developers of minidl run: from the root of the repository, as `python -m benchmarks.NAME`."""
