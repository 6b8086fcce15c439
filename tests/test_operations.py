"""Every operation against its record: values, gradients, special values, every tile, memory, refusals."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from minidl import ops
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.testing import assert_not_vacuous
from minidl.testing.specs import all_specs
from minidl.testing.specs.make import SeededMake
from tests import battery
from tests.battery import CHECKS, NAMES, pose
from tests.strategies import EXTENTS, made

SPECS = all_specs()


def functions_of(module):
    """Return the names of the operations that `module` defines itself: not its aliases of others."""
    values = {name: getattr(module, name) for name in module.__all__}
    return [n for n, value in values.items() if inspect.isfunction(value) and value.__module__ == module.__name__]


MOVES = {*ops.shape.__all__, "cat", "getitem", "stack"}  # operations that compute nothing: they launch no kernel

# Operations that have no record, each with what holds it.
WITHOUT_RECORD: dict[str, str] = {
    "dequantize": "tests/kernels/test_float8.py",
    "quantize": "tests/kernels/test_float8.py",
    # Made of operations that have records, or of integers.
    **dict.fromkeys(("ceil", "trunc", "round"), "the record of floor"),
    **dict.fromkeys(
        (
            "cos",
            "log1p",
            "expm1",
            "erf",
            "log2",
            "rsqrt",
        ),
        "the record of sin",
    ),
    "fmod": "the record of remainder",
    **dict.fromkeys((*functions_of(ops.composed), *functions_of(ops.margins)), "tests/ops/test_composed.py"),
    **dict.fromkeys(functions_of(ops.statistics), "tests/ops/test_statistics.py"),
    "embedding_bag": "tests/ops/test_patches.py",
    "fold": "tests/ops/test_patches.py",
    "multinomial": "tests/ops/test_random.py",
    "unfold": "tests/ops/test_patches.py",
    **dict.fromkeys(
        (
            "adaptive_avg_pool1d",
            "adaptive_max_pool1d",
            "addmm",
            "all",
            "allclose",
            "any",
            "argsort",
            "avg_pool1d",
            "bitwise_and",
            "bitwise_not",
            "bitwise_or",
            "bitwise_xor",
            "bmm",
            "chunk",
            "clip",
            "cosine_similarity",
            "count_nonzero",
            "cumprod",
            "diagonal",
            "dot",
            "einsum",
            "equal",
            "hstack",
            "index_add",
            "isclose",
            "isfinite",
            "isinf",
            "isnan",
            "kthvalue",
            "lerp",
            "log10",
            "logical_and",
            "logical_not",
            "logical_or",
            "logical_xor",
            "logsigmoid",
            "logsumexp",
            "masked_select",
            "max_pool1d",
            "meshgrid",
            "mm",
            "movedim",
            "msort",
            "mv",
            "narrow",
            "nonzero",
            "normalize",
            "one_hot",
            "outer",
            "pixel_unshuffle",
            "prod",
            "roll",
            "scatter",
            "scatter_add",
            "select",
            "softmin",
            "split",
            "std",
            "std_mean",
            "swapaxes",
            "tile",
            "trace",
            "tril",
            "triu",
            "unbind",
            "unflatten",
            "var",
            "var_mean",
            "vstack",
        ),
        "tests/ops/test_against_torch.py",
    ),
}
# Tile families that no operation of `ops` runs, each with the test that forces their tiles.
TESTED_ELSEWHERE = {
    "conv_batch": "tests/kernels/test_conv.py",
    "conv_batch_narrow": "tests/kernels/test_conv.py",
    "conv_box": "tests/kernels/test_conv.py",
    "conv_box_grad_weight": "tests/kernels/test_conv_volume.py",
    "conv_unfolded_grad_weight": "tests/kernels/test_conv.py",
    "conv_back": "tests/kernels/test_conv.py",
    "conv_batch_grad_weight": "tests/kernels/test_conv.py",
    "conv_split": "tests/kernels/test_conv.py",
    "conv_split_across": "tests/kernels/test_conv.py",
    "conv_split_box": "tests/kernels/test_conv.py",
    "conv_split_grad_weight": "tests/kernels/test_conv.py",
    "conv_taps": "tests/kernels/test_conv_columns.py",
    "conv_unshuffle": "tests/kernels/test_conv.py",
    "gemm_cut": "tests/kernels/test_gemm.py",
    "gemm_parts": "tests/kernels/test_gemm.py",
    "gemm_rows": "tests/kernels/test_gemm_shapes.py",
    "gemm_thin": "tests/kernels/test_gemm.py",
    "gemm_vector": "tests/kernels/test_gemm_shapes.py",
    "float8": "tests/kernels/test_float8.py",
    "norm_handed": "tests/kernels/test_fused_statistics.py",
    "images": "tests/kernels/test_images.py",
    "conv_fft": "tests/kernels/test_conv_fft.py",
    "conv_fft_product": "tests/kernels/test_conv_fft.py",
    "recurrent": "tests/kernels/test_recurrent.py",
    "recurrent_fused": "tests/kernels/test_recurrent.py",
    "recurrent_grad_fused": "tests/kernels/test_recurrent.py",
    "recurrent_grad": "tests/kernels/test_recurrent.py",
    "update": "tests/kernels/test_update.py",
    "update_measure": "tests/kernels/test_update.py",
    "update_prepare": "tests/kernels/test_update.py",
}


def each(keep=lambda spec: True, dtypes=battery.dtypes):
    """Parameters (spec, dtype) for the records that `keep` accepts."""
    return pytest.mark.parametrize(
        ("spec", "dtype"),
        [
            pytest.param(spec, dtype, id=f"{name}-{NAMES[dtype]}")
            for name, spec in SPECS.items()
            if keep(spec)
            for dtype in dtypes(spec)
        ],
    )


def holds(check, spec, dtype, share=1.0, **options):
    """Run a check on drawn cases: `share` of the profile's number of them, with other settings of Hypothesis."""
    chosen = CHECKS[check]

    @settings(max_examples=max(2, round(share * settings.default.max_examples)), **options)
    @given(made(lambda make: pose(spec, make, check), dtype, chosen.kinds, chosen.layouts))
    def run(problem):
        chosen.run(problem)

    run()


