"""Processes of a training that are killed at any moment; another number of them goes on, and the bits stay.

    python -m tests.trials.kills --kills 50

ends with an error at the first weights that are not those of one process that nobody disturbed.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.test_together import free_ports

ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def command(out, *more):
    return ["train", "table", "--data", "diabetes", "--batch-size", "64", "--no-plots", "--out", str(out), *more]


def start(commands):
    """A process for each command, of one training."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": str(len(commands))}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "minidl", *each], env={**ALONE, **place, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, each in enumerate(commands)
    ]  # fmt: skip


def ended(processes):
    """(exit codes, all that was said on standard error), once all have ended."""
    said = [process.communicate(timeout=120)[1] for process in processes]
    return [process.returncode for process in processes], "".join(said)


def alone(*arguments):
    return subprocess.run([sys.executable, "-m", "minidl", *arguments], env=ALONE, check=True, capture_output=True)


def run(folder, kills, one, more, seed=0):
    """So many kills of any process; after each, another number of processes goes on, with --zero or without. Each run
    ends with the weights of `one`, a run of one process with these settings. Gives how many runs that were."""
    draw, killed, runs = random.Random(seed), 0, 0
    expected = (one / "model.safetensors").read_bytes()
    while killed < kills:
        out = folder / f"run-{runs}"
        runs += 1
        while not (out / "report.json").exists():
            zero = draw.choice(((), ("--zero",)))
            processes = start([command(out, *more, "--resume", *zero)] * draw.randint(1, 4))
            before = out / "checkpoints" / "last.json"
            was = before.stat().st_mtime_ns if before.exists() else 0
            end = time.monotonic() + (draw.uniform(2, 8) if draw.random() < 0.25 else 60)
            while time.monotonic() < end and any(process.poll() is None for process in processes):
                if before.exists() and before.stat().st_mtime_ns != was:  # an epoch further: soon
                    was, end = before.stat().st_mtime_ns, time.monotonic() + draw.uniform(0, 1.5)
                time.sleep(0.02)
            victim = draw.choice(processes)
            if killed < kills:
                killed += victim.poll() is None
                victim.kill()
                patience = time.monotonic() + 20
                while time.monotonic() < patience and any(process.poll() is None for process in processes):
                    time.sleep(0.05)
                for process in processes:  # those that have not met yet would wait; torchrun ends them, too
                    process.kill()
            ended(processes)
        assert (out / "model.safetensors").read_bytes() == expected, f"{out} has other weights than one process"
    return runs


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.trials.kills", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed, and when")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, more = Path(folder) / "alone", ("--epochs", "12", "--quiet", "--shards", "4")
        alone(*command(one, *more))
        runs = run(Path(folder), given.kills, one, more, given.seed)
    print(f"{given.kills} kills in {runs} runs, each with the weights of one process")


if __name__ == "__main__":
    main()
