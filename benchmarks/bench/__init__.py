"""Benchmarks of drawn shapes, networks and models in torch: `python -m benchmarks.bench`.

For drawn shapes read `drawn_run` first, then `drawn_conv`, `drawn_other` and `drawn_results`; for networks
`network_rows`, `network_run` and `network_clocks`; for models in torch `accelerated_rows` and `accelerated_run`.
"""
