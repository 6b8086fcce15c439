"""Matrix products c[M, N] += a[M, K] b[K, N] in C, whose inner tiles of c stay in vector registers."""

from __future__ import annotations

from collections.abc import Iterator

ROWS, VECTORS = 8, 2


def function(functions: set[str], element: str, rows: int, columns: int) -> str:
    """Add the text of a product with M = rows and N = columns to `functions`; return its name."""
    kind = {"f32": "float", "f64": "double"}[element]
    name = f"product_{element}_{rows}_{columns}"
    lines = [
        f"static void {name}(const int K, const {kind} *a, const int64_t am, const int64_t ak,",
        f"const {kind} *b, const int64_t bk, {kind} *c) {{",
        "int n = 0;",
    ]
    for vector, vectors in (("vector", VECTORS), ("vector", 1), ("half", 1)):
        width = f"(int)(sizeof({vector}_{element}) / sizeof({kind}))"
        lines += [f"for (; n + {vectors} * {width} <= {columns}; n += {vectors} * {width}) {{", "int m = 0;"]
        for count in (ROWS, 4, 1):
            if count <= rows:
                lines += [f"for (; m + {count} <= {rows}; m += {count}) {{"]
                lines += [*_tile(f"{vector}_{element}", width, count, vectors, columns), "}"]
        lines.append("}")
    lines += [
        f"for (int m = 0; m < {rows}; m++) for (int k = 0; k < K; k++) for (int j = n; j < {columns}; j++)",
        f"c[m * {columns} + j] += a[m * am + k * ak] * b[k * bk + j];",
        "}",
    ]
    functions.add("\n".join(lines))
    return name


def _tile(vector: str, width: str, rows: int, vectors: int, columns: int) -> Iterator[str]:
    tile = [(r, v) for r in range(rows) for v in range(vectors)]
    for r, v in tile:
        yield f"{vector} s{r}_{v} = *(const {vector} *)(c + (m + {r}) * {columns} + n + {v} * {width});"
    yield "for (int k = 0; k < K; k++) {"
    for v in range(vectors):
        yield f"const {vector} x{v} = *(const {vector} *)(b + k * bk + n + {v} * {width});"
    for r, v in tile:
        yield f"s{r}_{v} += a[(m + {r}) * am + k * ak] * x{v};"
    yield "}"
    for r, v in tile:
        yield f"*({vector} *)(c + (m + {r}) * {columns} + n + {v} * {width}) = s{r}_{v};"
