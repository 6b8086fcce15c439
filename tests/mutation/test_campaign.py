"""The tool, as it is started: what it says of planted mutants and of a sample."""

import ast
import json
import subprocess
import sys

import pytest

from minidl.runtime import launch
from tests.mutation import report, sources
from tests.mutation.operators import mutated

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="mutants run in Triton's interpreter")

PLANTED = """
import ast, dataclasses, sys
from tests.mutation import __main__ as tool, sources

first = next(m for m in sources.all_mutants() if m.function == "average_kernel" and m.operator == "strictness")
def planted(after):
    return dataclasses.replace(first, after=after, node=ast.parse(after, mode="eval").body)
sources.all_mutants = lambda: [planted(after) for after in (EQUAL, FATAL, WRONG, ENDLESS)]
tool.report.explanations = lambda every: {}
sys.argv[1:] = ARGUMENTS
sys.exit(tool.main())
"""
# Of `o_n < i_end`. Without a mask the kernel reads and writes beyond its tensors.
EQUAL, FATAL, WRONG = "i_end > o_n", "o_n < i_end + (1 << 40)", "o_n < i_end // 2"
ENDLESS = "all(zero == 0 for zero in iter(int, 1))"


def run(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=sources.ROOT, capture_output=True, text=True, check=False, timeout=250
    )


def verdicts(path):
    return {verdict["after"]: verdict for verdict in json.loads(path.read_text(encoding="utf-8"))["verdicts"]}


@pytest.mark.slow
def test_planted_mutants(tmp_path):
    arguments = [
        "--tests",
        "tests/kernels/test_average.py",
        "--map",
        str(tmp_path / "map"),
        "--json",
        str(tmp_path / "f"),
    ]
    names = {"EQUAL": EQUAL, "FATAL": FATAL, "WRONG": WRONG, "ENDLESS": ENDLESS, "ARGUMENTS": arguments}
    script = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + PLANTED
    done = run("-c", script)
    found = verdicts(tmp_path / "f")
    assert found[EQUAL]["how"] == "survived"
    assert found[FATAL]["how"] in ("failed", "crashed", "sanitizer")
    assert found[WRONG]["how"] == "failed"
    assert found[ENDLESS]["how"] == "timed out"
    assert done.returncode == 1, done.stdout + done.stderr  # 75 % killed
    assert "- m = o_n < i_end" in done.stdout
    assert "+ m = i_end > o_n" in done.stdout


@pytest.mark.slow
def test_a_sample_is_killed(tmp_path):
    done = run(
        "-m", "tests.mutation", "--only", "average_kernel,images", "--sample", "10", "--seed", "1", "--budget", "5",
        "--tests", "tests/kernels/test_average.py", "tests/kernels/test_images.py",
        "--map", str(tmp_path / "map"), "--json", str(tmp_path / "f"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "f").read_text(encoding="utf-8"))["verdicts"]) == 10


def test_every_explanation_has_its_mutant():
    every = sources.all_mutants()
    assert set(report.explanations(every)) <= {mutant.key for mutant in every}


def test_keys_are_unique():
    keys = [mutant.key for mutant in sources.all_mutants()]
    assert len(set(keys)) == len(keys)


def test_mutants_compile_and_differ():
    for mutant in sources.all_mutants()[::40]:
        tree = sources.trees(mutant.file)[mutant.function]
        changed = mutated(tree, mutant)
        assert ast.unparse(changed) != ast.unparse(tree), mutant
        compile(ast.Module([changed], []), mutant.file, "exec")


def test_functions_without_mutants_exist():
    names = set(sources.functions())
    files = {name.split(":")[0] for name in names}
    assert set(sources.NEVER_INTERPRETED) | set(sources.ARITHMETIC) <= names | files


def test_stale_explanations_are_errors(tmp_path):
    mutant = sources.all_mutants()[0]
    path = tmp_path / "explained.toml"
    fields = dict(zip(report.FIELDS, mutant.key, strict=True))

    def write(**entry):
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in entry.items())
        path.write_text(f"[[mutant]]\n{lines}\n", encoding="utf-8")

    write(**fields, reason="because")
    reasons = report.explanations([mutant], path)
    assert reasons == {mutant.key: "because"}
    killed = report.Verdict("failed", "some test", 1.0, 1)
    with pytest.raises(report.ExplanationError, match="explains a mutant that some test sees"):
        report.families({mutant: killed}, reasons)
    assert report.families({mutant: report.Verdict("survived", None, 1.0, 1)}, reasons)[mutant.family].score == 1.0
    write(**fields)
    with pytest.raises(report.ExplanationError, match="gives no reason"):
        report.explanations([mutant], path)
    write(**{**fields, "before": "gone"}, reason="because")
    with pytest.raises(report.ExplanationError, match="explains what is no mutant"):
        report.explanations([mutant], path)
