"""The README's table, from the committed results: python -m benchmarks.table."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "nvidia-h200.json"


def markdown() -> str:
    """A line per row: ours, the best of torch, the ratio theirs / ours, and the share of the hardware floor."""
    stored = json.loads(RESULTS.read_text())
    lines = [
        "{device}, driver {driver}, torch {torch}, Triton {triton}, {date}.".format_map(stored),
        "A ratio above 1 is ahead of the best of torch (eager and compiled).",
        "",
        "| work | dtype | ours, ms | torch's best, ms | ratio | share of the floor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['name']} | {row['dtype']} | {row['ours_ms']:.4f} | {row['peer_ms']:.4f} ({row['peer']}) | "
        f"{row['ratio']:.2f} | {row['share_of_floor']:.2f} |"
        for row in stored["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
