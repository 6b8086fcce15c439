"""Ours and torch side by side on a GPU: what is measured, how, and what is made of the results."""
