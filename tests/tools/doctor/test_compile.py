"""The offline compile: planted faults are found, real kernels compile clean, a dying compiler does not stop it."""

import dataclasses
import io
import itertools
import json
from importlib.metadata import version

import pytest
from rich.console import Console

from minidl.compilation.job import Job
from minidl.tools.doctor import compile, doctor_compile, plan, report
from minidl.tools.doctor.compile import Verdict, Worker, WorkerError
from minidl.tools.doctor.jobs import SHARED_LIMITS, Accepted, Figures, accepted_spills, problems, target_name
from minidl.tools.doctor.plan import CompilePlan


def job(
    kernel="tests.tools.doctor.planted:add_one_kernel", arch=90, warps=4, types=("*fp32", "*fp32", "i32"),
    names=("p_x", "p_y", "n"), **constants,
):  # fmt: skip
    """A launch by hand, every argument a multiple of 16."""
    constants = constants or {"BLOCK": 1024}
    return Job(
        kernel=kernel,
        arch=arch,
        signature=dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr"),
        constants=[([len(names) + i], value) for i, value in enumerate(constants.values())],
        attributes=[([i], [["tt.divisibility", 16]]) for i in range(len(names))],
        options={"num_warps": warps, "num_stages": 3},
        declared=list(constants),
    )


def product(block, warps, dtype="*fp16", arch=90):
    return job(
        "tests.tools.doctor.planted:product_kernel", arch, warps, (dtype, dtype, "*fp32", "i32"),
        ("p_a", "p_b", "p_c", "K"), BLOCK=block, BLOCK_K=32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def compiled(worker):
    """The figures of a job, compiled by the child process."""
    return lambda job: Figures(**worker.ask({"compile": job.as_json()}, 120))


def test_a_plain_kernel_has_no_problem(compiled):
    for arch in (80, 90):
        figures = compiled(job(arch=arch))
        assert problems(job(arch=arch), figures) == []
        assert 8 <= figures.registers <= 64
        assert (figures.spill, figures.matrix, figures.tma, figures.wants_matrix) == (0, 0, 0, False)


def test_matrix_instructions_are_counted(compiled):
    hopper, ampere = compiled(product(64, 4)), compiled(product(64, 4, arch=80))
    assert hopper.wgmma > 0 == hopper.mma
    assert ampere.mma > 0 == ampere.wgmma
    assert hopper.wants_matrix
    assert ampere.wants_matrix
    assert problems(product(64, 4), hopper) == problems(product(64, 4, arch=80), ampere) == []


def test_float32_by_multiply_and_add_wants_no_matrix_instructions(compiled):
    figures = compiled(product(32, 4, "*fp32"))
    assert figures.matrix == 0
    assert not figures.wants_matrix
    assert problems(product(32, 4, "*fp32"), figures) == []


def test_a_planted_spill_and_serialised_matrix_instructions_are_found(compiled):
    figures = compiled(product(256, 8))
    assert figures.spill > 0
    assert figures.serialised
    found = "; ".join(problems(product(256, 8), figures))
    assert f"spills {figures.spill} bytes" in found
    assert "serialised" in found


def test_memory_that_is_touched_before_the_wait_is_found(compiled):
    for name, hasty in (("hasty", True), ("patient", False)):
        early = job(f"tests.tools.doctor.planted:{name}_kernel", types=("*fp32",), names=("p_x",), BLOCK=128)
        assert compiled(early).hasty is hasty


@pytest.mark.parametrize("summed", [False, True])
def test_registers_that_are_written_while_products_read_them_are_found(compiled, summed):
    across = job(
        "tests.tools.doctor.planted:across_kernel", types=("*fp32", "*fp32", "*fp32", "i32"),
        names=("p_a", "p_b", "p_c", "K"), SUM=summed, BLOCK=128, BLOCK_K=32,
    )  # fmt: skip
    figures = compiled(across)
    assert figures.wgmma
    assert figures.overwrites is not summed


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("maximum", "0.100000001"),
        ("comparison", "0.100000001"),
        ("two numbers", "0.100000001"),
        ("float32", "0.100000001"),
        ("mask", ""),
        ("operator", ""),
        ("full", ""),
    ],
)
def test_constants_that_were_rounded_to_float32_are_found(compiled, where, found):
    """Each rounding is Triton's: no interpreter does it."""
    if where in ("maximum", "comparison") and version("triton") >= "3.8":
        pytest.skip("this Triton rounds no number there")
    wide = job("tests.tools.doctor.planted:constant_kernel", types=("*fp64",), names=("p_x",), WHERE=where, BLOCK=128)
    figures = compiled(wide)
    assert figures.rounded == found
    assert [f"rounded to float32: {found}" in said for said in problems(wide, figures)] == [True] * bool(found)


