"""Kernels as TTIR, and a function that runs TTIR on the CPU."""

import ctypes
import textwrap

import torch

from minidl.cpu import build, run, translate


def function(arguments, body):
    """Return TTIR with one function."""
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    return f"module {{\n  tt.func public @k({arguments}) {{\n{lines}    tt.return\n  }}\n}}\n"


def launch(text, grid, *args):
    """Run TTIR on a grid with tensors and integers."""
    source, scratch = translate.translate(text)
    library = build.library(text, source)
    address = ctypes.cast(library.run, ctypes.c_void_p).value
    kinds = tuple("pointer" if isinstance(value, torch.Tensor) else "integer" for value in args)
    run.Compiled(library, b"k", address, scratch, kinds).bind(grid, args).run()


ADD = function(
    "%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %n: i32",
    """
    %c = arith.constant 64 : i32
    %pid = tt.get_program_id x : i32
    %start = arith.muli %pid, %c : i32
    %r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
    %s = tt.splat %start : i32 -> tensor<64xi32>
    %o = arith.addi %s, %r : tensor<64xi32>
    %nn = tt.splat %n : i32 -> tensor<64xi32>
    %m = arith.cmpi slt, %o, %nn : tensor<64xi32>
    %xs = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %px = tt.addptr %xs, %o : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %ys = tt.splat %y : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %py = tt.addptr %ys, %o : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %one = arith.constant dense<1.000000e+00> : tensor<64xf32>
    %bx = tt.load %px, %m : tensor<64x!tt.ptr<f32>>
    %by = arith.addf %bx, %one : tensor<64xf32>
    tt.store %py, %by, %m : tensor<64x!tt.ptr<f32>>
    """,
)
