"""Two tensors that a convolution reads where they lie: to the bit what the same form makes of both joined."""

import pytest
import torch

from minidl.compilation.first_call import delayed_launches
from minidl.kernels import conv
from minidl.kernels.conv import costs, forms, plan
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, Problem
from minidl.runtime import launch, records
from minidl.runtime.cost_model import devices, selection
from minidl.runtime.descriptors import FAR, ConcatPair
from minidl.runtime.launch_cache.replay import replaying
from minidl.tensors import default_device
from tests.rounded_once import rounded_once  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("rounded_once")

DTYPES = [torch.float16] if launch.INTERPRETED else [torch.float16, torch.bfloat16]
PART = 32  # channels of a half


def image(*shape, seed=0, dtype=torch.float16):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(default_device(), dtype).contiguous(memory_format=torch.channels_last)


def halves(*shape, exchanged=False, dtype=torch.float16):
    """Two tensors, the second behind the first or before it, with NaN around."""
    N, C, H, W = shape
    count = N * C * H * W
    memory = torch.full((2 * count + 96,), float("nan"), dtype=dtype, device=default_device())
    parts = []
    for seed, start in enumerate((count + 64, 16) if exchanged else (16, count + 64)):
        parts.append(memory[start : start + count].view(N, H, W, C).permute(0, 3, 1, 2))
        parts[-1].copy_(image(*shape, seed=seed, dtype=dtype))
    return ConcatPair(*parts)