def test_what_does_not_compile_is_a_problem_in_words(compiled):
    broken = job("tests.tools.doctor.planted:broken_kernel", types=("*i32",), names=("p_x",), BLOCK=128)
    (found,) = problems(broken, compiled(broken))
    assert "CompilationError" in found


def test_figures_come_from_the_cache_the_second_time(compiled):
    assert compiled(job(BLOCK=512)) == compiled(job(BLOCK=512))


def test_a_compiler_that_dies_is_reported_and_replaced(compiled, worker):
    with pytest.raises(WorkerError, match="ended: the compiler is not amused"):
        compiled(job("tests.tools.doctor.deadly:any_kernel"))
    assert compiled(job()).error == ""


def test_a_compiler_that_hangs_is_stopped(worker):
    with pytest.raises(WorkerError, match="no answer within 5 s"):
        worker.ask({"compile": job("tests.tools.doctor.endless:any_kernel").as_json()}, 5)


def test_a_dying_compiler_costs_one_job(worker):
    jobs = [job(), job("tests.tools.doctor.deadly:any_kernel"), job(BLOCK=512)]
    told = []
    found = compile.compile_jobs([worker], jobs, lambda done, of: told.append((done, of)))
    assert [bool(found[j.key][1].error) for j in jobs] == [False, True, False]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


FINE = Figures(registers=100, warps=4, shared=1000, wgmma=4, wants_matrix=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"spill": 8}, "spills 8 bytes"),
        ({"stack": 32}, None),
        ({"shared": SHARED_LIMITS[90]}, None),
        ({"shared": SHARED_LIMITS[90] + 1}, "232449 bytes of shared memory, the limit is 232448"),
        ({"registers": 129, "warps": 16}, "129 registers in 16 warps"),
        ({"registers": 128, "warps": 16}, None),
        ({"serialised": True}, "serialised"),
        ({"hasty": True}, "before waiting"),
        ({"overwrites": True}, "in flight"),
        ({"wgmma": 0}, "no matrix instructions"),
        ({"wgmma": 0, "mma": 1}, None),
        ({"wgmma": 0, "wants_matrix": False}, None),
        ({"error": "Broken: so"}, "Broken: so"),
    ],
)
def test_each_limit(change, message):
    found = problems(job(), dataclasses.replace(FINE, **change), [])
    assert (message is None) == (found == [])
    assert message is None or message in found[0]


@pytest.mark.parametrize("spills", [(64, 0), (0, 64), (64, 64)])
def test_one_name_of_several_jobs_hides_no_problem(spills):
    """Jobs that differ in a flag have one name, and the exit code says what any of them has."""
    jobs = [job(BLOCK=1024, FLAG=flag) for flag in (False, True)]
    assert len({str(each) for each in jobs}) == 1
    found = Verdict(
        {each.key: (each, dataclasses.replace(FINE, spill=n)) for each, n in zip(jobs, spills, strict=True)}
    )
    assert not found.fine
    assert sum(map(len, found.wrong().values())) == sum(n > 0 for n in spills)


def test_products_of_float64_need_matrix_instructions_where_there_are_any():
    without = dataclasses.replace(FINE, wgmma=0)
    for arch, fine in ((80, False), (90, False), (86, True), (120, True), ("gfx942", False)):
        wide = job(arch=arch, types=("*fp64", "*fp64", "i32"))
        assert (wide.dtype, problems(wide, without, []) == []) == ("float64", fine)
        assert problems(job(arch=arch), without, [])


def test_an_accepted_spill_covers_what_it_names_and_no_more():
    entry = Accepted(16, "so be it", {"name": "add_one_kernel", "arch": 90})
    spilled = dataclasses.replace(FINE, spill=16)
    assert problems(job(), spilled, [entry]) == []
    assert problems(job(), dataclasses.replace(FINE, spill=24), [entry])
    assert problems(job(arch=80), spilled, [entry])
    assert problems(product(64, 4), spilled, [entry])
    only = dataclasses.replace(entry, triton="3.9")
    assert problems(job(), dataclasses.replace(spilled, triton="3.9.0"), [only]) == []
    assert problems(job(), dataclasses.replace(spilled, triton="3.7.1"), [only])


