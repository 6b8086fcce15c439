import pytest
import torch

from minidl.cpu import build, translate, ttir
from minidl.cpu.translator import Translator
from tests.cpu import kernels

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_nothing_outside_the_mask_is_written(n):
    x, y = torch.randn(1100), torch.full((1100,), -1.0)
    kernels.launch(kernels.ADD, (18,), x, y, n)
    assert torch.equal(y[:n], x[:n] + 1)
    assert (y[n:] == -1).all()


REDUCE = kernels.function(
    "%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %s: i32",
    """
    %r = tt.make_range {{end = 8 : i32, start = 0 : i32}} : tensor<8xi32>
    %c = tt.make_range {{end = 16 : i32, start = 0 : i32}} : tensor<16xi32>
    %r1 = tt.expand_dims %r {{axis = 1 : i32}} : tensor<8xi32> -> tensor<8x1xi32>
    %c1 = tt.expand_dims %c {{axis = 0 : i32}} : tensor<16xi32> -> tensor<1x16xi32>
    %ss = tt.splat %s : i32 -> tensor<8x1xi32>
    %rs = arith.muli %r1, %ss : tensor<8x1xi32>
    %rb = tt.broadcast %rs : tensor<8x1xi32> -> tensor<8x16xi32>
    %cb = tt.broadcast %c1 : tensor<1x16xi32> -> tensor<8x16xi32>
    %o = arith.addi %rb, %cb : tensor<8x16xi32>
    %xs = tt.splat %x : !tt.ptr<f32> -> tensor<8x16x!tt.ptr<f32>>
    %px = tt.addptr %xs, %o : tensor<8x16x!tt.ptr<f32>>, tensor<8x16xi32>
    %b = tt.load %px : tensor<8x16x!tt.ptr<f32>>
    %t = tt.trans %b {{order = array<i32: 1, 0>}} : tensor<8x16xf32> -> tensor<16x8xf32>
    %m = "tt.reduce"(%t) <{{axis = {axis} : i32}}> ({{
    ^bb0(%l: f32, %q: f32):
      %e = arith.{operation} %l, %q : f32
      tt.reduce.return %e : f32
    }}) : (tensor<16x8xf32>) -> tensor<{n}xf32>
    %k = tt.make_range {{end = {n} : i32, start = 0 : i32}} : tensor<{n}xi32>
    %ys = tt.splat %y : !tt.ptr<f32> -> tensor<{n}x!tt.ptr<f32>>
    %py = tt.addptr %ys, %k : tensor<{n}x!tt.ptr<f32>>, tensor<{n}xi32>
    tt.store %py, %m : tensor<{n}x!tt.ptr<f32>>
    """,
)


def filled(text, **values):
    text = text.replace("{{", "{").replace("}}", "}")
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


@pytest.mark.parametrize(("axis", "n"), [(0, 8), (1, 16)])
@pytest.mark.parametrize("operation", ["maxnumf", "maximumf", "minnumf", "minimumf", "addf"])
def test_reductions_of_a_transposed_strided_block(axis, n, operation):
    x, y = torch.randint(-9, 9, (8, 20)).float(), torch.empty(n)
    if operation != "addf":
        x[3, 5] = x[2, 0] = float("nan")
    text = filled(REDUCE, axis=axis, n=n, operation=operation)
    kernels.launch(text, (1,), x, y, 20)
    block = x[:, :16].T
    least = operation.startswith("min")
    if operation == "addf":
        expected = block.sum(axis)
    elif operation.endswith("numf"):  # NaN is left out
        expected = block.nan_to_num(nan=99.0 if least else -99.0).aminmax(dim=axis)[0 if least else 1]
    else:
        expected = block.aminmax(dim=axis)[0 if least else 1]
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


GATHER = """
    %c = arith.constant dense<7> : tensor<{n}xi32>
    %i = arith.xori %k, %c : tensor<{n}xi32>
    %g = tt.gather %m[%i] {{axis = 0 : i32}} : (tensor<{n}xf32>, tensor<{n}xi32>) -> tensor<{n}xf32>
    tt.store %py, %g :"""


