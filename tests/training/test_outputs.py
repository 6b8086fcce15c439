import os
import re

import pytest

from minidl.errors import ConfigError
from minidl.training.run_folder.outputs import check_different, check_output
from minidl.training.run_folder.provenance import SCORES


def test_an_output_that_would_take_the_place_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("none")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("link", f"is a link: give the name of the file, {tmp_path / 'file'}"),
        ("broken", "is a link: give the name of the file"),
        ("pipe", "is a device or a pipe: give the name of a file"),
        (".", "is a folder"),
        ("none/file", "is not a folder; create it"),
        ("file/file", "is not a folder; create it"),
        ("a" * 300, "File name too long"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_output("--json", tmp_path / name, SCORES)
    check_output("--json", tmp_path / "file", SCORES)
    check_output("--json", tmp_path / ("a" * 255), SCORES)


def test_a_read_only_file_is_no_output(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    (tmp_path / "file").touch(0o400)
    with pytest.raises(ConfigError, match="file cannot be written; make it writable, or give another file"):
        check_output("--json", tmp_path / "file", SCORES)


def test_two_outputs_must_differ(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    check_different(json=tmp_path / "a", plot=tmp_path / "b", trace=None)
    with pytest.raises(ConfigError, match=r"--data and --trace name the same file, .*: give two names"):
        check_different(data=str(tmp_path / "a"), json=None, trace=tmp_path / "link" / "a")


@pytest.mark.parametrize("name", ["a\0b", "\ud800.csv"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(ConfigError, match=r"--data is .*, not a valid file name; give another"):
        check_different(data=name, trace="t.json")
