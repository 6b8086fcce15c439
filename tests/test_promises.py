"""docs/promises.md: every promise names tests that exist and run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises(page):
    """Yield (promise, tests as (file, name)) for every item of the page's lists; the tests are the items below it."""
    for item in re.findall(r"^- .+\n(?: .+\n)*", page.partition("## Longer trials")[0], re.MULTILINE):
        promise, *tests = item.removeprefix("- ").split("\n  - ")
        yield " ".join(promise.split()), TEST.findall("\n".join(tests))


def functions(path):
    """Decorators of every test function of a file, those of the whole file (`pytestmark`) with them, as text."""
    tree = ast.parse(path.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    everywhere = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    return {
        node.name: [*everywhere, *map(ast.unparse, node.decorator_list)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def problems(page, root=ROOT):
    """What is wrong with the promises of a page, in words."""
    for promise, tests in promises(page):
        if not tests:
            yield f"{promise}: names no test"
        marks = []
        for file, name in tests:
            path = root / file
            if not path.is_file() or not path.name.startswith("test_"):
                yield f"{promise}: there is no file of tests {file}"
                continue
            found = functions(path)
            if name not in found:
                yield f"{promise}: there is no test {name} in {file}"
                continue
            marks.append(found[name])
            if any(re.search(r"mark\.(skip|xfail)\b", decorator) for decorator in found[name]):
                yield f"{promise}: {name} does not run"
        if marks and all("mark.gpu" in " ".join(mark) for mark in marks) and "GPU" not in promise:
            yield f"{promise}: is held on a GPU only, and does not say so"


def test_every_promise_has_tests_that_exist_and_run():
    page = (ROOT / "docs" / "promises.md").read_text()
    assert list(problems(page)) == []
    texts = [promise for promise, _ in promises(page)]
    assert len(texts) == len(set(texts)) >= 20


PLANTED = """
import pytest

def test_runs(): pass

@pytest.mark.skip(reason="not now")
def test_skipped(): pass

@pytest.mark.skipif(True, reason="sometimes")
def test_sometimes(): pass

@pytest.mark.gpu
def test_on_a_gpu(): pass
"""


@pytest.mark.parametrize(
    ("promise", "tests", "problem"),
    [
        ("A holds.", ("test_a.py::test_runs",), None),
        ("A holds.", ("test_a.py::test_runs", "test_a.py::test_on_a_gpu"), None),
        ("A holds.", ("test_a.py::test_sometimes",), None),
        ("A holds on a GPU.", ("test_a.py::test_on_a_gpu",), None),
        ("A holds.", (), "A holds.: names no test"),
        ("A holds.", ("test_b.py::test_runs",), "A holds.: there is no file of tests tests/test_b.py"),
        ("A holds.", ("test_a.py::test_ran",), "A holds.: there is no test test_ran in tests/test_a.py"),
        ("A holds.", ("test_a.py::test_skipped",), "A holds.: test_skipped does not run"),
        ("A holds.", ("test_a.py::test_on_a_gpu",), "A holds.: is held on a GPU only, and does not say so"),
    ],
)
def test_the_check_finds(tmp_path, promise, tests, problem):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(PLANTED)
    page = f"# Promises\n\n- {promise}\n" + "".join(f"  - `tests/{test}`\n" for test in tests)
    assert list(problems(page, tmp_path)) == ([] if problem is None else [problem])
