import json
import struct

import pytest
import torch

from minidl.errors import DamagedError
from minidl.training.run_folder import files


def test_json_comes_back_and_no_temporary_file_stays(tmp_path):
    files.write_json(tmp_path / "a.json", {"x": [1, 2.5, "ü", None]})
    assert files.read_json(tmp_path / "a.json") == {"x": [1, 2.5, "ü", None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_new_file_has_the_modes_of_other_new_files(tmp_path):
    files.write_text(tmp_path / "a", "a")
    (tmp_path / "b").write_text("b")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_nan_is_refused_because_json_has_none(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught:
        files.write_text(tmp_path / "none" / "a.txt", "a")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    for name in ("a" * 255, "\N{SNOWMAN}" * 85):
        files.write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}'])
def test_json_that_is_no_object_is_damage(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DamagedError, match=r"a\.json is damaged"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("read", [files.read_bytes, files.read_text, files.read_json, files.read_tensors])
def test_what_is_no_file_is_damage_and_what_is_missing_is_not(tmp_path, read):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop"):
        with pytest.raises(DamagedError, match=r"is damaged \((Is a directory|Too many levels)"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def some_tensors():
    return {
        "weight": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.ones(3, dtype=torch.float16),
        "step": torch.tensor(7, dtype=torch.int64),
        "none": torch.zeros(0, 4),
    }


def test_tensors_come_back_with_dtype_and_shape(tmp_path):
    tensors = some_tensors()
    checksum = files.write_tensors(tmp_path / "t.safetensors", tensors)
    again = files.read_tensors(tmp_path / "t.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
    assert len(checksum) == 64


def test_the_checksum_stands_in_the_file_for_other_readers(tmp_path):
    checksum = files.write_tensors(tmp_path / "t.safetensors", some_tensors())
    raw = (tmp_path / "t.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["sha256"] == checksum


def test_a_tensor_file_cut_anywhere_is_damage(tmp_path):
    path = tmp_path / "t.safetensors"
    files.write_tensors(path, some_tensors())
    whole = path.read_bytes()
    for length in (0, 4, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=r"t\.safetensors is damaged"):
            files.read_tensors(path)


def test_a_changed_bit_anywhere_in_the_values_is_damage(tmp_path):
    path = tmp_path / "t.safetensors"
    files.write_tensors(path, some_tensors())
    whole = path.read_bytes()
    for back in (1, 2, 9, 20, 30):
        changed = bytearray(whole)
        changed[-back] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match="do not match their checksum"):
            files.read_tensors(path)


@pytest.mark.parametrize("shape", [[0] + [3] * 60, [2**62, 0, 2**62]])
def test_a_shape_that_torch_cannot_count_is_damage(tmp_path, shape):
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedError, match=f"x has a shape of {len(shape)} sizes whose product is beyond 64 bits"):
        files.read_tensors(tmp_path / "x")


def test_a_tensor_file_whose_metadata_is_null(tmp_path):
    path = tmp_path / "a.safetensors"
    files.write_tensors(path, {"a": torch.zeros(1)})
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps({**header, "__metadata__": None}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(DamagedError, match="do not match their checksum"):
        files.read_tensors(path)


def test_a_message_does_not_repeat_a_whole_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {"9" * 4000}e999}}')
    with pytest.raises(DamagedError, match="is damaged") as raised:
        files.read_json(path)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("value", [{"a": 1, "b": [1.5, None, {"c": "d"}]}, {}, {"n": {3: (1, 2)}, "x": -0.0}])
def test_a_sealed_object_comes_back_without_its_seal(tmp_path, value):
    files.write_json(tmp_path / "a.json", value, sealed=True)
    assert files.read_json(tmp_path / "a.json") == json.loads(json.dumps(value))


def test_no_bit_of_a_sealed_object_can_change_what_is_read(tmp_path):
    path = tmp_path / "a.json"
    content = {"loss_sum": 12.25, "seed": 3, "text": "oil", "on": True}
    files.write_json(path, content, sealed=True)
    whole = path.read_bytes()
    told = 0
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            read = files.read_json(path)
        except DamagedError:
            told += 1
            continue
        # White space, or the name of the seal, which is then another entry.
        assert {name: read[name] for name in content} == content
    assert told > 4 * len(whole)
