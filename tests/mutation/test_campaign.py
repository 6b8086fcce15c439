"""The tool, as it is started: what it says of planted mutants and of a sample."""

import ast
import json
import subprocess
import sys

import pytest

from minidl.runtime import launch
from tests.mutation import record, report, sources
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


def words(path):
    """What became of each mutant of each function of a record."""
    functions = json.loads(path.read_text(encoding="utf-8"))["functions"]
    return [word.partition(":")[0] for kept in functions.values() for word in kept["verdicts"].split()]


@pytest.mark.slow
def test_planted_mutants(tmp_path):
    arguments = [
        "--tests",
        "tests/kernels/test_average.py",
        "--map",
        str(tmp_path / "map"),
        "--record",
        str(tmp_path / "f"),
    ]
    names = {"EQUAL": EQUAL, "FATAL": FATAL, "WRONG": WRONG, "ENDLESS": ENDLESS, "ARGUMENTS": arguments}
    script = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + PLANTED
    done = run("-c", script)
    assert done.returncode == 1, done.stdout + done.stderr  # 75 % killed
    equal, fatal, wrong, endless = words(tmp_path / "f")
    assert (equal, wrong, endless) == ("survived", "failed", "timed_out")
    assert fatal in ("failed", "crashed", "sanitizer")
    assert "- m = o_n < i_end" in done.stdout
    assert "+ m = i_end > o_n" in done.stdout


@pytest.mark.slow
def test_a_sample_is_killed_goes_on_and_is_repeated(tmp_path):
    chosen = ("-m", "tests.mutation", "--only", "average_kernel,images", "--seed", "1", "--record", str(tmp_path / "f"))
    tests = ("--tests", "tests/kernels/test_average.py", "tests/kernels/test_images.py")
    for sample in (6, 10):
        judge = ("--sample", str(sample), "--budget", "5", "--map", str(tmp_path / "map"))
        done = run(*chosen, *judge, *tests)
        assert done.returncode == 0, done.stdout + done.stderr
        judged = [word for word in words(tmp_path / "f") if word != "-"]
        assert sample - 2 <= len(judged) <= sample  # but for those that are explained
    done = run(*chosen, "--repeat")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = sum(word not in ("survived", "not_reached") for word in judged)
    assert f"{seen} of {seen} mutants are seen as before" in done.stdout


def test_a_record_holds_for_the_functions_that_have_not_changed(tmp_path, monkeypatch):
    every = [mutant for mutant in sources.all_mutants() if mutant.file.endswith("/average.py")]
    some = {
        every[0]: record.Verdict("failed", "some test", 1.0),
        every[1]: record.Verdict("sanitizer", "another test", 1.0, True),
        every[2]: record.Verdict("survived", None, 20.0),
        every[3]: record.Verdict("not reached", None, 0.0),
    }
    record.write(tmp_path / "f", every, some)
    found = record.read(tmp_path / "f", every)
    assert {mutant: (v.how, v.test, v.guarded) for mutant, v in found.items()} == {
        mutant: (v.how, v.test, v.guarded) for mutant, v in some.items()
    }
    monkeypatch.setattr(record, "source_of", lambda name: "another")
    assert not record.read(tmp_path / "f", every)
    assert not record.read(tmp_path / "none", every)


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
    killed = report.Verdict("failed", "some test", 1.0)
    with pytest.raises(report.ExplanationError, match="explains a mutant that some test sees"):
        report.by_file({mutant: killed}, reasons, [mutant])
    survived = report.Verdict("survived", None, 1.0)
    (counts,) = report.by_file({mutant: survived}, reasons, [mutant]).values()
    assert (counts.explained, counts.survived, counts.score) == (1, 0, 1.0)
    (counts,) = report.by_file({mutant: survived}, {}, [mutant]).values()
    assert (counts.survived, counts.score) == (1, 0.0)
    write(**fields)
    with pytest.raises(report.ExplanationError, match="gives no reason"):
        report.explanations([mutant], path)
    write(**{**fields, "before": "gone"}, reason="because")
    with pytest.raises(report.ExplanationError, match="explains what is no mutant"):
        report.explanations([mutant], path)
