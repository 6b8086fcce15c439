"""Training on 1, 2, 4, ... GPUs of one host: the same bits first, then images a second beside torch's DDP.

    python benchmarks/scaling.py [--devices 1,2,4] [--json FILE] [--minutes 9] [--only bits|speed|tree]

For each number of devices torchrun starts this file once more for each; rows are written as they are found. Goals are
against our fastest run on one GPU without shards, at fixed work a GPU. On a CPU (interpreted, `--small`) it only shows
that it runs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

SHARDS = 8
STEPS = 20
SPEED = (("resnet50", 256, (1.97, 3.9)), ("resnet50", 64, (1.9, 3.7)), ("small_cnn", 4096, (1.9, 3.7)))
BITS = (("small_cnn", 512), ("resnet50", 64))
SUMS = (2**18, 25_600_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2,4")
    parser.add_argument("--json", type=Path, default=Path("scaling.json"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", choices=("bits", "speed", "tree"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _Measured(given).run()
        return
    end = time.monotonic() + 60 * given.minutes
    given.json.unlink(missing_ok=True)
    for count in map(int, given.devices.split(",")):
        left = end - time.monotonic()
        if left < 10:
            print(f"{count} devices: no time is left")
            continue
        more = [option for option in ("--small",) if given.small] + (["--only", given.only] if given.only else [])
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}",
            __file__, "--child", "--json", str(given.json), *more,
        ]  # fmt: skip
        try:
            subprocess.run(command, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"{count} devices: stopped, the minutes are over")
    _tell(given.json)


def _tell(path: Path) -> None:
    """The rows beside one device's."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    one = {(r["what"], r["name"], r.get("each")): r for r in rows if r["devices"] == 1}
    for row in rows:
        first = one.get((row["what"], row["name"], row.get("each")))
        line = {key: value for key, value in row.items() if key not in ("what", "name")}
        if row["what"] == "bits" and first is not None:
            line["same"] = row["hash"] == first["hash"]
        if row["what"] == "speed" and first is not None and first.get("plain_ms"):
            line["times"] = round(row["devices"] * first["plain_ms"] / row["ours_ms"], 3)
        print(row["what"], row["name"], line)


