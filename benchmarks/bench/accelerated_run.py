"""Measure a model that `torch.compile(model, backend="minidl")` runs beside itself, eager and compiled by Inductor.

    python -m benchmarks.bench.accelerated_run ROW PEERS

does so in a process of its own and prints rows as `network_run` does.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import minidl.torch
from benchmarks.bench import network_sides
from benchmarks.bench.accelerated_rows import NETS, Model
from benchmarks.bench.network_clocks import Row
from benchmarks.bench.network_rows import work_of
from benchmarks.bench.network_run import main
from benchmarks.bench.network_sides import Batch, few_of
from minidl.compilation.rehearsal import compile_ahead
from minidl.tools.bench.measure import HostClock, Launched, floor_ms
from minidl.tools.first_line import first_line


class Side(network_sides.Side):
    """A model of torch: in inference with weights of a dtype, in training with `cast` under autocast to that."""

    net: Model

    def __init__(self, net: Model, network: nn.Module, cast: torch.dtype | None = None) -> None:
        self.net, self.cast = net, cast
        self.networks: dict[str, Any] = {"": network.train(net.training)}
        self.calls = dict(self.networks)
        self.optimizers = {}

    def run(self, batch: Batch) -> torch.Tensor:
        x = batch[0].to(next(self.networks[""].parameters()).dtype)
        with self.casting(x.device.type):
            y = self.calls[""](x)
        return y["out"] if isinstance(y, dict) else y

    def casting(self, device: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.cast is None else torch.autocast(device, self.cast)

    def answer(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return self.run(batch)

    def step(self, batch: Batch) -> list[torch.Tensor]:
        """The loss; the gradients are those of all parameters. Nothing is updated."""
        self.forget_gradients()
        y = self.run(batch)
        y = y.float() if y.dtype.itemsize == 2 else y
        classes = torch.arange(len(y), device=y.device) % y.shape[1]
        loss = F.cross_entropy(y, classes) if y.dim() == 2 and y.shape[1] > 1 else y.square().mean()
        loss.backward()
        return [loss.detach()]

    def gradients(self, batch: Batch) -> tuple[list[float], list[torch.Tensor]]:
        (loss,) = self.step(batch)
        return [float(loss)], [p.grad for p in self.networks[""].parameters() if p.grad is not None]

    def forget_gradients(self) -> None:
        self.networks[""].zero_grad(set_to_none=True)


def measured(
    net: Model,
    peers: Sequence[str],
    keep: Callable[[dict[str, Any]], None],
    device: str = "cuda",
    dtype: torch.dtype | None = None,
) -> None:
    """Measure a row beside these peers, as `network_run.measured` does; `keep` gets it after each peer."""
    dtype = dtype or net.dtype
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    cast = dtype if net.training and dtype != torch.float32 else None
    weights = torch.float32 if net.training else dtype
    batch = (net.batch(net.images, device, weights),)
    made = net.made().to(device, weights).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    row = Row(net, device, dtype, _floor(Side(net, copy.deepcopy(made), cast), batch))
    theirs = row.begun("torch", lambda: Side(net, copy.deepcopy(made), cast))
    row.first("torch", theirs.given(batch))
    row.memory("torch", theirs, theirs.given(batch))
    ours = row.begun("ours", lambda: Side(net, made, cast))
    ours.calls = {"": torch.compile(made, backend=minidl.torch.backend, dynamic=False)}
    row.first("ours", ours.given(batch))
    row.memory("ours", ours, ours.given(batch))
    exact = Side(net, copy.deepcopy(theirs.networks[""]).double())
    row.judge(ours, theirs, exact, batch)
    if net.training:
        _judge_in_evaluation(row, ours, theirs, exact, batch)
    del exact
    if not row.found["error_ok"]:
        keep(row.wrong())
        return
    row.clock("ours", ours, ours.given(batch))
    try:
        row.found["launched_ms"] = {str(n): _launched(row, n, ours, theirs) for n in (1 + net.training, net.images)}
    except Exception as error:  # noqa: BLE001 (a batch of few images that a model does not take, or no memory)
        row.found["launched_ms"] = first_line(error)
    row.beside_all(peers, theirs, batch, keep)
    theirs.calls = dict(theirs.networks)
    row.found["layers_alone"] = _layers_alone(row, theirs, batch)
    keep(row.timed())


def _floor(side: Side, batch: Batch) -> float:
    """Milliseconds, counted as those of networks."""
    with side.casting(batch[0].device.type):
        elements, flop = work_of(side.networks[""], *batch)
    return floor_ms(2.0 * elements, flop) * (3 if side.net.training else 1)


def _left(network: nn.Module) -> list[str]:
    """What stays torch's, with how many such layers."""
    lines = Counter(f"{line.kind}: {line.note}" for line in minidl.torch.report(network) if line.how == "torch")
    return [f"{count} {line}" for line, count in lines.items()]


def _judge_in_evaluation(row: Row, ours: Side, theirs: Side, exact: Side, batch: Batch) -> None:
    """The gradients with running statistics: by a batch's own, most of what is left of small ones is rounding."""
    sides, few = (ours, theirs, exact), few_of(batch)
    for side in sides:
        side.networks[""].eval()
    exact.take_statistics(few)
    for side in (ours, exact, theirs):
        side.load(exact if side is ours else ours)
    own, torchs = network_sides.errors_of([ours, theirs], exact, batch)
    row.found["errors_in_evaluation"], row.found["torch_errors_in_evaluation"] = own.as_json(), torchs.as_json()
    row.found["error_ok"] &= network_sides.right(own, torchs, row.dtype)
    for side in sides:
        side.networks[""].train()


def _launched(row: Row, images: int, ours: Side, theirs: Side) -> dict[str, float]:
    """Milliseconds of a call launched kernel by kernel from Python, of so many images."""
    found = {}
    for name, side in (("ours", ours), ("torch", theirs)):
        first = next(side.networks[""].parameters())
        batch = (ours.net.batch(images, first.device.type, first.dtype),)
        call = side.given(batch)
        call()
        call()
        clock = (Launched if row.gpu else HostClock)([call], True)
        found[name] = round(statistics.median(clock.time() for _ in range(3)), 4)
        side.forget_gradients()
    return found


def _layers_alone(row: Row, theirs: Side, batch: Batch) -> dict[str, Any]:
    """Milliseconds with the layers that `accelerate` exchanges and nothing fused, and what it leaves to torch."""
    try:
        made = Side(theirs.net, minidl.torch.accelerate(copy.deepcopy(theirs.networks[""])), theirs.cast)
        call = made.given(batch)
        compile_ahead(call)
        made.forget_gradients()
        return {"ms": round(row.alone(call), 5), "left_to_torch": _left(made.networks[""])}
    except Exception as error:  # noqa: BLE001 (the row holds without it)
        return {"failed": first_line(error)}


if __name__ == "__main__":
    main(NETS, measured)