@each()
def test_forward(spec, dtype):
    holds("forward", spec, dtype)


@each(lambda spec: spec.differentiable)
def test_gradients(spec, dtype):
    holds("gradients", spec, dtype)


@each(lambda spec: spec.exact)
def test_integers_give_exactly_the_reference(spec, dtype):
    holds("exact", spec, dtype, 0.5)


@each(lambda spec: spec.specials)
def test_nan_and_infinity(spec, dtype):
    holds("specials", spec, dtype, 0.5)


@each(lambda spec: spec.differentiable and torch.float64 in spec.dtypes, lambda spec: [torch.float64])
def test_gradients_of_the_real_kernels(spec, dtype):
    holds("real gradients", spec, dtype, 0.25)


@each()
def test_fixed_examples(spec, dtype, pytestconfig):
    problems = battery.examples(spec, dtype)
    for problem in problems.values():
        battery.check_forward(problem)
        if not pytestconfig.getoption("--sanitize"):  # the same launches again
            battery.check_repeats(problem)
            if spec.name not in MOVES:
                battery.check_aliases(problem)
        if spec.differentiable:
            battery.check_gradients(problem)
    assert_not_vacuous(
        *(r for problem in problems.values() for r in problem.reference), what=f"examples of {spec.name}"
    )


def tiles_to_force():
    """Each tile of each dtype from the device's table; in the interpreter the tiles of all tables, once per size.

    There warps, stages and dtype change nothing about the indices, and its own large tiles are what every other test
    uses (cut to the shape), so that one example is enough for them. Operations that share a family share out the
    examples, another third to each tile.
    """
    seen = set()
    sharing = {family: [s for s in SPECS if family in SPECS[s].families] for family in launch.families()}
    for spec in SPECS.values():
        for family in spec.families:
            step, turn = min(3, len(sharing[family])), sharing[family].index(spec.name)
            for name in launch.table(family) if launch.INTERPRETED else [launch.target()]:
                for dtype in battery.dtypes(spec):
                    for tile in launch.tiles(family, name, dtype):
                        key = spec.name, family, *tile.sizes.items()
                        if launch.INTERPRETED and key in seen:
                            continue
                        seen.add(key)
                        turn += 1
                        some = slice(1) if name == "interpreted" else slice(turn % step, None, step)
                        label = f"{spec.name}-{family}-{name}-{NAMES[dtype]}-{tile}".replace(" ", ",")
                        yield pytest.param(spec, family, dtype, tile, some, id=label)


