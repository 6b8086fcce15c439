"""Predict the time of a training step on up to 64 GPUs of several hosts, from measured and published costs.

    python -m benchmarks.scaling_model [--network resnet50] [--images 256] [--shards 8] [--measured scaling.json]
                                       [--plot FILE.png]

The work per GPU is constant: W GPUs take a batch of W times as many images, in V shards. A step consists of

    compute   a step on one GPU, measured (benchmarks/results/networks-nvidia-h200.json). Measured for two numbers of
              images it is a + b x images, and k concurrent shards take (1 + 0.37 (k - 1)) a + b x images; measured for
              one number, a is 0. A step of one shard takes as long as one without shards.
    exchange  the sums of W segments in float32 (gradients in bfloat16 with one shard per GPU) to every other GPU
              (all-to-all), and the results in bfloat16 to all (all-gather). Data for GPUs of the same host goes over
              NVLink, the rest over the network card, at the same time, after a latency for each of W - 1 steps. The
              kernel that adds them reads and writes memory.
    exposed   without overlap (one shard) the complete exchange, with overlap its part that is longer than the backward
              pass, which starts after the gradients of the first bucket and ends before the exchange of the last.

`--measured` adds the points of benchmarks/scaling.py, and uses its step on one GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("results")
GPUS = (1, 2, 4, 8, 16, 32, 64)
HOST = 8  # GPUs
# NVIDIA H200 data sheet: NVLink 900 GB/s in both directions together, memory 4.8 TB/s. NVIDIA DGX H200 user guide: a
# ConnectX-7 card of 400 Gb/s for each GPU. Large messages are assumed to reach four fifths of each, and two thirds of
# NVLink: sums of 25.6 million float32 took 0.587 ms on two H200s and 0.653 on four, predicted are 0.54 and 0.66.
NVLINK, NETWORK, MEMORY = 0.67 * 450e9, 0.8 * 50e9, 0.8 * 4.8e12  # bytes a second
# The share of a shard's constant time that each further concurrent shard adds: ResNet-50 on an H200, 8 shards of 8 or
# 32 images, 0.36 and 0.38.
CONCURRENT = 0.37
# NCCL, src/graph/tuning.cc, baseLat and hwLat of Ring/Simple: a collective, and each of its steps by NVLink, network.
START, NVLINK_STEP, NETWORK_STEP = 8.4e-6, 3.4e-6, 14.0e-6  # seconds
SUM, RESULT = 4, 2  # bytes of a value: sums are float32, gradients bfloat16
BACKWARD = 2 / 3  # share of a step's time: two products for each product of the forward pass
BUCKET = 25e6  # bytes, as in DataParallel


class Point(NamedTuple):
    """The seconds of a step on `gpus` GPUs, by part."""

    gpus: int
    shards: int
    compute: float
    exchange: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def most(gpus: int, shards: int) -> int:
    """Return the number of shards of the GPU with most."""
    return -(-shards // gpus)


def exchange(gpus: int, parameters: float, shards: int, calls: int = 1) -> float:
    """Return the seconds of the sum of gradients over all GPUs in `calls` calls."""
    local = most(gpus, shards)
    added = parameters * (local * RESULT + SUM) / MEMORY  # within a GPU
    if gpus == 1:
        return added if shards > 1 else 0.0
    near, hosts = min(gpus, HOST), -(-gpus // HOST)
    times = 0.0
    for size in (RESULT if shards == gpus else SUM, RESULT):
        each = parameters / gpus * size
        times += max((near - 1) * each / NVLINK, (gpus - near) * each / NETWORK)
        times += calls * (START + (gpus - hosts) * NVLINK_STEP + (hosts - 1) * NETWORK_STEP)
    return added + times + parameters * (SUM + RESULT / gpus) / MEMORY


def point(gpus: int, fixed: float, image: float, images: int, parameters: float, shards: int, overlap: bool) -> Point:
    """Return a step with `fixed` seconds plus `image` seconds per image."""
    compute = (1 + CONCURRENT * (most(gpus, shards) - 1)) * fixed + image * images
    overlap = overlap and shards > gpus
    calls = max(1, round(parameters * RESULT / BUCKET)) if overlap else 1
    total = exchange(gpus, parameters, shards, calls)
    exposed = max(total / calls, total - BACKWARD * compute * (1 - 1 / calls)) if overlap else total
    return Point(gpus, shards, compute, total, exposed)


def step(network: str, images: int) -> tuple[float, float]:
    """Return (constant seconds, seconds per image) of a measured step, from two numbers of images if possible."""
    rows = json.loads((RESULTS / "networks-nvidia-h200.json").read_text())["rows"]
    name = f"{network} training step"
    times = {row["images"]: row["ours_ms"] / 1e3 for row in rows if row["name"].startswith(name)}
    if images not in times:
        raise SystemExit(f"{network} was measured with {', '.join(map(str, times)) or 'no'} images, not with {images}")
    others = [other for other in times if other != images]
    if not others:
        return 0.0, times[images] / images
    image = (times[others[0]] - times[images]) / (others[0] - images)
    return max(0.0, times[images] - image * images), image


def parameters_of(network: str) -> int:
    """Return the number of weights of a network of the benchmarks."""
    import torch

    from benchmarks.bench import network_rows, network_sides

    net = next(net for net in network_rows.NETS.values() if net.name == network and net.training)
    side = network_sides.Side(net, network_sides.ours("meta", torch.bfloat16))
    return sum(each.num_parameters() for each in side.networks.values())


def measured(path: Path | None, network: str, images: int, shards: int | None) -> tuple[dict[int, float], float | None]:
    """Return the seconds of a step by GPUs, and of one without shards, measured by benchmarks/scaling.py."""
    rows = [] if path is None else json.loads(path.read_text())["rows"]
    rows = [row for row in rows if (row["what"], row["name"], row.get("each")) == ("speed", network, images)]
    plain = [row["plain_ms"] / 1e3 for row in rows if row.get("plain_ms")]
    of = {row["devices"]: row["ours_ms"] / 1e3 for row in rows if row["shards"] == (shards or 8)}
    return of, plain[0] if plain else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--images", type=int, default=256, help="images per GPU")
    parser.add_argument("--shards", type=int, help="shards of a batch; default: one per GPU, at least 8")
    parser.add_argument("--measured", type=Path, help="the JSON of benchmarks/scaling.py")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    constant, image = step(options.network, options.images)
    points, plain = measured(options.measured, options.network, options.images, options.shards)
    if plain is not None:  # measured in the same run
        constant, image = (value * plain / (constant + image * options.images) for value in (constant, image))
    one, parameters = constant + image * options.images, parameters_of(options.network)
    print(f"{options.network}, {options.images} images a GPU: {1e3 * one:.2f} ms on one GPU without shards, ", end="")
    print(f"{parameters:,} weights")
    titles = (
        "GPUs",
        "shards",
        "compute",
        "exchange",
        "ms",
        "speed-up",
        "overlapped",
        *(["measured"] if points else []),
    )
    print("{:>4} {:>6} {:>9} {:>9} {:>8} {:>9} {:>11}".format(*titles), *titles[7:])
    curves: dict[str, list[float]] = {"no overlap": [], "overlap": []}
    gpus = [count for count in GPUS if count <= (options.shards or count)]
    for count in gpus:
        shards = options.shards or max(8, count)
        late, hidden = (
            point(count, constant, image, options.images, parameters, shards, overlap) for overlap in (False, True)
        )
        speeds = [count * one / result.seconds for result in (late, hidden)]
        for curve, speed in zip(curves.values(), speeds, strict=True):
            curve.append(speed)
        measured_ = f" {count * one / points[count]:>8.2f}" if count in points else ""
        print(
            f"{count:>4} {late.shards:>6} {1e3 * late.compute:>9.2f} {1e3 * late.exchange:>9.3f} "
            f"{1e3 * late.seconds:>8.2f} {speeds[0]:>9.2f} {speeds[1]:>11.2f}{measured_}"
        )
    if options.plot:
        draw(options, gpus, curves, {count: count * one / seconds for count, seconds in points.items()})


def draw(options: Any, gpus: list[int], curves: dict[str, list[float]], points: dict[int, float]) -> None:
    """Draw the speed-ups by number of GPUs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(gpus, gpus, color="0.7", label="ideal")
    for (name, speeds), style in zip(curves.items(), ("--", "-"), strict=True):
        axes.plot(gpus, speeds, style, color="C0", marker=".", label=f"model, {name}")
    if points:
        axes.plot(list(points), list(points.values()), "o", color="C1", label="measured")
    axes.set(
        xscale="log", yscale="log", xlabel="GPUs (8 a host)", ylabel="times one GPU without shards",
        title=f"{options.network}, {options.images} images a GPU",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(mpl.ticker.FixedLocator(gpus))
        axis.set_minor_locator(mpl.ticker.NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
