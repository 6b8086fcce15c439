"""Tuning of tiles for this device: candidates, problems, measurements, and the tables that result."""