class _Measured:
    """What one of the processes measures; the first one writes."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch

        from minidl import distributed

        self.given, self.torch, self.distributed = given, torch, distributed
        self.group = distributed.init()
        self.gpu = torch.cuda.is_available()
        self.device = f"cuda:{torch.cuda.current_device()}" if self.gpu else "cpu"
        if self.group.size == 1 and self.gpu:
            torch.distributed.init_process_group("nccl")  # for torch's DDP

    def run(self) -> None:
        kinds = {"bits": self._all_bits, "tree": self._all_sums, "speed": self._all_speeds}
        for name, measure in kinds.items():
            if self.given.only in (None, name):
                measure()

    def _keep(self, **row: object) -> None:
        if self.group.rank:
            return
        path = self.given.json
        found = json.loads(path.read_text()) if path.exists() else {
            "device": self.torch.cuda.get_device_name() if self.gpu else "CPU", "torch": self.torch.__version__,
            "date": f"{dt.date.today()}", "rows": [],
        }  # fmt: skip
        found["rows"].append({"devices": self.group.size, **row})
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(row, flush=True)

    def _net(self, name: str, images: int):
        from minidl.workbench.bench import network_rows

        net = next(n for n in network_rows.NETS.values() if n.name == name and n.training)
        size = 32 if self.given.small and net.size > 64 else net.size
        return network_rows.Net(name, images, size, True, 1.0, net.given, net.options, net.channels)

    def _side(self, net, torchs: bool = False):
        """A network of ours or of torch with its optimizer, and the dtype of its pictures."""
        from minidl.workbench.bench import network_sides

        torch = self.torch
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.gpu else torch.float32
        kind = "cuda" if self.gpu else "cpu"
        if torchs:
            kit = network_sides.torchs(kind, torch.float32, dtype if self.gpu else None)
            return network_sides.Side(net, kit), torch.float32
        return network_sides.Side(net, network_sides.ours(kind, dtype)), dtype

    def _batch(self, net, dtype, seed: int):
        from minidl.workbench.bench import network_sides

        self.torch.manual_seed(100 + seed)
        return network_sides.batch_of(net, "cuda" if self.gpu else "cpu", dtype)

    def _plain(self, name: str, images: int):
        """A step without shards."""
        import minidl
        from minidl import Tensor, ops

        net = self._net(name, images)
        side, dtype = self._side(net)
        model, optimizer = side.networks[""], side.optimizers[""]

        def step(x, y):
            optimizer.zero_grad()
            loss = ops.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batch = [Tensor(t) for t in self._batch(net, dtype, 0)]
        return self._captured(minidl.capture(step), batch), model

    def _sharded(self, name: str, images: int):
        """A step of so many pictures in all, by shards."""
        import minidl
        from minidl import Tensor, ops

        shards = self.distributed.shards(SHARDS)
        parts = [self._net(name, len(rows)) for rows in shards.rows(images)]
        side, dtype = self._side(parts[0])
        model, optimizer = side.networks[""], side.optimizers[""]
        parallel = self.distributed.DataParallel(model, shards)

        def step(*given):
            pairs = zip(given[::2], given[1::2], strict=True)
            works = [lambda x=x, y=y: ops.cross_entropy(model(x), y) for x, y in pairs]
            loss = parallel.step(images, works)[0]
            optimizer.step()
            return loss

        given = [
            Tensor(t) for net, shard in zip(parts, shards.own, strict=True) for t in self._batch(net, dtype, shard)
        ]
        return self._captured(minidl.capture(step), given), model

    def _captured(self, step, given):
        import minidl

        minidl.compile_ahead(lambda: step(*given))
        return lambda: step(*given)

    def _theirs(self, name: str, images: int):
        """A step of torch: DDP, autocast, channels-last memory, so many pictures a GPU."""
        torch = self.torch
        torch.backends.cudnn.benchmark = True
        net = self._net(name, images)
        side, dtype = self._side(net, torchs=True)
        batch = self._batch(net, dtype, self.group.rank)
        model = side.networks[""]
        if torch.distributed.is_initialized():
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        side.calls[""] = model
        return lambda: side.step(batch)

    def _ms(self, step) -> float:
        torch = self.torch
        count = 3 if self.given.small else STEPS
        for _ in range(2 if self.given.small else 8):
            step()
        best = float("inf")
        for _ in range(2):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            self._wait()
            start = time.perf_counter()
            for _ in range(count):
                step()
            self._wait()
            best = min(best, (time.perf_counter() - start) / count)
        return round(1e3 * best, 4)

    def _wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def _all_bits(self) -> None:
        for name, images in BITS[:1] if self.given.small else BITS:
            step, model = self._sharded(name, 16 if self.given.small else images)
            for _ in range(3 if self.given.small else STEPS):
                loss = step()
            hashed = hashlib.sha256()
            for _, tensor in model.named_tensors():
                hashed.update(tensor.data.reshape(-1).view(self.torch.uint8).cpu().numpy().tobytes())
            self._keep(what="bits", name=name, steps=STEPS, loss=float(loss.data), hash=hashed.hexdigest()[:16])
            del step, model

    def _all_sums(self) -> None:
        """What a sum of gradients in the fixed tree takes, beside one of NCCL or gloo."""
        from minidl import Tensor

        torch = self.torch
        shards = self.distributed.shards(SHARDS)
        for size in (1000,) if self.given.small else SUMS:
            rows = torch.randn(len(shards.own), size, device="cuda" if self.gpu else "cpu")
            ours = self._ms(lambda rows=rows: self.distributed.all_reduce_fixed(Tensor(rows), shards))
            plain = rows.sum(0)
            theirs = self._ms(lambda plain=plain: torch.distributed.all_reduce(plain)) if self.group.size > 1 else None
            self._keep(what="tree", name=f"{size} float32", own=len(shards.own), ours_ms=ours, all_reduce_ms=theirs)

    def _all_speeds(self) -> None:
        for name, each, goals in SPEED[-1:] if self.given.small else SPEED:
            each = 16 if self.given.small else each
            row = {"each": each, "goals": goals}
            if self.group.size == 1:
                row["plain_ms"] = self._ms(self._plain(name, each)[0])
            row["ours_ms"] = self._ms(self._sharded(name, each * self.group.size)[0])
            row["ddp_ms"] = self._ms(self._theirs(name, each))
            row["images_per_second"] = round(1e3 * each * self.group.size / row["ours_ms"])
            row["ddp_images_per_second"] = round(1e3 * each * self.group.size / row["ddp_ms"])
            self._keep(what="speed", name=name, **row)
            self.torch.cuda.empty_cache() if self.gpu else None


if __name__ == "__main__":
    main()