def test_accepted_spills_have_reasons_and_name_real_fields():
    for entry in accepted_spills():
        assert len(entry.reason) > 20, f"{entry}: say why the spill stays"
        assert entry.bytes > 0
        assert set(entry.where) <= {"name", "arch", "dtype", "precision", "tile"}, entry
        # For all kernels at once only where no tile was measured, and few bytes.
        assert "name" in entry.where or (entry.where["arch"] in (86, 89, 100, 120) and entry.bytes < 100)


def test_accepted_spills_are_read(tmp_path):
    path = tmp_path / "accepted.json"
    fields = '"bytes": 8, "reason": "few", "kernel": "add_one_kernel", "dtype": "float32"'
    path.write_text(f'[{{{fields}}}, {{{fields}, "triton": "3.9"}}]')
    where = {"name": "add_one_kernel", "dtype": "float32"}
    assert accepted_spills(path) == (Accepted(8, "few", where), Accepted(8, "few", where, "3.9"))


def test_jobs_say_what_they_are():
    it = product(64, 8)
    assert it.name == "product_kernel"
    assert it.dtype == "float16"
    assert it.tile == "BLOCK=64 K=32 warps=8 stages=3"
    assert it.precision == "-"
    assert Job(**json.loads(json.dumps(it.as_json()))).key == it.key
    assert it.key != product(64, 4).key
    boxes = dataclasses.replace(it, signature={"d_a": "tensordesc<bf16[128,64]>"})
    assert boxes.dtype == "bfloat16"


def test_architectures():
    assert [target_name(arch) for arch in (80, 86, 90, 100)] == ["sm_80", "sm_80", "sm_90", "sm_80"]
    with pytest.raises(ValueError, match="unknown architecture 70; known: 80, 86"):
        target_name(70)
    with pytest.raises(ValueError, match="unknown architecture 75"):
        compile.run([75])


def pairs_of(job):
    return itertools.combinations([(name, value) for name, value in job.constant.items() if name != "BLOCK"], 2)


def test_every_pair_of_flags_and_every_dtype_is_kept_and_every_tile_among_the_heaviest():
    tiles = {j.key: j for j in (product(block, 4, dtype) for block in (16, 64) for dtype in ("*fp16", "*fp32"))}
    made = CompilePlan(tiles, {}, ["BLOCK", "BLOCK_K"])
    chosen = plan.shorten(made)
    assert [(j.dtype, j.constant["BLOCK"]) for j in chosen] == [("float16", 64), ("float32", 64)]
    rest = plan.heaviest(made, {j.key: Figures(lines=1) for j in chosen})
    assert {j.key for j in [*chosen, *rest]} == set(tiles)
    flags = [with_act(64, act) for act in ("relu", "gelu")] + [with_act(32, "tanh"), with_act(32, "relu")]
    assert len(plan.shorten(CompilePlan({j.key: j for j in flags}, {}, ["BLOCK"]))) == 3
    same = [product(64, 4), dataclasses.replace(product(64, 4), attributes=[])]
    assert len(plan.shorten(CompilePlan({j.key: j for j in same}, {}, ["BLOCK", "BLOCK_K"]))) == 1
    of_three = [job(BLOCK=64, A=a, B=b, C=c) for a in "xy" for b in "xy" for c in "xy"]
    pairs = {
        pair for j in plan.shorten(CompilePlan({j.key: j for j in of_three}, {}, ["BLOCK"])) for pair in pairs_of(j)
    }
    assert pairs == {pair for j in of_three for pair in pairs_of(j)}
    assert len(plan.shorten(CompilePlan({j.key: j for j in of_three}, {}, ["BLOCK"]))) < 6
    half = product(64, 4, "*bf16")
    assert len(plan.heaviest(CompilePlan({}, {j.key: j for j in (same[0], half)}, ["BLOCK", "BLOCK_K"]), {})) == 1
    odd = dataclasses.replace(product(64, 4), options={"num_warps": 8, "num_stages": 3})
    assert len(plan.heaviest(CompilePlan({j.key: j for j in [*same, odd]}, {}, ["BLOCK", "BLOCK_K"]), {})) == 2


def test_in_brief_every_value_of_a_flag_and_every_dtype_is_kept_once():
    jobs = [job(BLOCK=block, ACT=act, EVEN=even) for block in (32, 64) for act in "abc" for even in (False, True)]
    jobs += [product(block, 4, dtype) for block in (16, 64) for dtype in ("*fp16", "*fp32")]
    made = CompilePlan({j.key: j for j in jobs}, {}, ["BLOCK", "BLOCK_K"])
    assert len(plan.shorten(made)) == 8
    chosen = plan.shorten(made, brief=True)
    assert {(j.name, name, value) for j in jobs for name, value in j.constant.items() if "BLOCK" not in name} <= {
        (j.name, name, value) for j in chosen for name, value in j.constant.items()
    }
    assert {(j.name, j.dtype) for j in chosen} == {(j.name, j.dtype) for j in jobs}
    assert len(chosen) == 5


