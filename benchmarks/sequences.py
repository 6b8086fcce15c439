"""Time attention and recurrent layers beside FlashAttention-2 and cuDNN, as torch runs them.

    python -m benchmarks.sequences [--only WORD] --out benchmarks/results/sequences-DEVICE.json

Both sides are captured in CUDA graphs and replayed in turn (recurrent layers also launched one by one); results are
first compared with float64. A row "forward" of attention saves nothing for gradients, one "training" computes the
result and the three gradients; torch's are deterministic in the peer "deterministic". The ratio is that to
FlashAttention-2, torch's default, or to cuDNN's recurrent layer; `cudnn_ratio` is that to cuDNN's attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

import minidl
from minidl import nn, no_grad, ops
from minidl.tools.bench.machine import machine
from minidl.tools.bench.measure import Clock, Launched, Replay, in_turn, make_room
from minidl.tools.bench.sides import our_gradients, torch_gradients

Call = Callable[[], Any]
# Batch, heads, length, head size.
ATTENTION = (
    (16, 16, 1024, 128), (4, 16, 4096, 128), (1, 16, 16384, 128), (16, 16, 1024, 64), (1, 16, 16384, 64),
    (64, 12, 256, 64),
)  # fmt: skip
# Hidden size (that of the input, too), layers, directions, length, batch.
RECURRENT = ((256, 1, 1, 128, 64), (512, 2, 1, 128, 64), (256, 1, 2, 400, 32), (128, 1, 2, 64, 512))
GOALS = {"attention": 1.0, "lstm": 1.2, "gru": 1.2}
BACKENDS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def attention_rows(words: list[str]) -> Iterator[dict[str, Any]]:
    """Yield rows of attention in float16, and of the first shape in bfloat16 and float32."""
    for index, shape in enumerate(ATTENTION):
        for dtype in (torch.float16, torch.bfloat16, torch.float32)[: 3 if index == 0 else 1]:
            for causal in (False, True):
                for kind in ("forward", "training"):
                    name = f"attention {'x'.join(map(str, shape))} {'causal ' if causal else ''}{kind}"
                    if all(word in f"{name} {str(dtype)[6:]}" for word in words):
                        yield {"name": name, "dtype": str(dtype)[6:]} | attention(shape, dtype, causal, kind)


def attention(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, kind: str) -> dict[str, Any]:
    """Measure one row of attention."""
    q, k, v, dy = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tensors = [minidl.tensor(x.detach()).requires_grad_() for x in leaves]

    def ours() -> Any:
        function = partial(ops.scaled_dot_product_attention, is_causal=causal)
        if kind == "training":
            return our_gradients(function, tensors, dy)
        with no_grad():
            return (function(*tensors).data,)

    def theirs(backend: SDPBackend) -> Any:
        function = partial(F.scaled_dot_product_attention, is_causal=causal)
        with sdpa_kernel(backend):
            if kind == "training":
                return torch_gradients(function, leaves, dy)
            with torch.no_grad():
                return (function(*leaves),)

    def deterministic() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return theirs(SDPBackend.FLASH_ATTENTION)
        finally:
            torch.use_deterministic_algorithms(False)

    sides: dict[str, Call] = {"ours": ours}
    if dtype == torch.float32:
        sides["efficient"] = lambda: theirs(SDPBackend.EFFICIENT_ATTENTION)
    else:
        sides |= {name: partial(theirs, backend) for name, backend in BACKENDS.items()}
        if kind == "training":
            sides["FlashAttention-2, deterministic"] = deterministic
    right = _attention_is_right(ours(), leaves, dy, causal)
    row = _timed({name: Replay([call], False) for name, call in sides.items()}, right)
    batch, heads, length, size = shape
    # Two products forward, five backward, each of 2 L L E operations a head; half of them if causal.
    flop = (14 if kind == "training" else 4) * batch * heads * length**2 * size / (2 if causal else 1)
    times = {"ours": row["ours_ms"], **row["peers_ms"]}
    row["tflops"] = {name: round(flop / ms / 1e9, 1) for name, ms in times.items()}
    if "cuDNN" in times:
        peer = "FlashAttention-2"
        row |= {"peer": peer, "peer_ms": times[peer], "ratio": round(times[peer] / times["ours"], 3)}
        row["cudnn_ratio"] = round(times["cuDNN"] / times["ours"], 3)
    return row | {"goal": GOALS["attention"]}


def _attention_is_right(results: Any, leaves: list[torch.Tensor], dy: torch.Tensor, causal: bool) -> bool:
    """Return whether results of the first and last heads are as exact as the dtype allows, relative to their norms."""
    for batch, head in ((0, 0), (-1, -1)):
        exact = [x.detach()[batch, head].double().requires_grad_() for x in leaves]
        score = exact[0] @ exact[1].T / exact[0].shape[-1] ** 0.5
        if causal:
            score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
        y = score.softmax(-1) @ exact[2]
        expected = [y, *torch.autograd.grad(y, exact, dy[batch, head].double())]
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dy.dtype]
        for result, right in zip(results, expected, strict=False):
            if not (result[batch, head].double() - right).norm() <= limit * right.norm():
                return False
    return True


def recurrent_rows(words: list[str]) -> Iterator[dict[str, Any]]:
    """Yield rows of LSTM and GRU, in float32 (without TF32) and float16."""
    torch.backends.cudnn.allow_tf32 = False
    for mode in ("lstm", "gru"):
        for shape in RECURRENT:
            for dtype in (torch.float32, torch.float16):
                for kind in ("forward", "training"):
                    hidden, layers, directions, length, batch = shape
                    name = f"{mode} {hidden}, {layers} layers, {directions} directions, {length}x{batch} {kind}"
                    if all(word in f"{name} {str(dtype)[6:]}" for word in words):
                        yield {"name": name, "dtype": str(dtype)[6:]} | recurrent(mode, shape, dtype, kind)


def recurrent(mode: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> dict[str, Any]:
    """Measure one row of recurrent layers."""
    hidden, layers, directions, length, batch = shape
    options = {"num_layers": layers, "bidirectional": directions == 2}
    theirs = getattr(torch.nn, mode.upper())(hidden, hidden, **options).to("cuda", dtype)
    exact = getattr(torch.nn, mode.upper())(hidden, hidden, **options).double()
    exact.load_state_dict({name: value.double().cpu() for name, value in theirs.state_dict().items()})
    ours = getattr(nn, mode.upper())(hidden, hidden, **options).to("cuda", dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(length, batch, hidden, device="cuda", dtype=dtype)
    dy = torch.randn(length, batch, hidden * directions, device="cuda", dtype=dtype)

    def our_call() -> Any:
        for parameter in ours.parameters():
            parameter.grad = None
        leaf = minidl.tensor(x).requires_grad_()
        y = ours(leaf)[0]
        if kind == "training":
            y.backward(minidl.tensor(dy))
        return y.data, None if leaf.grad is None else leaf.grad.data

    def their_call() -> Any:
        leaf = x.detach().requires_grad_()
        y = theirs(leaf)[0]
        if kind == "training":
            torch.autograd.grad(y, [leaf, *theirs.parameters()], dy)
        return y

    y, dx = our_call()
    leaf = x.double().cpu().requires_grad_()
    expected = exact(leaf)[0]
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    right = bool((y.double().cpu() - expected).norm() <= limit * expected.norm())
    if dx is not None:
        (slope,) = torch.autograd.grad(expected, leaf, dy.double().cpu())
        right &= bool((dx.double().cpu() - slope).norm() <= limit * slope.norm())
    clocks: dict[str, Clock] = {"ours": Replay([our_call], True), "cuDNN": Launched([their_call])}
    try:
        clocks["cuDNN, captured"] = Replay([their_call], True)
    except RuntimeError as error:
        Console(stderr=True).print(f"cuDNN is not captured: {error}", markup=False)
    clocks["ours, launched"] = Launched([our_call])
    row = _timed(clocks, right)
    launched = row["peers_ms"].pop("ours, launched")
    row |= {"ours_launched_ms": launched, "goal": GOALS[mode]}
    peer = min(row["peers_ms"], key=row["peers_ms"].get)
    return row | {
        "peer": peer, "peer_ms": row["peers_ms"][peer], "ratio": round(row["peers_ms"][peer] / row["ours_ms"], 3)
    }  # fmt: skip


def _timed(clocks: dict[str, Clock], right: bool) -> dict[str, Any]:
    medians = {name: round(statistics.median(times), 5) for name, times in in_turn(clocks).items()}
    ours = medians.pop("ours")
    peer = min(medians, key=lambda name: medians[name])
    return {
        "ours_ms": ours, "peer": peer, "peer_ms": medians[peer], "ratio": round(medians[peer] / ours, 3),
        "error_ok": right, "peers_ms": medians,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="measure rows whose names contain all of these words")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console, rows, start = Console(), [], time.perf_counter()
    for make in (attention_rows, recurrent_rows):
        for row in make(options.only):
            rows.append(row)
            parts = f"{row['ours_ms']:9.4f} {row['peer_ms']:9.4f} ms  {row['ratio']:6.3f}  {row['error_ok']}"
            console.print(f"{row['name']} {row['dtype']} {parts}", markup=False, highlight=False)
            if options.out:
                command = "python -m benchmarks.sequences"
                options.out.write_text(json.dumps({**machine(), "command": command, "rows": rows}, indent=1) + "\n")
            make_room()
            if time.perf_counter() - start > options.seconds:
                return


if __name__ == "__main__":
    main()
