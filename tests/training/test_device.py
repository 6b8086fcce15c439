import pytest
import torch

from minidl.cpu import build
from minidl.errors import ConfigError
from minidl.runtime import tile_tables
from minidl.training.process import device


@pytest.fixture
def variable(monkeypatch):
    """Sets TRITON_INTERPRET for the test and puts it back, whatever the test makes of it."""

    def put(value):
        monkeypatch.setenv("TRITON_INTERPRET", "x")
        if value is None:
            monkeypatch.delenv("TRITON_INTERPRET")
        else:
            monkeypatch.setenv("TRITON_INTERPRET", value)

    return put


@pytest.mark.parametrize("given", [None, "1"])
def test_cpu_interprets(variable, given):
    variable(given)
    device.choose("cpu")
    assert device.os.environ["TRITON_INTERPRET"] == "1"


def test_tile_tables_that_cannot_be_used_are_told_before_the_work(variable, monkeypatch, tmp_path):
    variable("1")
    monkeypatch.setenv("MINIDL_TILES", str(tmp_path))
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path))
    tile_tables.read.cache_clear()
    device.choose("cpu")
    (tmp_path / "pool.json").write_text("{")
    with pytest.raises(ConfigError, match=r"pool\.json: no tile table for this version"):
        device.choose("cpu")
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none: MINIDL_TILES names no folder"):
        device.choose("cpu")


@pytest.fixture
def no_gpu(variable, monkeypatch):
    variable(None)
    monkeypatch.setattr(device.compiler_processes, "has_gpu", lambda _: False)
    monkeypatch.setenv("MINIDL_CPU", "x")
    monkeypatch.delenv("MINIDL_CPU")


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_cpu_compiles_kernels_of_commands(no_gpu, name):
    device.choose(name, compile_for_cpu=True)
    assert device.os.environ["MINIDL_CPU"] == "compiled"
    assert "TRITON_INTERPRET" not in device.os.environ


def test_the_interpreter_on_request(no_gpu, monkeypatch):
    monkeypatch.setenv("MINIDL_CPU", "interpreted")
    device.choose("cpu", compile_for_cpu=True)
    assert device.os.environ["TRITON_INTERPRET"] == "1"


def test_without_a_compiler_kernels_are_interpreted_with_a_note(no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(build, "compiler", lambda: None)
    device.choose("cpu", compile_for_cpu=True)
    assert device.os.environ["TRITON_INTERPRET"] == "1"
    assert "interpreted, which is slow: no C compiler works: install gcc or clang" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("MINIDL_CPU", "compiled")
    with pytest.raises(ConfigError, match="MINIDL_CPU is 'compiled', but no C compiler works"):
        device.choose("auto", compile_for_cpu=True)
    monkeypatch.setenv("MINIDL_CPU", "interpret")
    with pytest.raises(ConfigError, match="MINIDL_CPU is 'interpret', expected compiled or interpreted"):
        device.choose("auto", compile_for_cpu=True)


@pytest.mark.parametrize("given", [None, "1"])
def test_auto_leaves_the_choice_to_the_kernels(variable, given):
    variable(given)
    device.choose("auto")
    assert device.os.environ.get("TRITON_INTERPRET") == given


def test_a_variable_that_says_otherwise_is_told(variable):
    variable("0")
    with pytest.raises(ConfigError, match="--device cpu interprets kernels, but TRITON_INTERPRET=0 is set"):
        device.choose("cpu")
    variable("1")
    with pytest.raises(ConfigError, match="--device cuda compiles kernels, but TRITON_INTERPRET=1 is set"):
        device.choose("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "given", "what"), [("cuda", None, "--device cuda"), ("auto", "0", "TRITON_INTERPRET=0")]
)
def test_no_gpu_is_one_clear_error(variable, name, given, what):
    variable(given)
    with pytest.raises(ConfigError, match=f"{what} needs a GPU, but .*; use --device cpu"):
        device.choose(name)
