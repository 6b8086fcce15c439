import pytest

from minidl.cpu import ttir
from tests.cpu import kernels

NESTED = (
    kernels.function(
        '%x: !tt.ptr<f16> {tt.divisibility = 16 : i32} loc("x"(#loc)), %n: i32',
        """
    %c0 = arith.constant 0 : i32 loc(#loc1)
    %c1 = arith.constant 1 : i32
    %zero = arith.constant dense<0.000000e+00> : tensor<4x8xf32>
    %a:2 = scf.for %i = %c0 to %n step %c1 iter_args(%b = %zero, %k = %c0) -> (tensor<4x8xf32>, i32)  : i32 {
      %s = "tt.reduce"(%b) <{axis = 1 : i32}> ({
      ^bb0(%l: f32 loc(callsite(#loc at #loc1)), %r: f32 loc(#loc)):
        %m = arith.addf %l, %r : f32
        tt.reduce.return %m : f32
      }) : (tensor<4x8xf32>) -> tensor<4xf32> loc(#loc1)
      %p = arith.cmpi slt, %k, %n : i32
      %q = scf.if %p -> (i32) {
        scf.yield %c0 : i32
      } else {
        scf.yield %c1 : i32
      }
      scf.yield %b, %q : tensor<4x8xf32>, i32
    } loc(#loc2)
    """,
    )
    + '#loc = loc("kernel.py":1:0)\n#loc1 = loc("kernel.py":7:4)\n#loc2 = loc(callsite(#loc1 at #loc))\n'
)


def test_regions_arguments_types_and_lines():
    function = ttir.parse(NESTED)
    assert function.name == "k"
    assert function.parameters == [("%x", ttir.Type("ptr<f16>")), ("%n", ttir.Type("i32"))]
    assert function.parameters[0][1].element[4:-1] == "f16"
    *_, loop, _ = function.body
    assert loop.results == ["%a#0", "%a#1"]
    assert loop.result_types == [ttir.Type("f32", (4, 8)), ttir.Type("i32")]
    reduction, _, branch, _ = loop.regions[0].operations
    assert reduction.integer("axis") == 1
    assert reduction.regions[0].arguments == [("%l", ttir.Type("f32")), ("%r", ttir.Type("f32"))]
    assert [each.name for each in reduction.regions[0].operations] == ["arith.addf", "tt.reduce.return"]
    assert reduction.result_types == [ttir.Type("f32", (4,))]
    assert [len(region.operations) for region in branch.regions] == [1, 1]
    assert function.line_of(function.body[0]) == function.line_of(loop) == "kernel.py:7"
    assert function.line_of(function.body[1]) == ""


@pytest.mark.parametrize("text", ["", "module {\n}\n", kernels.ADD + kernels.ADD])
def test_a_module_without_one_function_is_refused(text):
    with pytest.raises(ValueError, match=r"no tt.func|not inlined"):
        ttir.parse(text)


def test_a_line_that_is_no_operation_is_refused():
    with pytest.raises(ValueError, match="cannot read the operation '!!'"):
        ttir.parse(kernels.function("%n: i32", "\n!!\n"))
