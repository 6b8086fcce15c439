"""Pillow in processes: python -m benchmarks.picture_peers read FOLDER SIDE | write COUNT FOLDER"""

from __future__ import annotations

import os
import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image


def decode(task: tuple[str, int]) -> int:
    name, side = task
    with Image.open(name) as image:
        return int(np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)).sum())


def write(task: tuple[str, int]) -> None:
    name, seed = task
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (28, 28), dtype=np.uint8)).save(name)


def main() -> None:
    with Pool(len(os.sched_getaffinity(0))) as pool:
        if sys.argv[1] == "read":
            names = [(str(path), int(sys.argv[3])) for path in sorted(Path(sys.argv[2]).rglob("*.jpg"))]
            pool.map(decode, names, chunksize=64)
        else:
            folder = Path(sys.argv[3])
            folder.mkdir(parents=True, exist_ok=True)
            pool.map(write, [(str(folder / f"{i:06d}.png"), i) for i in range(int(sys.argv[2]))], chunksize=64)


if __name__ == "__main__":
    main()
