"""Each operator gives the sources that it says; values, constants of compilation and hints are left alone."""

import ast

import pytest

from tests.mutation.operators import mutants, mutated


def function(body, arguments="p_x, p_y, n, K, s_m, s_k, BLOCK"):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return ast.parse(f"def kernel({arguments}):\n{lines}").body[0]


def changes(body, operator=None):
    """{(operator, the line that it changes)} of a body."""
    tree = function(body)
    before = ast.unparse(tree).splitlines()
    found = set()
    for mutant in mutants("kernel.py", tree):
        after = ast.unparse(mutated(tree, mutant)).splitlines()
        changed = [line.strip() for line in after if line not in before]
        found.add((mutant.operator, changed[0] if changed else "(shorter)"))
    return {line for name, line in found if name == operator} if operator else found


@pytest.mark.parametrize(
    ("line", "operator", "expected"),
    [
        ("m_k = o_k < K", "strictness", {"m_k = o_k <= K"}),
        ("m_k = o_k < K", "bound", {"m_k = o_k < K - 1"}),
        ("m_k = o_k <= K", "bound", {"m_k = o_k <= K + 1"}),
        ("m_h = h >= 0", "strictness", {"m_h = h > 0"}),
        ("m_h = h >= 0", "bound", {"m_h = h >= -1"}),
        ("m_h = h > 2", "bound", {"m_h = h > 3"}),
        ("m = m_m & m_n", "mask side", {"m = m_m", "m = m_n"}),
        (
            "INSIDE: tl.constexpr = A >= 0 and B",
            "mask side",
            {"INSIDE: tl.constexpr = A >= 0", "INSIDE: tl.constexpr = B"},
        ),
        ("b = tl.load(p_x, mask=m, other=0.0)", "mask", {"b = tl.load(p_x)"}),
        ("b = tl.load(p_x, mask=m, other=0.0)", "other", {"b = tl.load(p_x, mask=m)"}),
        ("tl.store(p_y, b_y, mask=m)", "mask", {"tl.store(p_y, b_y)"}),
        ("b_y = tl.where(m_k, b_x, 0.0)", "where", {"b_y = b_x"}),
        ("b_y = tl.where(b_x < 0.0, b_x, 0.0)", "where", set()),
        ("for k in range(0, K, BLOCK): pass", "first iteration", {"for k in range(0 + BLOCK, K, BLOCK):"}),
        ("for k in range(0, K, BLOCK): pass", "last iteration", {"for k in range(0, K - BLOCK, BLOCK):"}),
        ("for k in tl.range(K): pass", "last iteration", {"for k in tl.range(0, K - 1, 1):"}),
        ("for k in tl.range(K): pass", "one iteration more", {"for k in tl.range(0, K + 1, 1):"}),
        ("b = tl.cdiv(K, BLOCK)", "floor", {"b = K // BLOCK"}),
        ("b = tl.cdiv(K, BLOCK)", "bound", {"b = tl.cdiv(K - 1, BLOCK)", "b = tl.cdiv(K + 1, BLOCK)"}),
        ("p_x += o_m * s_m", "stride", {"p_x += o_m"}),
        ("p_x += o_m * s_m", "offset", {"pass"}),
        ("p = p_x + o_m * s_m + o_k * s_k", "swapped strides", {"p = p_x + o_m * s_k + o_k * s_m"}),
        ("o = o_m * s_m + o_k * s_k", "swapped strides", {"o = o_m * s_k + o_k * s_m"}),
        ("o = o_m * s_m + o_k * s_m", "swapped strides", set()),
        ("i = o_k + 1", "offset", {"i = o_k"}),
        ("r = o_k // K", "quotient", {"r = o_k % K"}),
        ("r = o_k // K", "ceiling", {"r = tl.cdiv(o_k, K)"}),
        ("r = o_k % K", "quotient", {"r = o_k // K"}),
        ("last = tl.minimum(K, n)", "min or max", {"last = tl.maximum(K, n)"}),
        ("b_acc += b_x", "accumulate", {"b_acc = b_x"}),
        ("b_acc = tl.dot(b_x, b_w, b_acc)", "accumulate", {"b_acc = tl.dot(b_x, b_w)"}),
    ],
)
def test_what_an_operator_makes(line, operator, expected):
    assert changes(line, operator) == expected


@pytest.mark.parametrize(
    "line",
    [
        "b_y = b_x * 2.0 + 1.0",
        "b_y = tl.maximum(b_x, b_w)",
        "better = b_x > b_w",
        "tl.assume(n > 0)",
        "if BLOCK > 1: pass",
        "if p_x is not None and BLOCK >= 2: pass",
        "if p_x.dtype.element_ty == tl.float64: pass",
        "z = tl.load(p_x) * 3\ny = z * z",
    ],
)
def test_values_and_what_is_chosen_while_compiling_stay(line):
    assert changes(line) == set()


def test_indices_that_were_loaded_are_indices_in_an_address():
    assert changes("b = tl.load(p_x + b_row * s_m)", "stride") == {"b = tl.load(p_x + b_row)"}


def test_conditions_of_running_programs_are_bounds():
    assert changes("if i_tile < n: pass", "strictness") == {"if i_tile <= n:"}


def test_equal_changes_are_told_apart_and_lines_are_not():
    one = mutants("kernel.py", function("a = i * s_m\nb = i * s_m"))
    other = mutants("kernel.py", function("x = 1\na = i * s_m\nb = i * s_m"))
    keys = [mutant.key for mutant in one]
    assert len(set(keys)) == len(keys) == 2
    assert keys == [mutant.key for mutant in other if mutant.operator == "stride"]