@pytest.mark.parametrize(("axis", "n"), [(0, 8), (1, 16)])
def test_elements_gathered_from_a_strided_block(axis, n):
    """Each eight in reverse; the results of a reduction along the last dimension lie apart."""
    x, y = torch.randint(-9, 9, (8, 20)).float(), torch.empty(n)
    text = REDUCE.replace("    tt.store %py, %m :", GATHER.strip("\n"))
    kernels.launch(filled(text, axis=axis, n=n, operation="addf"), (1,), x, y, 20)
    assert torch.equal(y, x[:, :16].T.sum(axis).view(-1, 8).flip(1).reshape(-1))


def test_several_dimensions_are_not_gathered():
    text = kernels.function(
        "%x: i32",
        """
        %0 = tt.splat %x : i32 -> tensor<2x2xi32>
        %1 = tt.gather %0[%0] {axis = 0 : i32} : (tensor<2x2xi32>, tensor<2x2xi32>) -> tensor<2x2xi32>
        """,
    )
    with pytest.raises(NotImplementedError, match=r"tt\.gather of several dimensions is not supported on the CPU"):
        translate.translate(text)


def test_an_operation_without_a_translation_is_named_with_its_line():
    text = kernels.function(
        "%x: !tt.ptr<i32>, %n: i32",
        """
        %true = arith.constant true
        %0 = tt.atomic_rmw add, acq_rel, gpu, %x, %n, %true : (!tt.ptr<i32>, i32, i1) -> i32 loc(#loc1)
        """,
    )
    text += '#loc1 = loc("kernel.py":7:4)\n'
    with pytest.raises(NotImplementedError, match=r"^kernel.py:7: tt.atomic_rmw is not supported on the CPU$"):
        translate.translate(text)


LOADS = """
    %r = tt.make_range {{end = 64 : i32, start = 0 : i32}} : tensor<64xi32>
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %xs = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %px = tt.addptr %xs, %r : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %ys = tt.splat %y : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %py = tt.addptr %ys, %r : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    {body}
    """
TENSOR = "tensor<64x!tt.ptr<f32>>"
LOOP = f"""%e:2 = scf.for %k = %c0 to %n step %c1 iter_args(%a = %px, %b = %py) -> ({TENSOR}, {TENSOR})  : i32 {{
      %v = tt.load %a : {TENSOR}
      tt.store TO, %v : {TENSOR}
      scf.yield NEXT : {TENSOR}, {TENSOR}
    }}"""


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"%v = tt.load %px : {TENSOR}\n    tt.store %py, %v : {TENSOR}", 1),
        (f"%v = tt.load %px : {TENSOR}\n    tt.store %px, %v : {TENSOR}", 0),
        (f"%v = tt.load %px : {TENSOR}\n    tt.store %py, %v : {TENSOR}\n    tt.store %px, %v : {TENSOR}", 0),
        (LOOP.replace("TO", "%b").replace("NEXT", "%a, %b"), 1),
        (LOOP.replace("TO", "%px").replace("NEXT", "%a, %b"), 0),
        (LOOP.replace("TO", "%b").replace("NEXT", "%b, %a"), 0),
        (LOOP.replace("TO", "%py").replace("NEXT", "%a, %b"), 1),
        (
            LOOP.replace("TO", "%b").replace("NEXT", "%a, %b")
            + "\n    "
            + LOOP.replace("TO", "%b")
            .replace("NEXT", "%a, %b")
            .replace("%a = %px, %b = %py", "%a = %py, %b = %px")
            .replace("%e", "%f"),
            2,
        ),
    ],
    ids=["other", "same", "twice", "in a loop", "same in a loop", "exchanged", "from outside", "one name twice"],
)
def test_a_load_needs_no_memory_if_another_parameter_is_written(body, count):
    text = kernels.function("%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i32", LOADS.format(body=body))
    translator = Translator(ttir.parse(text), translate.HANDLERS)
    assert len(translator.deferred) == count
    assert not Translator(ttir.parse(text), translate.HANDLERS, defers=False).deferred