def launches(problem):
    """What forward and backward would launch, as an interpreter tells launches apart."""
    found = []

    def keep(kernel, grid, args, meta):
        numbers = [value for value in args if isinstance(value, int | float | tuple)]
        constants = [(name, str(value)) for name, value in meta.items() if name not in ("num_warps", "num_stages")]
        found.append((kernel, grid, numbers, constants))

    with launch.record(keep):
        battery.outputs_and_gradients(problem)
    return found


@pytest.mark.parametrize(("spec", "family", "dtype", "tile", "some"), list(tiles_to_force()))
def test_every_tile(spec, family, dtype, tile, some):
    for problem in list(battery.examples(spec, dtype).values())[some]:
        usual = launches(problem) if launch.INTERPRETED else None
        with launch.force(**{family: tile}):
            if launch.INTERPRETED and launches(problem) == usual:
                continue  # other kernels, or a tile that is cut to the same: as in test_fixed_examples
            battery.check_forward(problem)
            if spec.differentiable:
                battery.check_gradients(problem)


@pytest.mark.parametrize(
    ("spec", "bad"),
    [pytest.param(spec, bad, id=f"{name}-{i}") for name, spec in SPECS.items() for i, bad in enumerate(spec.bad)],
)
def test_bad_inputs_are_refused(spec, bad):
    make = SeededMake(0, torch.float32, default_device(), sizes=EXTENTS)
    if bad.values and not launch.INTERPRETED:
        _, outputs = battery.call(spec, bad.inputs(make))
        assert all(out.data.isnan().any() for out in outputs)
        return
    with pytest.raises(bad.error, match=bad.message):
        battery.call(spec, bad.inputs(make))


def public_operations():
    """Yield every public operation of minidl.ops, by name; `creation` has none, as it takes no Tensor."""
    for info in pkgutil.iter_modules(ops.__path__):
        if info.name == "creation":
            continue
        module = importlib.import_module(f"minidl.ops.{info.name}")
        for name in functions_of(module):
            yield name, getattr(module, name)


def test_every_operation_has_a_spec():
    recorded = {spec.op for spec in SPECS.values()} | set(SPECS)
    missing = {n for n, op in public_operations() if op not in recorded and n not in recorded} - set(WITHOUT_RECORD)
    assert not missing, f"add specs to minidl/testing/specs for {sorted(missing)}"


def test_every_exception_is_needed():
    names = {name for name, _ in public_operations()}
    assert set(WITHOUT_RECORD) <= names - set(SPECS)


def test_every_tile_family_is_forced():
    forced = {family for spec in SPECS.values() for family in spec.families}
    assert set(launch.families()) - forced == set(TESTED_ELSEWHERE)
    for family, path in TESTED_ELSEWHERE.items():
        text = (Path(__file__).parent.parent / path).read_text(encoding="utf-8")
        assert f"{family}=" in text or f'"{family}"' in text


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_are_complete(spec):
    assert spec.bad, "name at least one input that is refused"
    assert spec.grad_bound is not None or not spec.differentiable
    assert spec.families or spec.name in MOVES, "name the tile families that the operation runs"


def test_what_is_no_tensor_is_told_with_what_to_do():
    x = Tensor(torch.ones(2, 2).to(default_device()))
    calls = {
        "relu: input is of type list": lambda: ops.relu([1.0]),
        "conv2d: input is of type list": lambda: ops.conv2d([[1.0]], x),
        "conv2d: weight is of type ndarray": lambda: ops.conv2d(x, weight=np.ones(3)),
        "linear: bias is of type float": lambda: ops.linear(x, x, 1.0),
        "matmul: other is of type list": lambda: x @ [1.0],
        "where: condition is of type list": lambda: ops.where([True], x, x),
        "reshape: input is of type NoneType": lambda: ops.reshape(None, 3),
        r"stack: tensors\[1\] is of type list": lambda: ops.stack([x, [1.0]]),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message + r", expected a Tensor; use minidl\.as_tensor"):
            call()
    with pytest.raises(TypeError, match="cat: tensors is of type Tensor, expected a list of Tensors"):
        ops.cat(x)
    assert ops.linear(x, x, bias=None).shape == (2, 2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        ops.conv2d(x)
