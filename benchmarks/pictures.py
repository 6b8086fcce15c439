"""Time files of pictures: encoding, writing, and `minidl generate` without its network.

    python -m benchmarks.pictures encode     processor time and bytes of a picture by format and level of compression
    python -m benchmarks.pictures write      seconds until small files are on disk, by the way of writing
    python -m benchmarks.pictures command    `generate` of --count pictures by a network that takes no time

Files are written to a folder in --work (default: the folder for temporary files), which should be on a disk. The best
of --times is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from minidl.common import write_files
from minidl.data import encoding

TEXT = {"Software": "minidl 0.1", "model": "mnist", "model_sha256": "ab" * 32, "precision": "float32", "seed": "12"}


def waves(count: int, side: int, channels: int) -> np.ndarray:
    """Return smooth noise, uint8 [count, side, side, channels]."""
    noise = np.random.default_rng(0).integers(0, 256, (count, side, side, channels)).astype(np.float32)
    smooth = ndimage.gaussian_filter(noise, (0, 2, 2, 0))
    return ((smooth - smooth.min()) / np.ptp(smooth) * 255).astype(np.uint8)


def digits(count: int) -> np.ndarray:
    """Return scikit-learn's digits, enlarged, on black: uint8 [count, 28, 28, 1]."""
    from sklearn.datasets import load_digits

    small = load_digits().images[:count].repeat(3, axis=1).repeat(3, axis=2)
    return np.pad((small * 15.9).astype(np.uint8), ((0, 0), (2, 2), (2, 2)))[..., None]


def encode(options: argparse.Namespace) -> None:
    ways: dict[str, Callable[[np.ndarray], bytes]] = {
        kind: lambda picture, kind=kind: encoding.encoded(picture.tobytes(), picture.shape, kind, TEXT)
        for kind in ("png", "jpg", "webp", "bmp")
    }
    for more in ({"compress_level": 1}, {"compress_level": 3}, {"compress_level": 9}, {"optimize": True}):
        ways["png " + " ".join(f"{name}={value}" for name, value in more.items())] = lambda p, more=more: png(p, **more)
    for pictures in (digits(256), waves(64, 64, 3), waves(6, 256, 3)):
        for name, way in ways.items():
            times: list[float] = []
            for _ in range(options.times):
                before = time.process_time()
                encoded = [way(picture) for picture in pictures]
                times.append((time.process_time() - before) / len(pictures))
            shape = "x".join(map(str, pictures.shape[1:]))
            print(f"{shape:10} {name:20} {1e6 * min(times):8.0f} us {np.mean([*map(len, encoded)]):10,.0f} bytes")


def png(picture: np.ndarray, **more: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(picture[:, :, 0] if picture.shape[-1] == 1 else picture).save(content, "PNG", **more)
    return content.getvalue()


def write(options: argparse.Namespace) -> None:
    def plain(path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def new(path: Path, content: bytes) -> None:
        write_files.write_new(path.parent, {path.name: content})

    ways = {
        "each flushed, renamed, its folder flushed": (write_files.write_bytes, 1, False),
        "each flushed": (new, 1, False),
        **{f"each flushed, {n} at a time": (new, n, False) for n in (2, 4, 8, 16, 32)},
        "none flushed, then the file system": (plain, 1, True),
        "none flushed": (plain, 1, False),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.times):
        for name, (one, threads, sync) in ways.items():
            with tempfile.TemporaryDirectory(dir=options.work) as folder, ThreadPoolExecutor(threads) as pool:
                start = time.perf_counter()
                list(pool.map(one, [Path(folder) / str(i) for i in range(options.count)], [b"x" * 600] * options.count))
                if sync:
                    handle = os.open(folder, os.O_RDONLY)
                    ctypes.CDLL(None).syncfs(handle)
                    os.close(handle)
                best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        print(f"{name:45} {1e6 * seconds / options.count:8.0f} us")


# Run in a separate process, because a command sets up its process.
COMMAND = """
import sys
import numpy as np
from minidl.cli import app
from minidl.generation import latents, passes
from benchmarks.pictures import digits

few = digits(256).astype(np.float32).transpose(0, 3, 1, 2) / 127.5 - 1

def images(model, z, *_):
    for start in range(0, len(z), 4096):
        yield few[np.arange(start, min(start + 4096, len(z))) % len(few)]

passes.images = images
latents.from_seeds = lambda seeds, latent, _: np.zeros((len(seeds), latent), np.float32)
app(sys.argv[1:])
"""


def command(options: argparse.Namespace) -> None:
    flags = ("generate", "--count", str(options.count))
    for more in (["--workers", "1"], [], ["--format", "jpg"], ["--format", "zip"], ["--format", "npy"]):
        best = ""
        for _ in range(options.times):
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                arguments = [sys.executable, "-c", COMMAND, *flags, *more, "--out", f"{folder}/out"]
                output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
                rate = output.rpartition(": ")[2].strip()
                best = min(best or rate, rate, key=lambda text: float(text.split()[0]))
        print(f"{' '.join(more) or 'png':20} {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["encode", "write", "command"])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    {"encode": encode, "write": write, "command": command}[options.part](options)


if __name__ == "__main__":
    main()
