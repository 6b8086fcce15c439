"""Choosing tiles for this device: what is tried, on which problems, how it is measured, and the tables made of it."""
