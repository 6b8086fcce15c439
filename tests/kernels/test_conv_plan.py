"""Plans of convolutions: what is chosen where, once per problem, and told; a form is a module and a line of FORMS."""

import contextlib
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from minidl.kernels import conv
from minidl.kernels.conv import boxed, forms, pixel_tiled, plan
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import CORRELATIONS, FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem, Unsupported
from minidl.kernels.conv.rewrites.taps import Taps
from minidl.runtime import launch, records
from minidl.runtime.cost_model import devices, selection
from minidl.tensors import default_device
from minidl.testing.cases.convolutions import BENCHMARK
from minidl.tools.doctor.jobs import SHARED_LIMITS

pytestmark = pytest.mark.usefixtures("fresh_plans", "constants_of_an_h100")


@pytest.fixture
def constants_of_an_h100():
    """What is chosen does not depend on the GPU that is in use; without one these are the usual ones."""
    with (
        contextlib.nullcontext()
        if launch.INTERPRETED
        else selection.use(devices.of_file(devices.FOLDER / "nvidia-h100.json"))
    ):
        yield


def layer(N, C, M, size, kernel, padding=0, stride=1, direction=FORWARD, **more):
    """A layer on an H200; back, C channels of size x size are read through a transposed convolution to M channels."""
    dtype = more.pop("dtype", torch.float16)
    if direction == TRANSPOSED:
        axis = Axis((size - 1) * stride - 2 * padding + kernel + (stride - 1), kernel, size, stride, padding, 1)
        geometry = Geometry(axis, axis)
        more = {"strides": (kernel * kernel * M, kernel * kernel, kernel, 1), **more}
    else:
        geometry = Geometry.of(
            (size, size), (kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2, (1, 1), more.pop("groups", 1)
        )
    more = {"target": "sm_90", "processors": 132, **more}
    return Problem(direction, geometry, N, C, M, dtype, more.pop("precision", "ieee"), **more)


_FORMS = (
    "banded", "banded", "banded", "pair, boxed", "paired_box", "batch_tiled", "batch_tiled", "batch_tiled", "boxed",
)  # fmt: skip
LAYERS = {
    **{name: (case[:6], form) for (name, case), form in zip(BENCHMARK.items(), _FORMS, strict=True)},
    "64@56, 8 images": ((8, 64, 64, 56, 3, 1), "boxed"),
    "24->20": ((64, 24, 20, 9, 7), "pixel_tiled"),
}
GRADIENTS = {
    "1->12 7x7 72x72": "banded_grad_weight", "12->24 7x7 33x33": "banded_grad_weight",
    "1->32 5x5 28x28": "banded_grad_weight",
    "64@56, 8 images": "pixel_grad_weight", "24->20": "pixel_grad_weight",
    "32->64 5x5 12x12": "unfolded_grad_weight",
}  # fmt: skip
BOTTLENECKS = {
    "64->256@56": (64, 64, 256, 56), "256->64@56": (64, 256, 64, 56), "512->128@28": (64, 512, 128, 28),
    "1024->256@14": (64, 1024, 256, 14), "2048->512@7": (64, 2048, 512, 7), "one image": (1, 2048, 512, 7),
}  # fmt: skip
FEW_IMAGES = {
    (2, 64, 192, 27, 5, 2): "boxed", (1, 64, 64, 56, 3, 1): "boxed", (1, 128, 128, 28, 3, 1): "boxed",
    (1, 64, 256, 56, 1): "boxed", (1, 128, 512, 28, 1): "boxed", (1, 512, 512, 7, 3, 1): "pixel_tiled",
    (1, 256, 256, 14, 3, 1): "pixel_tiled",
}  # fmt: skip
BACK = {
    (1000, 512, 256, 4): "batch_back", (1000, 256, 128, 8): "batch_back", (1000, 128, 64, 16): "batch_back",
    (1000, 64, 3, 32): "few_outputs",
}  # fmt: skip


def module(problem):
    """Return the modules of a plan's label: the last words of its steps."""
    *rewrites, form = plan.plan(problem).label.split(", ")
    return ", ".join([*rewrites, form.rpartition(": ")[2]])


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_of_the_benchmark(name):
    shape, expected = LAYERS[name]
    assert module(layer(*shape)) == expected
    assert module(layer(*shape, direction=GRAD_WEIGHT)) == GRADIENTS.get(name, "batch_grad_weight")


# Images, channels in and out, pixels a side, kernel, padding, stride.
WEIGHTS = {
    (64, 256, 256, 56, 3, 1): "batch", (16, 128, 256, 112, 2, 0, 2): "pixel", (42, 144, 48, 340, 7, 3): "unfolded",
    (80, 13, 6, 90, 5, 2): "fill", (264, 11, 1, 265, 3, 1): "banded", (18, 3, 64, 224, 3, 1): "pixel",
}  # fmt: skip


def test_what_drawn_shapes_of_an_h200_changed():
    """`benchmarks/notes.md`: short strided runs, odd results in boxes, 40 channels back."""
    strided = 128, 128, 56, 3, 1, 2
    assert [module(layer(N, *strided)) for N in (53, 118)] == ["pixel_tiled", "batch_tiled"]
    assert module(layer(228, 32, 939, 3, 1)) != "boxed"
    several = layer(17, 1, 2, 185, 3, groups=96, direction=GRAD_WEIGHT)
    assert plan.plan(several).name == "fill"
    (back,) = plan.plan(layer(340, 240, 40, 28, 1, direction=TRANSPOSED)).parts
    assert back.name == "pixel"


@pytest.mark.parametrize(("shape", "expected"), WEIGHTS.items(), ids=map(str, WEIGHTS))
def test_gradients_of_weights_take_what_was_fastest(shape, expected):
    problem = layer(*shape, direction=GRAD_WEIGHT)
    assert plan.plan(problem).name == expected or module(problem) == f"{expected}_grad_weight"


def test_groups_of_32_channels_are_read_as_pixels():
    """ResNeXt at 7x7: 9 us on an H200, filled runs 20. Filled weight gradients were as fast or faster."""
    images = layer(43, 32, 32, 7, 3, 1, groups=32)
    assert module(images) == "pixel_tiled"
    assert plan.plan(images._replace(direction=GRAD_WEIGHT)).parts


def test_few_channels_that_are_read_in_twos_are_laid_out_anew():
    """872->9 4x4 back, 393 images of 65x65: 12 ms on an H200, estimated at 3. One step waits for nothing."""
    for N, C, M, size, kernel in ((393, 9, 872, 62, 4), (31, 11, 936, 92, 3), (59, 10, 235, 16, 3)):
        assert plan.plan(layer(N, C, M, size, kernel, kernel // 2)).parts
    assert module(layer(64, 3, 64, 224, 3, 1)) == "pixel_tiled"
    assert module(layer(29, 1, 424, 56, 5)) == "pixel_tiled"


@pytest.mark.parametrize(("shape", "expected"), FEW_IMAGES.items(), ids=map(str, FEW_IMAGES))
def test_programs_that_are_alone_take_what_was_fastest(shape, expected):
    """Of a few images, where fewer programs run than there are multiprocessors; times in `benchmarks/notes.md`."""
    assert module(layer(*shape)) == expected


def test_few_outputs_wait_for_the_cache():
    """11x11 stride 4, 64->3 back to 2 images of 224x224: 7.6 us on an H200, estimated at 21.6 with waits for memory."""
    back = layer(2, 64, 3, 55, 11, 2, 4, direction=TRANSPOSED)
    assert module(back) == "few_outputs"
    assert plan.plan(back).microseconds < 12


@pytest.mark.parametrize(("direction", "copies"), [(FORWARD, True), (TRANSPOSED, False)])
def test_sums_of_taps_count_the_copy_of_the_weights(direction, copies):
    """Back, weights that lie as networks keep them are read where they are."""
    problem = layer(1, 512, 512, 7, 3, 1, direction=direction)
    if direction == TRANSPOSED:
        problem = problem._replace(strides=(9 * 512, 1, 3 * 512, 512))
    more = problem._replace(dtype=torch.bfloat16) if copies else problem._replace(strides=(9 * 512, 9, 3, 1))
    taps = Taps()
    counted, other = (taps.cost(each, taps.others(each), (4.0,)) - 4.0 for each in (problem, more))
    assert (counted == other) == copies
    assert counted > 5.0 if copies else other - counted > 3.0


@pytest.mark.parametrize(("shape", "expected"), BACK.items(), ids=BACK.values())
def test_the_layers_of_generators(shape, expected):
    assert module(layer(*shape, 5, 2, 2, direction=TRANSPOSED)) == expected


@pytest.mark.parametrize("shape", BOTTLENECKS.values(), ids=BOTTLENECKS)
def test_kernels_of_one_tap_are_products(shape):
    for direction in (FORWARD, TRANSPOSED):
        made = plan.plan(layer(*shape, 1, direction=direction))
        assert {part.form.__name__.rpartition(".")[2] for part in getattr(made, "parts", (made,))} == {"product"}


@pytest.mark.parametrize(("name", "expected"), [("1->32 5x5 28x28", "banded")])
def test_the_pooled_layers_of_the_benchmark(name, expected):
    assert module(layer(*LAYERS[name][0], pool="avg", bias=True, act="relu")) == expected


def test_a_product_is_pooled_afterwards():
    pooled = plan.plan(layer(64, 64, 256, 56, 1, pool="max"))
    assert [part.form.NAME for part in pooled.parts] == ["product"]


def test_estimates_are_near_what_was_measured():
    """Microseconds of `benchmarks/results/nvidia-h200.json`, float16."""
    measured = {
        "3x3 64@56": 69.5, "3x3 128@28": 47.0, "3x3 256@14": 43.4, "3x3 512@7": 43.6, "3x3 256@56": 370.0,
        "32->64 5x5 12x12": 135.2,
    }  # fmt: skip
    for name, took in measured.items():
        estimated = plan.plan(layer(*LAYERS[name][0])).microseconds
        assert abs(estimated / took - 1) < 0.15, name


@pytest.mark.parametrize("direction", [FORWARD, TRANSPOSED])
def test_no_images_have_a_plan(direction):
    assert plan.plan(layer(0, 8, 8, 1, 3, 1, 2, direction)).microseconds >= 0


@pytest.mark.skipif(not launch.INTERPRETED, reason="the constants are those of an H100 beside a GPU")
def test_the_interpreter_takes_boxes_then_bands_then_pixels():
    for shape, expected in (
        ((128, 32, 32, 8, 3, 1), "boxed"), ((2, 3, 6, 19, 3), "banded"), ((2, 40, 20, 19, 7), "pixel_tiled"),
        ((128, 64, 64, 8, 3, 1, 2), "pixel_tiled"),
    ):  # fmt: skip
        assert module(layer(*shape, target="interpreted", processors=1)) == expected


@pytest.mark.skipif(not launch.INTERPRETED, reason="compiled kernels take bfloat16")
def test_the_interpreter_refuses_bfloat16_in_words():
    x, w = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16 is not supported on the CPU"):
        conv.forward(x, w, Geometry.of((4, 4), (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)))


def test_a_problem_is_hashable_and_its_plan_is_made_once():
    first, second = (layer(128, 64, 64, 56, 3, 1) for _ in range(2))
    assert first is not second
    assert hash(first) == hash(second)
    assert plan.plan(first) is plan.plan(second)
    assert plan.plan(first._replace(N=64)) is not plan.plan(first)
    assert plan.plan.cache_info().maxsize is not None


def test_a_second_call_asks_no_form(monkeypatch):
    x, w = torch.zeros(2, 3, 8, 20, device=default_device()), torch.zeros(6, 3, 3, 3, device=default_device())
    geometry = Geometry.of((8, 20), (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    y, _ = conv.forward(x, w, geometry)
    conv.grad_input(y, w, geometry)
    conv.grad_weight(x, y, geometry)
    monkeypatch.setattr(plan, "candidates", lambda problem: pytest.fail("planned again"))
    conv.forward(x, w, geometry)
    conv.grad_input(y, w, geometry)
    conv.grad_weight(x, y, geometry)


def test_another_tile_makes_another_plan():
    problem = layer(128, 64, 64, 56, 3, 1, form="batch")
    before = plan.plan(problem)
    tile = launch.tiles("conv_batch", "sm_90", torch.float16)[0]
    small = launch.Tile({**tile.sizes, "BLOCK_M": 64, "PER_PROCESSOR": 0}, 4, 2)
    with launch.force(conv_batch=small):
        assert plan.plan(problem).prepared.meta["tile"].BLOCK_M == 64
    assert plan.plan(problem).prepared.meta == before.prepared.meta
    assert before.prepared.meta["tile"].BLOCK_M == 128


@pytest.mark.parametrize("form", conv.FORMS)
def test_every_form_can_be_asked_for(form):
    problems = [
        layer(128, 32, 32, 12, 5), layer(128, 3, 16, 20, 3), layer(128, 32, 4, 8, 5, 2, 2, direction=TRANSPOSED),
        layer(128, 32, 32, 12, 5, direction=GRAD_WEIGHT), layer(128, 32, 32, 12, 1),
        layer(128, 1, 1, 12, 3, groups=64), layer(8, 64, 64, 12, 3, dtype=torch.float32, precision="tf32x3"),
    ]  # fmt: skip
    patches = Axis(16, 2, 8, 2, 0, 1)
    problems.append(layer(128, 32, 4, 8, 2, 0, 2, direction=TRANSPOSED)._replace(geometry=Geometry(patches, patches)))
    found = []
    for problem in problems:
        try:
            found.append(plan.plan(problem._replace(form=form)))
        except conv.UnableError as error:
            assert f"the {form} form does not support this shape; use one of: " in str(error)  # noqa: PT017
    assert found
    assert {name for made in found for name in made.name.split("+")} == {form}


def test_only_what_is_asked_for_is_a_transform():
    for shape in ((8, 64, 64, 56, 31, 15), (8, 512, 512, 56, 15, 7)):
        problem = layer(*shape, dtype=torch.float32)
        assert plan.plan(problem).name != "fft"
        assert plan.plan(problem._replace(form="fft")).name == "fft"


def test_explain_names_every_form_and_the_one_taken():
    problem = layer(128, 64, 64, 56, 3, 1)
    text = conv.explain(problem)
    assert "convolution 3x3, 128 images of 64x56x56 to 64x56x56" in text
    for form in forms.FORMS:
        named = f"{form.NAME}: {form.__name__.rpartition('.')[2]}" in text
        assert named == (FORWARD in form.DIRECTIONS)
    (taken,) = [line for line in text.splitlines() if line.endswith("taken")]
    assert "pair: paired_box" in taken
    assert f"{plan.plan(problem).microseconds:.1f} us" in taken
    assert "unable: too many channels for two pixels in a band" in text


def test_explain_tells_of_parts():
    back = conv.explain(layer(8, 64, 64, 16, 5, 2, 2, direction=TRANSPOSED))
    assert "4 phases by " in back
    pooled = conv.explain(layer(128, 64, 64, 56, 3, 1, pool="max"))
    assert "pair: paired_box, then a pool" in pooled
    assert "box: boxed                         unable: a pool" in pooled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "backward"}, "got 'backward' of .*, expected one of forward, transposed, grad_weight, phase"),
        ({"dtype": torch.int64}, "torch.int64 .* expected .* a floating-point dtype"),
        ({"target": "sm_70"}, "'sm_70', expected .* one of interpreted, sm_80, sm_90"),
        ({"N": -1}, "must be at least 1"),
        ({"C": 0}, "must be at least 1"),
        ({"processors": 0}, "must be at least 1"),
    ],
)
def test_explain_refuses_what_is_no_problem(change, message):
    with pytest.raises(ValueError, match=f"explain: .*{message}"):
        conv.explain(layer(128, 64, 64, 56, 3, 1)._replace(**change))


@pytest.mark.parametrize("wanted", ["1", None])
def test_the_log_has_each_problem_once(wanted, monkeypatch, caplog):
    if wanted is None:
        monkeypatch.delenv("MINIDL_EXPLAIN", raising=False)
    else:
        monkeypatch.setenv("MINIDL_EXPLAIN", wanted)
    problem = layer(8, 64, 64, 16, 5, 2, 2, direction=TRANSPOSED)
    with caplog.at_level(logging.WARNING, "minidl"):
        plan.plan(problem)
        plan.plan(problem)
    assert [record.getMessage() for record in caplog.records] == [conv.explain(problem)] * (wanted is not None)


def test_a_form_is_a_module_and_a_line(monkeypatch):
    """One that takes images of one pixel, for nothing."""
    ran = []

    def able(problem):
        return problem.read == (1, 1) or Unsupported("more than a pixel")

    def run(prepared, tensors):
        ran.append(prepared)
        pixel_tiled.run(prepared, tensors)

    form = type("Form", (SimpleNamespace,), {"__hash__": object.__hash__})(
        __name__="minidl.kernels.conv.dot", NAME="dot", DIRECTIONS=CORRELATIONS, FAMILIES=(), able=able,
        estimate=lambda problem: 0.0, prepare=pixel_tiled.prepare, run=run,
    )  # fmt: skip
    monkeypatch.setattr(forms, "FORMS", (*forms.FORMS, form))
    x, w = torch.ones(2, 8, 1, 1, device=default_device()), torch.ones(4, 8, 1, 1, device=default_device())
    geometry = Geometry.of((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    assert torch.equal(conv.forward(x, w, geometry)[0], torch.full((2, 4, 1, 1), 8.0, device=x.device))
    assert torch.equal(conv.grad_input(x[:, :4], w, geometry), torch.full((2, 8, 1, 1), 4.0, device=x.device))
    assert len(ran) == 2
    assert "dot: dot                                   0.0 us  taken" in conv.explain(
        layer(2, 8, 4, 1, 1, target="interpreted")
    )
    with pytest.raises(conv.UnableError, match="the dot form does not support this shape"):
        plan.plan(layer(2, 8, 4, 3, 3, form="dot"))


def test_the_cheapest_is_taken(monkeypatch):
    problem = layer(128, 64, 64, 56, 3, 1)
    monkeypatch.setattr(boxed, "estimate", lambda problem: 1.0)
    assert plan.plan(problem).name == "box"


SUMS = ("BLOCK_K", "PRECISION", "ACC", "KP", "NP", "G", "GH", "GW", "W_IN_PLACE", "FLAT")


@pytest.mark.parametrize("target", ["sm_90", "sm_80", *(["interpreted"] if launch.INTERPRETED else [])])
def test_a_blind_plan_does_not_see_the_number_of_images(target):
    """Form, tile and the order of a sum are those of any number; without being blind some differ."""
    differs = False
    for (C, M, direction), batch_invariant in itertools.product(
        [(64, 64, FORWARD), (1, 12, FORWARD), (128, 64, TRANSPOSED), (64, 3, TRANSPOSED), (40, 20, FORWARD)],
        (True, False),
    ):
        seen = set()
        for N in (1, 8, 31, 63, 64, 65, 300):
            stride = 2 if direction == TRANSPOSED else 1
            made = plan.plan(
                layer(N, C, M, 16, 5, 2, stride, direction=direction, batch_invariant=batch_invariant, target=target)
            )
            seen.add((made.name, *map(sums, launches(made))))
        assert len(seen) == 1 or not batch_invariant
        differs |= len(seen) > 1
    assert differs == (target != "interpreted")


@pytest.mark.parametrize("shape", [(1024, 64, 4, 3, 1), (2048, 1000, 4, 4, 0), (512, 128, 4, 4, 0)])
def test_a_blind_plan_adds_its_shares_in_one_order(shape):
    """Of few values many shares are added several at a time, which is another order."""
    C, M, size, kernel, padding = shape
    for batch_invariant in (True, False):
        made = [
            plan.plan(layer(N, C, M, size, kernel, padding, batch_invariant=batch_invariant, form="pixel"))
            for N in (1, 16, 128, 512)
        ]
        seen = {one.prepared.sum.meta["tile"].BLOCK_S for one in made if one.prepared.sum}
        assert (seen == {1}) if batch_invariant else (16 in seen)


def launches(made):
    """The plans of a plan that launch something."""
    return [one for part in getattr(made, "parts", ()) for one in launches(part)] or [made]


def sums(made):
    found = made.prepared
    while not isinstance(found, launch.Prepared):
        found = next(getattr(found, name) for name in ("launch", "back", "product") if getattr(found, name, None))
    return found.kernel.__name__, *(records.fields(found.meta).get(name) for name in SUMS)


def test_blind_results_are_those_of_any_plan():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (5, 32, 6, 6), generator=generator).float().to(default_device())
    w = torch.randint(-3, 4, (32, 32, 3, 3), generator=generator).float().to(default_device())
    geometry = Geometry.of((6, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    expected, _ = conv.forward(x, w, geometry)
    for first in (0, 3):
        y, _ = conv.forward(x[first : first + 1], w, geometry, batch_invariant=True)
        assert torch.equal(y, expected[first : first + 1])
    back, _ = conv.transposed(x, w, geometry, batch_invariant=True)
    assert torch.equal(back, conv.grad_input(x, w, geometry))


@pytest.mark.parametrize("channels", [32, 64, 128])
def test_tiles_of_boxes_have_the_shared_memory_for_a_sum(channels):
    """Where a tile has one step, a tile of what is added is read ahead beside the boxes of all stages."""
    for tile in launch.tiles("conv_box", "sm_90", torch.float16):
        with launch.force(conv_box=tile):
            meta = boxed.prepare(layer(256, channels, 256, 56, 1, added=True, act="relu")).meta
        M, K, pixels = meta["tile"].BLOCK_M, meta["tile"].BLOCK_K, meta["tile"].BLOCK_N
        added = M * pixels if channels == K and meta["tile"].PER_PROCESSOR else 0
        assert 2 * (meta["num_stages"] * (M + pixels) * K + added) <= SHARED_LIMITS[90] - 64, tile
