"""Files that minidl takes for its own: whatever is in their place, reading them ends soon, with one error."""

import os
import re

import pytest

import minidl
from benchmarks.bench import drawn_results, network_results
from minidl.common import read_files, write_files
from minidl.data import DataError, picture_cache
from minidl.data.download import _read
from minidl.errors import ConfigError, DamagedError
from minidl.generation import evaluator, latents, sharing
from minidl.models import load_generator
from minidl.runtime import tile_tables
from minidl.runtime.cost_model import devices
from minidl.tools.bench import results
from minidl.tools.tuning import estimates
from minidl.training.run_folder import files, folder_lock
from minidl.training.tasks.images.initial_weights import InitialWeights
from tests.strange import STRANGE, replace, soon

READERS = {
    "config.json": (files.read_json, DamagedError),
    "weights.safetensors": (files.read_tensors, DamagedError),
    "model.safetensors": (write_files.read_tensors, OSError),
    "saved.safetensors": (minidl.load, OSError),
    "generator.safetensors": (load_generator, OSError),
    "evaluator.safetensors": (evaluator.load, OSError),
    "start.safetensors": (lambda path: InitialWeights.read(str(path)), ConfigError),
    "gemm.json": (tile_tables.load, tile_tables.TableError),
    "here.json": (devices._read, OSError),
    "bench.json": (results.load, ConfigError),
    "networks.json": (network_results.load, ConfigError),
    "drawn.json": (drawn_results.load, ConfigError),
    "estimates.json": (estimates.load, ConfigError),
    "z.txt": (lambda path: latents.read(path, 4), DataError),
    "z.npy": (lambda path: latents.read(path, 4), DataError),
    "mnist.gz": (_read, DataError),
    "grid.rows": (lambda path: read_files.handle(path, os.O_WRONLY), OSError),
}
# A run, and a file that is written to.
MAY_BE = {("generator.safetensors", "folder"), ("start.safetensors", "folder"), ("grid.rows", "sparse file")}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", READERS)
def test_anything_else_than_a_file_is_one_error(tmp_path, name, kind):
    read, error = READERS[name]
    if (name, kind) in MAY_BE:
        pytest.skip("it may be")
    replace(tmp_path / name, kind)
    with soon(), pytest.raises(error) as told:
        read(tmp_path / name)
    said = f"{told.value} {getattr(told.value, 'strerror', '')}"
    assert str(tmp_path / name) in said
    assert re.search(r"a pipe, a socket or a device|[Ii]s a directory|bytes, and at most", said)


@pytest.mark.parametrize("kind", STRANGE)
def test_an_entry_of_the_cache_is_told_and_made_anew(tmp_path, kind):
    told = []
    replace(tmp_path / "a.pictures", kind)
    with soon():
        assert picture_cache.PictureCache(told.append)._load(tmp_path / "a.pictures", "stamp") is None
    assert len(told) == 1
    assert "a.pictures cannot be read" in told[0]


@pytest.mark.parametrize("kind", STRANGE)
def test_a_plan_is_none(tmp_path, kind):
    replace(tmp_path / "plan.json", kind)
    with soon():
        assert sharing.read(tmp_path) is None


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "sparse file"])
def test_a_lock_is_none(tmp_path, kind):
    replace(tmp_path / ".run.lock", kind)
    with (
        soon(),
        pytest.raises(ConfigError, match=r"is a link|is a folder|is not a lock file of minidl"),
        folder_lock.lock(tmp_path / "run"),
    ):
        pass


def test_files_are_read_up_to_the_size_of_their_kind(tmp_path):
    for name, most in (("a.json", read_files.DOCUMENT), ("a.safetensors", read_files.memory())):
        path = tmp_path / name
        path.touch()
        os.truncate(path, most)
        read_files.opened(path).close()
        os.truncate(path, most + 1)
        with pytest.raises(OSError, match=f"it has {most + 1:,} bytes, and at most {most:,} are read"):
            read_files.opened(path)
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "b").write_bytes(b"content")
    assert read_files.read_bytes(tmp_path / "link") == b"content"
    with pytest.raises(OSError, match="at most 6"):
        read_files.read_bytes(tmp_path / "b", 6)
