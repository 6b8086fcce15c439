"""What bad input gets: one clear sentence and an exit code, and nothing that was there is lost."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from minidl.data import DataError, corpus, parts, workers
from minidl.errors import ConfigError, DamagedError
from minidl.training.prediction import predict
from tests.cli.conftest import SMALL, environment, sentences, write_csv


def train(run, data, out, *more, kind="text", **options):
    return run("train", kind, "--data", data, "--out", out, *(more or SMALL), **options)


def refused(result, message, code=2):
    assert result.code == code, result.err
    assert message in result.err.replace("\n", " "), result.err
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert result.out == "" or "error" not in result.out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"", "empty.csv is empty: it needs a line per example"),
        ("header.csv", b"text,label\n", "header.csv has a header and no rows"),
        ("one.csv", b"text,label\n" + b"a b c,x\n" * 20, "has one class only ('x' in column 'label')"),
        ("columns.csv", b"body,folder,date\na,b,c\n", "which column is the label? Name it with --label-column"),
        ("junk.csv", bytes(range(256)) * 8, "a zero byte, so this is not a text file"),
        ("latin.csv", b"text,label\ncaf\xe9,x\n", "byte 0xe9 is not UTF-8 text"),
        ("picture.png", b"\x89PNG", "is not a data file that minidl reads"),
        ("broken.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n', "line 2: not JSON"),
    ],
)
def test_data_that_cannot_be_used(minidl, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(train(minidl, tmp_path / name, tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_missing_column_is_told_with_those_there_are(command, texts, tmp_path):
    result = train(command, texts, tmp_path / "run", "--text-column", "body")
    refused(result, "has no text column 'body'; its columns are: 'text', 'label'")
    result = train(command, texts, tmp_path / "run", "--target", "price", kind="table")
    refused(result, "has no target column 'price'; its columns are: 'text', 'label'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("other", [("--shards", "4"), ("--zero",)])
def test_a_lazy_optimizer_is_of_one_process(command, texts, tmp_path, other):
    result = train(command, texts, tmp_path / "run", *SMALL, "--lazy", *other)
    refused(result, "--lazy cannot be combined with --shards or --zero")
    assert not (tmp_path / "run").exists()


def test_a_worker_that_is_killed_is_told(command, texts, tmp_path, monkeypatch):
    for module in (corpus, parts):
        monkeypatch.setattr(module, "PART", 1024)
    monkeypatch.setattr(workers, "_START", "import os; os.kill(os.getpid(), 9)  # {path}")
    result = train(command, texts, tmp_path / "run", *SMALL, "--workers", 2)
    refused(result, "a worker process was ended by SIGKILL, as by the system where memory runs out; run the", code=1)
    assert not (tmp_path / "run").exists()


def test_data_that_is_not_there(minidl, tmp_path):
    refused(train(minidl, "mails.csv", tmp_path / "run"), "unknown text data 'mails.csv': neither one of docstrings")


def test_names_that_no_file_can_have(command, text_run, tmp_path):
    name = "a" * 5000
    refused(command("train", "text", "--data", name, "--out", tmp_path / "run"), "nor a file that exists")
    refused(command("predict", text_run[0], "--file", name + ".csv"), "cannot be read: File name too long")
    refused(command("evaluate", text_run[0], "--json", name), "--json cannot be created: File name too long")
    refused(command("predict", name, "oil"), "is not a minidl run: it is not a folder")
    for more in ((), ("--resume",), ("--overwrite",)):
        result = command("train", "text", "--data", "docstrings", "--out", name, *more)
        refused(result, "--out is a name of 5000 bytes, expected at most 240; give a shorter one")
        result = command("train", "text", "--data", "docstrings", "--out", f"{name}/run", *more)
        refused(result, "File name too long; choose another folder")
    result = command("generate", "--count", "1", "--out", tmp_path / name[:241])
    refused(result, "--out is a name of 241 bytes, expected at most 240; give a shorter one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("given", ["65536", "1025", "0", "-1", "abc", "4,", "9" * 5000, "\u0664\u0662,x"])
def test_a_number_of_threads_that_cannot_be_is_told_before_the_work(command, tmp_path, monkeypatch, name, given):
    monkeypatch.setenv(name, given)
    result = command("train", "text", "--data", "docstrings", "--out", tmp_path / "run")
    refused(result, f"error: {name} is ")
    assert result.err.endswith("expected a number of threads from 1 to 1024; set one, or unset it\n")
    assert not (tmp_path / "run").exists()


def test_a_damaged_tile_table_is_told_before_the_work(minidl, table, tmp_path, monkeypatch):
    (tmp_path / "pool.json").write_text("{")
    monkeypatch.setenv("MINIDL_TILES", str(tmp_path))
    done = minidl("train", "table", "--data", table, "--target", "price", "--out", tmp_path / "run")
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path / 'pool.json'}: no tile table for this version")
    assert not (tmp_path / "run").exists()


def test_a_target_that_is_ignored(command, table, tmp_path):
    result = command(
        "train", "table", "--data", table, "--target", "price", "--ignore", "price", "--out", tmp_path / "r"
    )
    refused(result, "column 'price' is the target (--target) and cannot be ignored (--ignore)")


def test_figures_of_a_compile_that_cannot_be_written_are_told_before_the_work(command, tmp_path):
    result = command("doctor", "--compile", "--json", tmp_path / "none" / "x.json")
    refused(result, "is not a folder; create it, or give a file in another folder")


def test_flags_of_a_compile_without_it(command):
    for flags in (("--arch", "75"), ("--only", "gemm"), ("--brief", "80"), ("--details",)):
        refused(command("doctor", *flags), f"{flags[0]} requires --compile")


def test_what_cannot_be_warmed_is_told_before_the_work(command, monkeypatch):
    refused(command("doctor", "text"), "names of commands require --warm, and files require --compile")
    refused(command("doctor", "--warm", "--only", "gemm"), "--only cannot be combined with --warm")
    refused(command("doctor", "--warm", "--compile"), "--compile cannot be combined with --warm")
    refused(command("doctor", "--warm", "--arch", "80,90"), "--arch is 80,90, expected one compute capability")
    refused(command("doctor", "--warm", "--arch", "gfx942"), "--arch is gfx942, expected one compute capability")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refused(command("doctor", "--warm", "--arch", "90"), "kernels are interpreted in this process")


def test_what_cannot_be_compiled_is_told_before_the_work(command, monkeypatch):
    monkeypatch.setattr("minidl.tools.doctor.compile.Worker.ask", None)
    refused(command("doctor", "--compile", "--arch", "12"), "error: unknown architecture 12; known: 80, 86")
    refused(
        command("doctor", "--compile", "--arch", "90", "--brief", "80"), "--brief is 80, expected some of --arch: 90"
    )
    refused(command("doctor", "--compile", "--brief", "new"), "--brief is new, expected compute capabilities")
    refused(command("doctor", "--compile", "none.py"), "none.py is not a file; expected a Python script")
    refused(command("doctor", "--compile", "-m", "no_such"), "no module 'no_such' was found")
    refused(command("doctor", "--compile", "-m"), "-m requires the name of a module")
    refused(command("doctor", "--compile", __file__, "--arch", "gfx9"), "unknown architecture gfx9; known: 80, 86")
    refused(command("doctor", "--compile", __file__, "--brief", "90"), "--brief applies to minidl's own kernels")
    result = command("doctor", "--compile", "--only", "zzz")
    refused(result, "error: no kernel has 'zzz' in its name; the kernels are: ")
    assert "bias_act_grad, bias_act" in result.err.replace("\n", " ")


def test_a_number_taken_for_classes(command, table, tmp_path):
    result = command(
        "train", "table", "--data", table, "--target", "price", "--task", "classification", "--out", tmp_path / "r"
    )
    refused(result, "has too few rows to split: 120 for training, 0 for validation, 0 for the test; each of the 1")
    assert "has at most 1 row" in result.err
    assert "(--task regression)" in result.err


def test_columns_are_for_files(command, tmp_path):
    result = train(command, "docstrings", tmp_path / "run", "--text-column", "body")
    refused(result, "--text-column is for your own file; docstrings takes none")
    result = train(command, "diabetes", tmp_path / "run", "--target", "age", kind="table")
    refused(result, "--target is for your own file; diabetes takes none")


def test_a_label_that_the_model_does_not_know(command, text_run, tmp_path):
    data = write_csv(tmp_path / "new.csv", [("oil", "crude"), ("goals", "football")])
    refused(command("evaluate", text_run[0], "--data", data), "line 3: label 'football' is unknown to the model")


def test_a_text_of_ten_megabytes_is_a_text(minidl, text_run):
    result = minidl("predict", text_run[0], stdin="barrel of oil " * 750_000)
    assert result.code == 0, result.err
    assert json.loads(result.out)["label"] == "crude"


def test_a_text_of_ten_megabytes_can_be_trained_on(command, tmp_path):
    rows = [*sentences(60), ("oil and barrels " * 660_000, "crude")]
    result = train(command, write_csv(tmp_path / "long.csv", rows), tmp_path / "run", *SMALL, "--quiet")
    assert result.code == 0, result.err


def test_binary_junk_at_standard_input_keeps_the_answers_before_it(text_run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minidl", "predict", str(text_run[0])], cwd=tmp_path, env=environment(),
        input=b"oil barrel\n\xff\xfe\x00junk\n", capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert json.loads(done.stdout)["label"] == "crude"
    assert b"error: standard input, line 2: byte 0xff is not UTF-8 text" in done.stderr


def test_a_truncated_model_file(command, text_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(command("predict", folder, "oil"), "model.safetensors is damaged")


@pytest.mark.parametrize("name", ["model.safetensors", "vocabulary.json", "labels.json", "config.json"])
@pytest.mark.parametrize("harm", ["cut", "empty", "junk", "gone"])
def test_a_damaged_file_of_a_run(text_run, tmp_path, name, harm):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    path = folder / name
    whole = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "junk": b"\x80\x04" + whole[2:]}[harm])
    with pytest.raises((DamagedError, ConfigError, DataError), match=rf"{name}.* is (damaged|missing)|no config"):
        predict.load(folder)


def test_what_is_no_run(minidl, tmp_path):
    refused(minidl("predict", tmp_path / "none", "oil"), "is not a minidl run: it is not a folder")
    refused(minidl("evaluate", tmp_path), "is not a minidl run: it has no config.json")


# The tensors of its checkpoints are larger than every other file.
WIDE = tuple("64" if word == "8" else word for word in SMALL)


def limit_files(size):
    """A disk with room for files of `size` bytes: beyond it every write fails, as on a full one."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_keeps_the_run_that_was_to_be_replaced(minidl, texts, text_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = train(minidl, texts, folder, *WIDE, "--overwrite", preexec_fn=limit_files(16_000))
    assert result.code == 1
    assert "cannot be written: File too large" in result.err
    assert f"the previous run is back in {folder}. Free some space, then run the command again" in result.err
    assert "--resume" not in result.err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_full_disk_during_training_leaves_what_can_be_continued(minidl, command, texts, tmp_path):
    folder = tmp_path / "run"
    result = train(minidl, texts, folder, *WIDE, preexec_fn=limit_files(16_000))
    assert result.code == 1
    assert "cannot be written: File too large" in result.err
    assert f"minidl train text --out {folder} --resume" in result.err
    assert not list(folder.glob("**/.*"))
    resumed = command("train", "text", "--out", folder, "--resume", "--quiet")
    assert resumed.code == 0, resumed.err


