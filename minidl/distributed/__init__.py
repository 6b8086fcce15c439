"""Several GPUs and hosts. Importing this imports neither torch nor Triton."""
