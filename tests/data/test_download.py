"""Downloads: where a file is looked for, and that only checked content is kept."""

import gzip
import hashlib
import http.server
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from minidl.data import DataError, download
from minidl.data.download import Resource, fetch

CONTENT = hashlib.sha512(b"content").digest() * 3
GOOD = gzip.compress(CONTENT)


def unpack(raw):
    try:
        return {"content": gzip.decompress(raw)}
    except (OSError, EOFError) as error:
        raise DataError(f"not gzip ({error})") from None


def resource(**changes):
    parts = {
        "path": "set/file.gz",
        "mirrors": (),
        "unpack": unpack,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "max_bytes": 10_000,
    }
    return Resource(**{**parts, **changes})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")


@contextmanager
def server(answers):
    """A local server; `answers` maps a path to (status, body, headers)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, body, headers = answers.get(self.path, (404, b"", {}))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", asked
        finally:
            httpd.shutdown()
            thread.join()


def test_the_first_mirror_with_the_right_content_wins_and_is_cached(tmp_path, capsys):
    answers = {
        "/wrong": (200, gzip.compress(b"other"), {}),
        "/short": (200, GOOD[:-9], {"Content-Length": str(len(GOOD))}),
        "/big": (200, bytes(20_000), {}),
        "/moved": (302, b"", {"Location": "/good"}),
        "/good": (200, GOOD, {}),
    }
    with server(answers) as (root, asked):
        mirrors = [f"{root}/{name}" for name in ("missing", "wrong", "short", "big", "moved", "never")]
        parts, origin = fetch(resource(mirrors=mirrors), cache=tmp_path)
        assert parts == {"content": CONTENT}
        assert origin == f"{root}/moved"
        assert asked == ["/missing", "/wrong", "/short", "/big", "/moved", "/good"]
        assert [path.name for path in (tmp_path / "set").iterdir()] == ["file.gz"]
        assert f"downloading {root}/moved" in capsys.readouterr().err
        again, origin = fetch(resource(mirrors=mirrors), cache=tmp_path)
        assert again == parts
        assert origin == str(tmp_path / "set" / "file.gz")
        assert len(asked) == 6


def test_a_file_mirror_and_other_compression(tmp_path):
    (tmp_path / "mirror.gz").write_bytes(gzip.compress(CONTENT, compresslevel=0, mtime=5))
    address = (tmp_path / "mirror.gz").as_uri()
    parts, origin = fetch(resource(), mirrors=[address], cache=tmp_path / "cache", progress=False)
    assert (parts["content"], origin) == (CONTENT, address)


def test_minidl_data_comes_first(tmp_path, monkeypatch):
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "data" / "set" / "file.gz").write_bytes(GOOD)
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path / "data"))
    _, origin = fetch(resource(), cache=tmp_path / "cache")
    assert origin == str(tmp_path / "data" / "set" / "file.gz")
    (tmp_path / "data" / "set" / "file.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(DataError, match=r"file\.gz does not hold the original data: the sha256 of its content is"):
        fetch(resource(), cache=tmp_path / "cache")
    (tmp_path / "data" / "set" / "file.gz").write_bytes(GOOD[:-9])
    with pytest.raises(DataError, match=r"file\.gz is damaged: not gzip"):
        fetch(resource(), cache=tmp_path / "cache")


def test_a_damaged_cache_is_fetched_again(tmp_path):
    (tmp_path / "cache" / "set").mkdir(parents=True)
    (tmp_path / "cache" / "set" / "file.gz").write_bytes(b"junk")
    (tmp_path / "mirror.gz").write_bytes(GOOD)
    fetch(resource(), mirrors=[(tmp_path / "mirror.gz").as_uri()], cache=tmp_path / "cache", progress=False)
    assert (tmp_path / "cache" / "set" / "file.gz").read_bytes() == GOOD


def test_offline_is_one_error_with_the_addresses(tmp_path, monkeypatch):
    mirrors = ["http://127.0.0.1:9/one.gz", "https://127.0.0.1:9/two.gz", "nonsense", "file:///no/such/file.gz"]
    with pytest.raises(DataError) as caught:
        fetch(resource(mirrors=mirrors), cache=tmp_path, progress=False)
    message = str(caught.value)
    assert all(address in message for address in mirrors)
    assert str(tmp_path / "set" / "file.gz") in message
    assert "set MINIDL_DATA" in message
    monkeypatch.setenv("MINIDL_DATA", "/elsewhere")
    with pytest.raises(DataError, match=r"MINIDL_DATA is set to /elsewhere, which has no set/file\.gz"):
        fetch(resource(mirrors=mirrors), cache=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "mirror.gz").write_bytes(GOOD)
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError, match=r"the download cannot be stored as .*set XDG_CACHE_HOME to a folder"):
        fetch(resource(), mirrors=[(tmp_path / "mirror.gz").as_uri()], cache=tmp_path / "cache", progress=False)


def test_a_user_without_a_home_is_told_what_to_set(tmp_path, monkeypatch):
    def homeless(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_cache_dir", homeless)
    with pytest.raises(DataError, match=r"^this user has no home folder for downloads: set XDG_CACHE_HOME to a folder"):
        fetch(resource())


def test_a_cache_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    def closed(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(DataError, match=r"file\.gz cannot be read: Permission denied; set XDG_CACHE_HOME to a folder"):
        fetch(resource(), cache=tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    (tmp_path / "mirror.gz").write_bytes(GOOD)
    with pytest.raises(DataError, match=r"cannot be stored .*No space left on device"):
        fetch(resource(), mirrors=[(tmp_path / "mirror.gz").as_uri()], cache=tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache" / "set").iterdir()) == []


def test_the_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download.sys.stderr, "isatty", lambda: True, raising=False)
    (tmp_path / "mirror.gz").write_bytes(GOOD)
    fetch(resource(), mirrors=[(tmp_path / "mirror.gz").as_uri()], cache=tmp_path / "cache")
    assert "downloading" in capsys.readouterr().err


def test_the_cache_is_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.cache_folder().name == "minidl"