def around(size, kernel=(3, 3), dilation=(1, 1)):
    pads = tuple((k // 2 * d, k // 2 * d) for k, d in zip(kernel, dilation, strict=True))
    return Geometry.of(size, kernel, (1, 1), pads, dilation)


WEIGHTS = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "PER_PROCESSOR": 2}


def boxes_of(K, per=0, M=64):
    sizes = {"BLOCK_M": M, "BLOCK_N": 64, "BLOCK_K": K, "PIECES": 1, "PER_PROCESSOR": per, "FLATTEN": 0}
    return launch.force(conv_box=launch.Tile(sizes))


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "M", "K", "kernel", "dilation"),
    [("box", 72, 32, (3, 3), (1, 1)), ("box", 16, 16, (3, 2), (1, 2)), ("pair", 24, 32, (3, 3), (1, 1))],
)
def test_results_are_those_of_the_joined_tensor(form, M, K, kernel, dilation, dtype, exchanged):
    at = around((5, 10), kernel, dilation)
    if form == "pair":
        at = around((5, 10))
    x = halves(3, PART, 5, 10, exchanged=exchanged, dtype=dtype)
    assert x.swapped == exchanged
    both, w = torch.cat(x, 1), image(M, 2 * PART, *kernel, seed=3, dtype=dtype)
    bias, scale = image(M, 1, 1, 1, seed=4).view(M).float(), image(M, 1, 1, 1, seed=5).view(M).float()
    added = image(3, M, at.h.output, at.w.output, seed=6, dtype=dtype)
    ways = (
        {}, {"bias": bias, "scale": scale, "act": "relu"}, {"added": added, "act": "relu"},
        {"act": "gelu", "preactivation": True},
    )  # fmt: skip
    found = []

    def note(kernel, grid, args, meta, go):
        found.append(records.fields(meta).get("PART"))
        go()

    with boxes_of(K, per=int(exchanged)):
        for way in ways:
            with launch.watch(note):
                mine = conv.forward(x, w, at, form=form, **way)
            theirs = conv.forward(both, w, at, form=form, **way)
            for a, b in zip(mine, theirs, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    assert found.count(PART) == len(ways)


def test_a_call_is_not_replayed_of_others():
    """They lie alike, at another distance or exchanged."""
    at, w, dy = around((5, 10)), image(40, 2 * PART, 3, 3), image(2, 40, 5, 10)
    first, second, _, other = (image(2, PART, 5, 10, seed=seed) for seed in range(4))
    with replaying(True, at_once=True), boxes_of(32):
        for x in (
            ConcatPair(first, second),
            ConcatPair(first, second),
            ConcatPair(second, first),
            ConcatPair(first, other),
        ):
            both = torch.cat(x, 1)
            assert torch.equal(conv.forward(x, w, at, form="box")[0], conv.forward(both, w, at, form="box")[0])
            assert torch.equal(conv.grad_weight(x, dy, at, form="box"), conv.grad_weight(both, dy, at, form="box"))


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(("kernel", "taps"), [((3, 3), 3), ((2, 1), 1)])
def test_weight_gradients_are_those_of_the_joined_tensor(kernel, taps, exchanged):
    at = around((5, 10), kernel)
    x = halves(3, PART, 5, 10, exchanged=exchanged, dtype=torch.float16)
    dy = image(3, 40, at.h.output, at.w.output, seed=6)
    with launch.force(conv_box_grad_weight=launch.Tile(WEIGHTS | {"TAPS": taps})):
        expected = conv.grad_weight(torch.cat(x, 1), dy, at, form="box")
        launched = []
        with launch.watch(lambda kernel, grid, args, meta, go: (launched.append(meta.get("PART")), go())):
            dw = conv.grad_weight(x, dy, at, form="box")
    assert PART in launched
    assert torch.equal(dw, expected)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_launch_that_waits_keeps_both(changed):
    at, w = around((5, 10)), image(40, 2 * PART, 3, 3)
    x = ConcatPair(*(image(2, PART, 5, 10, seed=seed) for seed in range(2)))
    with boxes_of(32):
        expected, _ = conv.forward(x, w, at, form="box")
        with delayed_launches(torch.device(default_device())):
            y, _ = conv.forward(x, w, at, form="box")
            x[changed].zero_()
    assert torch.equal(y, expected)


def test_what_no_box_reads_is_joined():
    at, dy, w = around((6, 9)), image(2, 40, 6, 9, seed=2), image(40, 2 * PART, 3, 3)
    x = halves(2, PART, 6, 9)
    with boxes_of(64):  # a block of both halves
        assert not conv.reads_concat_pair(x, w, at)
        with pytest.raises(ValueError, match="which the plan for this shape does not read"):
            conv.forward(x, w, at)
        assert torch.equal(conv.grad_weight(x, dy, at), conv.grad_weight(torch.cat(x, 1), dy, at))
    with forms.among(forms.boxed), boxes_of(32):
        assert conv.reads_concat_pair(x, w, at)
        assert conv.reads_concat_pair(x, w, at, act="relu", preactivation=True)
        off = torch.empty(x.first.numel() + 1, dtype=torch.float16, device=default_device())[1:]
        others = (
            x.first, x.first.contiguous(), x.second[:1], x.second.float(),
            off.view(2, 6, 9, PART).permute(0, 3, 1, 2),  # begins at a multiple of 2 bytes
        )  # fmt: skip
        assert not any(conv.reads_concat_pair(ConcatPair(x.first, other), w, at) for other in others)


def test_tensors_that_are_too_far_apart_are_joined(monkeypatch):
    at, w, x = around((6, 9)), image(40, 2 * PART, 3, 3), halves(2, PART, 6, 9)
    with boxes_of(32), forms.among(forms.boxed):
        monkeypatch.setattr(launch, "INTERPRETED", False)
        assert conv._is_concat_pair(x)
        monkeypatch.setattr(ConcatPair, "distance", FAR)
        assert not conv.reads_concat_pair(x, w, at)


# Joins of a U-Net of 64 to 1024 channels, 16 images of 256x256.
LEVELS = [(128, 64, 256), (256, 128, 128), (512, 256, 64), (1024, 512, 32)]


def level(C, M, size, way=FORWARD, **how):
    axis = Axis(size, 3, size, 1, 1, 1)
    return Problem(way, Geometry(axis, axis, 1), 16, C, M, torch.bfloat16, target="sm_90", processors=132, **how)


@pytest.mark.parametrize("device", ["nvidia-h100", "nvidia-h200"])
@pytest.mark.parametrize("how", [{"bias": True, "scale": True, "act": "relu"}, {"statistics": True}])
def test_a_u_net_has_halves_everywhere(how, device):
    """By the form that it has without, or one that is slower by less than a copy."""
    with selection.use(devices.of_file(devices.FOLDER / f"{device}.json")):
        for sizes in LEVELS:
            problem = level(*sizes, **how)
            found, plain = plan.plan(problem._replace(concat_pair=True)), plan.plan(problem)
            assert found.problem.concat_pair
            if found.name == plain.name:
                assert (found.microseconds, found.bands) == (plain.microseconds, plain.bands)
            else:
                assert 0 < found.microseconds - plain.microseconds <= costs.join_time(problem)


def test_halves_are_joined_where_a_copy_is_cheaper(monkeypatch):
    """1024->512 at 32x32 on an H200: pixels, which read no halves, 223 us, boxes 235, and a copy 17."""
    problem = level(*LEVELS[-1], concat_pair=True)
    with selection.use(devices.of_file(devices.FOLDER / "nvidia-h200.json")):
        assert "halves" in plan.explain(problem).splitlines()[0]
        taken = [line for line in plan.explain(problem).splitlines() if line.endswith("taken")]
        assert len(taken) == 1
        assert "box: boxed" in taken[0]
        assert plan.plan(problem).name == "box"
        monkeypatch.setattr(costs, "join_time", lambda problem: 0.0)
        launch.forget()
        taken = [line for line in plan.explain(problem).splitlines() if line.endswith("taken")]
        assert len(taken) == 1
        assert "joined, pixel: pixel_tiled" in taken[0]
        found = plan.plan(problem)
        assert not found.problem.concat_pair
        assert found.name == "pixel"


@pytest.mark.parametrize("target", launch.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("direction", [FORWARD, GRAD_WEIGHT])
@pytest.mark.parametrize("channels", [(128, 64), (64, 200), (12, 5)])
def test_every_target_has_a_plan_for_two_tensors(target, dtype, direction, channels):
    """Targets without tensor descriptors have no tiles of the forms that read two tensors: they are joined there."""
    C, M = channels
    problem = Problem(
        direction, around((32, 32)), 8, C, M, dtype, precision="ieee", target=target, processors=100, concat_pair=True,
        statistics=direction == FORWARD,
    )  # fmt: skip
    reads = plan.plan(problem).problem.concat_pair
    assert reads in ((False,) if target == "sm_80" else (False, True))
    assert "box" in plan.explain(problem)
