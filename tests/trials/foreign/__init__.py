"""Kernels that others wrote, unmodified, under the sanitizer: packages of a registry, run after their own tests."""
