"""Changes of an input: of its bytes, of its numbers and words, and of the values where it is JSON or safetensors."""

import contextlib
import json
import re
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.trials.fuzz import limits

NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"255",
    b"256",
    b"65536",
    b"2147483647",
    b"2147483648",
    b"4294967296",
    b"9223372036854775807",
    b"18446744073709551616",
    b"1" + b"0" * 30,
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"1e308",
    b"3.5e38",
    b"NaN",
    b"nan",
    b"Infinity",
    b"-inf",
    b"1_000",
    b"0x10",
    b"1" + b"0" * 400,
    b"9" * 5000,
    b"1e-320",
    b"0.1",
    b"-0.0",
    b"\xd9\xa3",
)
WORDS = (
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b'"',
    b'""',
    b"'",
    b",",
    b";",
    b"\t",
    b"\r",
    b"\n",
    b"\r\n",
    b"\n\n\n",
    b"\x0b",
    b"\x1a",
    b"\x1b[2J",
    b"\xe2\x80\xa8",
    b"\xe2\x80\xae",
    b"\xf0\x9f\x98\x80",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b"\\ud800",
    b"\\u0000",
    b"../../../etc/passwd",
    b"/etc/passwd",
    b"/dev/zero",
    b"~root",
    b"$HOME",
    b"`id`",
    b"__import__('os').system('id')",
    b"%s%n",
    b"A" * 300,
)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")
_NESTED = re.compile(r'"@nested ([0-9]+) (.)@"')
_BIG = {"@huge@": "1" + "0" * 400, "@huge float@": "1e400", "@digits@": "9" * 5000}


def values(draw: Random) -> Any:
    """A JSON value that a reader may not have thought of."""
    return draw.choice(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            3,
            255,
            2**31,
            2**32 - 1,
            2**53 + 1,
            2**63 - 1,
            2**63,
            2**64,
            -(2**63),
            0.0,
            -0.5,
            0.5,
            1e-320,
            1e30,
            1e38,
            1e39,
            1e308,
            float("nan"),
            float("inf"),
            "@huge@",
            "@huge float@",
            "@digits@",
            65536,
            10**6,
            10**7,
            "",
            " ",
            "a",
            "0",
            "1e400",
            "nan",
            "text",
            "\0",
            "\ud800",
            "\ue000\U0001f600",
            "x" * 5000,
            "..",
            "../x",
            "/etc/passwd",
            "\n",
            "[red]",
            "%s",
            "{0}",
            [],
            [[]],
            [None],
            {},
            {"": None},
            {"a": {}},
            [0] * 3,
            [1] * 70,
            ["a", "a"],
            f"@nested {draw.choice([5, 99, 101, draw.randrange(1, 1200), 30000])} {draw.choice('[{')}@",
        ]
    )


def as_text(value: Any) -> str:
    """JSON text of a value with what `values` stands for put in."""
    text = json.dumps(value, ensure_ascii=True)
    for mark, number in _BIG.items():
        text = text.replace(json.dumps(mark), number)

    def nested(found: re.Match[str]) -> str:
        depth = int(found[1])
        return "[" * depth + "]" * depth if found[2] == "[" else '{"a":' * depth + "1" + "}" * depth

    return _NESTED.sub(nested, text)


def change_json(draw: Random, data: bytes) -> bytes:
    """One or a few values of a JSON text changed, or of one of its lines. Raises ValueError where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        at = draw.randrange(len(lines))
        lines[at] = as_text(_changed(draw, json.loads(lines[at]))).encode()
        return b"\n".join(lines)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        value = _changed(draw, value)
    return as_text(value).encode()


def _changed(draw: Random, root: Any) -> Any:
    """`root` with one value in it replaced, taken out, put in or exchanged with another."""
    places = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            waiting.append(child)
    if not places:
        return values(draw)
    node, key = draw.choice(places)
    what = draw.randrange(8)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, dict):
        node[draw.choice(["", "a", "\ud800", "x" * 300, str(key) + " ", *map(str, node)])] = node.get(key)
    elif what == 1:
        node.insert(key, node[key])
    elif what == 2:
        other, place = draw.choice(places)
        with contextlib.suppress(LookupError):
            node[key] = json.loads(json.dumps(other[place]))
    elif what == 3 and type(node[key]) in (int, float):
        node[key] = draw.choice([node[key] + 1, -node[key], node[key] * 2, float(node[key]), str(node[key])])
    elif what == 4 and isinstance(node[key], list):
        node[key] = node[key] * draw.choice([2, 3, 50])
    else:
        node[key] = values(draw)
    return root


def change_safetensors(draw: Random, data: bytes) -> bytes:
    """The header of a safetensors file changed, its length kept right. Raises ValueError where there is none."""
    if len(data) < 8:
        raise ValueError("no header")
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    if draw.randrange(4) == 0:
        # Another type of the same size, or the sizes of another tensor.
        types = [b"F16", b"BF16", b"F32", b"F64", b"I64", b"I32", b"U8", b"BOOL", b"F8_E4M3", b"F8_E8M0", b"F4", b"C64"]
        changed = re.sub(rb"F32|F64|I64", lambda found: draw.choice([found[0], *types]), header)
    else:
        changed = change_json(draw, header)
    return struct.pack("<Q", len(changed)) + changed + data[8 + length :]


def change_bytes(draw: Random, data: bytes, others: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Bits, bytes, runs of them, numbers or words changed; parts of another input put in."""
    raw = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 8])):
        at = draw.randrange(len(raw) + 1)
        end = min(len(raw), at + draw.choice([1, 1, 2, 4, 8, 30, 200]))
        what = draw.randrange(12)
        if what == 0 and at < len(raw):
            raw[at] ^= 1 << draw.randrange(8)
        elif what == 1 and at < len(raw):
            raw[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        elif what == 2:
            del raw[at:end]
        elif what == 3:
            raw[at:at] = raw[at:end] * draw.choice([1, 2, 20, 300])
        elif what == 4:
            raw[at:end] = draw.choice([*WORDS, *words])
        elif what == 5:
            raw[at:at] = draw.choice([*WORDS, *words])
        elif what in (6, 7):
            found = list(_NUMBER.finditer(raw))
            if found:
                number = draw.choice(found)
                raw[number.start() : number.end()] = draw.choice(NUMBERS)
        elif what == 8:
            del raw[at:]
        elif what == 9 and others:
            other = draw.choice(others)
            begin = draw.randrange(len(other) + 1)
            raw[at:end] = other[begin : begin + draw.choice([1, 8, 60, 1000])]
        elif what == 10:
            size = draw.choice([1, 2, 4, 8])
            value = draw.choice(
                [0, 1, 0x7F, 0x80, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, len(raw)]
            )
            raw[at : at + size] = (value % 256**size).to_bytes(size, draw.choice(["little", "big"]))
        elif what == 11:
            raw[at:end] = draw.randbytes(end - at)
    return bytes(raw[: limits.INPUT])
