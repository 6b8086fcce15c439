"""Translate a kernel's TTIR to C.

void program(arguments, scratch, indices of the program)
"""

from __future__ import annotations

from pathlib import Path

from minidl.cpu import blocks, control, folds
from minidl.cpu.translator import Translator
from minidl.cpu.ttir import parse
from minidl.cpu.values import name

HANDLERS = {**blocks.HANDLERS, **control.HANDLERS, **folds.HANDLERS}


def translate(text: str, defers: bool = True) -> tuple[str, int]:
    """Return a kernel's TTIR as C, and the bytes of memory that a program needs. defers: tensors do not overlap, so
    that loads may need no memory (`deferral`).

    Raises NotImplementedError for an operation that is not supported, with its line in the kernel.
    """
    function = parse(text)
    translator = Translator(function, HANDLERS, defers)
    for i, (parameter, kind) in enumerate(function.parameters):
        source = f"args[{i}]"
        if kind.element in ("f32", "f64"):
            source = f"{kind.element}_bits({source})"
        translator.values[parameter] = name(translator.code.assign(source, kind.element), kind.element)
    translator.block(function.body)
    lines = "\n".join(translator.code.lines)
    source = _PROGRAM.format(products="\n".join(sorted(translator.products)), lines=lines)
    return PRELUDE.read_text() + source, translator.code.most


PRELUDE = Path(__file__).parent / "prelude.h"
_PROGRAM = """
{products}
static void program(const int64_t *args, char *scratch, int ix, int iy, int iz, int nx, int ny, int nz) {{
{lines}
}}
void run(const int64_t *args, char *scratch, const int64_t *grid, int64_t begin, int64_t end) {{
for (int64_t i = begin; i < end; i++)
program(args, scratch, i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1]), grid[0], grid[1], grid[2]);
}}
"""