def test_a_folder_that_cannot_be_written(command, texts, tmp_path):
    refused(train(command, texts, "/proc/minidl/run"), "--out /proc/minidl/run cannot be written", code=1)
    (tmp_path / "file").write_text("")
    refused(train(command, texts, tmp_path / "file"), "is a file: give the name of a folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(minidl, texts, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(train(minidl, texts, tmp_path / "locked" / "run"), "cannot be written: Permission denied", code=1)


@pytest.mark.parametrize(
    "argv", [("predict", "run", "a"), ("evaluate", "run"), ("train", "text", "--data", "data.csv", "--out", "run")]
)
def test_a_folder_that_cannot_be_read(text_run, tmp_path, argv):
    """Also where root, who may read everything, runs the tests."""
    shutil.copytree(text_run[0], tmp_path / "run")
    (tmp_path / "run").chmod(0o000)
    code = "from tests.trials import hurts; hurts.obey_permissions(); from minidl import cli; cli.main()"
    started = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    (tmp_path / "run").chmod(0o700)
    assert started.returncode in (1, 2)
    assert re.fullmatch(r"error: .*run.*: Permission denied.*\n", started.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(minidl, texts, text_run, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for result in (
        train(minidl, texts, tmp_path / "run", "--device", "cuda"),
        minidl("predict", text_run[0], "--device", "cuda", "oil"),
    ):
        refused(result, "--device cuda needs a GPU, but")
    assert not (tmp_path / "run").exists()


def test_flags_out_of_range(command, texts, tmp_path):
    refused(train(command, texts, tmp_path / "run", "--dropout", "1.5"), "--dropout is 1.5, expected a number from 0")
    refused(train(command, texts, tmp_path / "run", "--hidden", "big"), "--hidden: 'big' is not a layer size")
    refused(command("train", "text", "--out", tmp_path / "run"), "--data is missing")
    refused(command("predict", tmp_path, "text", "--file", "x"), "and by --file: use one of them")


def test_a_loss_that_explodes_stops_with_advice(command, table, tmp_path):
    result = command(
        "train", "table", "--data", table, "--target", "price", "--out", tmp_path / "run", "--epochs", "9",
        "--batch-size", "8", "--hidden", "8", "--optimizer", "sgd", "--lr", "1e30", "--patience", "0", "--no-plots",
    )  # fmt: skip
    refused(result, "training diverged: the validation loss after epoch 1 is", code=1)
    assert "train again with a smaller --lr" in result.err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")]
)
def test_a_full_memory_is_told_in_a_sentence(command, texts, tmp_path, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("minidl.training.train.train", full)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run")
    assert result.code == 1
    assert result.err.startswith("error: this machine is out of memory: ")
    error = RuntimeError("another one")
    with pytest.raises(RuntimeError, match="another one"):
        command("train", "text", "--data", texts, "--out", tmp_path / "run")