def with_act(block, act, aligned=True):
    made = job(BLOCK=block, ACT=act)
    return made if aligned else dataclasses.replace(made, attributes=[])


def test_the_heaviest_launch_of_a_tile_is_judged_by_its_kind_in_the_first_pass():
    light, heavy, wide = with_act(64, "relu"), with_act(64, "gelu"), with_act(64, "tanh", aligned=False)
    first = {j.key: j for j in (light, heavy, wide)}
    forced = {j.key: j for j in (with_act(512, a, a != "tanh") for a in ("relu", "gelu", "tanh"))}
    figures = {light.key: Figures(lines=10), heavy.key: Figures(lines=99), wide.key: Figures(lines=50, shared=7)}
    chosen = plan.heaviest(CompilePlan(first, forced, ["BLOCK"]), figures)
    assert sorted(j.constant["ACT"] for j in chosen) == ["gelu", "tanh"]
    assert {j.constant["BLOCK"] for j in chosen} == {512}


def test_kernels_that_nothing_launches_are_failures():
    plans = [
        CompilePlan(uncovered=["m:a_kernel", "m:b_kernel"]),
        CompilePlan(uncovered=["m:b_kernel"], failed={"x, one": "no"}),
    ]
    found = plan.failures(plans)
    assert list(found) == ["x, one", "m:b_kernel"]
    assert "launches this kernel" in found["m:b_kernel"]
    assert plan.failures([CompilePlan(uncovered=["m:b_kernel"], newest=False)]) == {}


def a_verdict():
    good, bad = product(64, 4), job()
    figures = {good.key: (good, FINE), bad.key: (bad, dataclasses.replace(FINE, spill=8))}
    return Verdict(figures, {}, {"python": "3", "torch": "2", "triton": "3.7.1"}, 1.0)


def test_the_report_has_every_figure_and_the_verdict():
    verdict = a_verdict()
    assert not verdict.fine
    content = json.loads(json.dumps(report.as_json(verdict)))
    assert not content["fine"]
    assert [row["problems"] for row in content["rows"]] == [["spills 8 bytes of registers"], []]
    console = Console(file=io.StringIO(), width=160)
    report.show(verdict, console)
    shown = console.file.getvalue()
    assert "wrong add_one_kernel [BLOCK=1024 warps=4 stages=3] float32 - sm_90: spills 8 bytes of registers" in shown
    assert "2 launches of 2 kernels compiled with Triton 3.7.1 in 1 s: 1 wrong" in shown
    del verdict.figures[job().key]
    assert verdict.fine
    verdict.failures["m:b_kernel"] = "not launched"
    assert not verdict.fine


@pytest.mark.slow
def test_products_of_every_type_use_tensor_cores_and_boxes(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert doctor_compile((90,), json=path, workload="gemm", only="gemm_tma", every_tile=False) == 0, (
        capsys.readouterr()
    )
    content = json.loads(path.read_text())
    assert content["fine"]
    found = {(row["dtype"], row["precision"]): row for row in content["rows"]}
    assert set(found) == {("float16", "-"), ("bfloat16", "-"), *(("float32", p) for p in ("tf32x3", "ieee", "tf32"))}
    for (_, precision), row in found.items():
        assert (row["wgmma"] > 0) == (precision != "ieee")
        assert row["tma"] > 0
        assert row["spill"] == 0


def test_a_name_that_no_kernel_has_is_told_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(compile, "run", None)
    told = r"no kernel has 'zzz' in its name; the kernels are: .*gemm_tma, .*softmax"
    with pytest.raises(ValueError, match=told) as refused:
        doctor_compile((90,), only="zzz")
    names = str(refused.value).partition("kernels are: ")[2].split(", ")
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_kernel_that_no_call_launches(capsys):
    assert doctor_compile((90,), workload="gemm", only="softmax") == 1
    assert "no operation with 'gemm' in its name launches such a kernel" in capsys.readouterr().out


def test_a_process_is_replaced_after_many_answers(monkeypatch):
    monkeypatch.setattr(compile, "RENEW", 2)
    worker = Worker()
    seen = []
    for _ in range(4):
        assert worker.ask({"versions": True}, 60)
        seen.append(worker._process.pid)
    worker.close()
    assert seen[0] == seen[1] != seen[2] == seen[3]
