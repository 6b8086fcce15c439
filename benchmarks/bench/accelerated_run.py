"""Compare a model under `torch.compile(model, backend="minidl")` with the same model eager and compiled by Inductor.

    python -m benchmarks.bench.accelerated_run ROW PEERS

does so in a separate process and prints rows as `network_run` does.
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
    """A model of torch: in inference with weights of a dtype, in training under autocast to `cast`."""

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
        """Compute the loss, which is returned, and the gradients of all parameters. Nothing is updated."""
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
    """Measure a row and these peers, as `network_run.measured` does; `keep` gets the row after each peer."""
    dtype = dtype or net.dtype
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    cast = dtype if net.training and dtype != torch.float32 else None
    weights = torch.float32 if net.training else dtype
    batch = (net.batch(net.images, device, weights),)
    network = net.network().to(device, weights).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    row = Row(net, device, dtype, _floor(Side(net, copy.deepcopy(network), cast), batch))
    theirs = row.new_side("torch", lambda: Side(net, copy.deepcopy(network), cast))
    row.first("torch", theirs.call_on(batch))
    row.memory("torch", theirs, theirs.call_on(batch))
    ours = row.new_side("ours", lambda: Side(net, network, cast))
    ours.calls = {"": torch.compile(network, backend=minidl.torch.backend, dynamic=False)}
    row.first("ours", ours.call_on(batch))
    row.memory("ours", ours, ours.call_on(batch))
    exact = Side(net, copy.deepcopy(theirs.networks[""]).double())
    row.judge(ours, theirs, exact, batch)
    if net.training:
        _judge_in_evaluation(row, ours, theirs, exact, batch)
    del exact
    if not row.figures["error_ok"]:
        keep(row.wrong())
        return
    row.clock("ours", ours, ours.call_on(batch))
    try:
        row.figures["launched_ms"] = {str(n): _launched(row, n, ours, theirs) for n in (1 + net.training, net.images)}
    except Exception as error:  # noqa: BLE001 (a model that rejects few images, or no memory)
        row.figures["launched_ms"] = first_line(error)
    row.measure_peers(peers, theirs, batch, keep)
    theirs.calls = dict(theirs.networks)
    row.figures["layers_alone"] = _layers_alone(row, theirs, batch)
    keep(row.timed())


def _floor(side: Side, batch: Batch) -> float:
    """Return the floor in milliseconds, as for networks."""
    with side.casting(batch[0].device.type):
        elements, flop = work_of(side.networks[""], *batch)
    return floor_ms(2.0 * elements, flop) * (3 if side.net.training else 1)


def _torch_layers(network: nn.Module) -> list[str]:
    """Return the kinds of layers that stay torch's, with their numbers."""
    lines = Counter(f"{line.kind}: {line.note}" for line in minidl.torch.report(network) if line.how == "torch")
    return [f"{count} {line}" for line, count in lines.items()]


def _judge_in_evaluation(row: Row, ours: Side, theirs: Side, exact: Side, batch: Batch) -> None:
    """Compare gradients with running statistics; with batch statistics, small gradients are mostly rounding."""
    sides, few = (ours, theirs, exact), few_of(batch)
    for side in sides:
        side.networks[""].eval()
    exact.take_statistics(few)
    for side in (ours, exact, theirs):
        side.load(exact if side is ours else ours)
    our_errors, torch_errors = network_sides.errors_of([ours, theirs], exact, batch)
    row.figures["errors_in_evaluation"] = our_errors.as_json()
    row.figures["torch_errors_in_evaluation"] = torch_errors.as_json()
    row.figures["error_ok"] &= network_sides.right(our_errors, torch_errors, row.dtype)
    for side in sides:
        side.networks[""].train()


def _launched(row: Row, images: int, ours: Side, theirs: Side) -> dict[str, float]:
    """Return milliseconds of a call on `images` images, launched kernel by kernel from Python."""
    times = {}
    for name, side in (("ours", ours), ("torch", theirs)):
        first = next(side.networks[""].parameters())
        batch = (ours.net.batch(images, first.device.type, first.dtype),)
        call = side.call_on(batch)
        call()
        call()
        clock = (Launched if row.gpu else HostClock)([call], True)
        times[name] = round(statistics.median(clock.time() for _ in range(3)), 4)
        side.forget_gradients()
    return times


def _layers_alone(row: Row, theirs: Side, batch: Batch) -> dict[str, Any]:
    """Return milliseconds with the layers of `accelerate` and nothing fused, and the layers that stay torch's."""
    try:
        side = Side(theirs.net, minidl.torch.accelerate(copy.deepcopy(theirs.networks[""])), theirs.cast)
        call = side.call_on(batch)
        compile_ahead(call)
        side.forget_gradients()
        return {"ms": round(row.time(call), 5), "left_to_torch": _torch_layers(side.networks[""])}
    except Exception as error:  # noqa: BLE001 (the row is valid without it)
        return {"failed": first_line(error)}


if __name__ == "__main__":
    main(NETS, measured)
