"""The kernels compile with the oldest and the newest Triton: `make compile-versions` makes their environments."""

from pathlib import Path

import pytest

from minidl.tools.doctor import compile

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_every_kernel_compiles_with_default_tiles(version):
    python = ROOT / f".venv-triton{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python.parents[1].name}; make compile-versions makes it")
    verdict = compile.run([90], every_tile=False, brief_archs=[90], python=str(python))
    assert verdict.versions["triton"] == version
    assert verdict.failures == {}
    assert len({job.name for job, _ in verdict.figures.values()}) > 20
    # Other compilers spend registers otherwise: what counts here is that each kernel compiles, to tensor cores.
    wrong = {name: [line for line in lines if not line.startswith("spills")] for name, lines in verdict.wrong().items()}
    assert not {name: lines for name, lines in wrong.items() if lines}
