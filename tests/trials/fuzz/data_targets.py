"""Files of data: tables, texts, IDX, archives, pictures, latents, and what arrives at standard input."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image, ImageDraw

from minidl.data import DataError, load_table, load_text, read_labelled, read_texts
from minidl.data.download import gunzip
from minidl.data.images import parse_idx
from minidl.data.pictures import picture_size, read_picture
from minidl.data.reuters import parse_sgml, single_topic_dataset, unpack
from minidl.data.vectorizer import Tfidf
from minidl.errors import DamagedError
from minidl.generation import latents
from minidl.training.prediction import predict
from minidl.training.settings.command import Predict
from tests.trials.fuzz import limits, mutate
from tests.trials.fuzz.target import READERS, Target, after_first, variants

OLD = Path(__file__).parents[2] / "old" / "formats-1"
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")


def _written(suffix: str, content: bytes) -> Path:
    path = Path(f"input{suffix}")
    path.write_bytes(content)
    return path


def _tables(rows: list[dict]) -> list[list[bytes]]:
    """Rows as CSV, TSV and JSONL."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    joined = ["\n".join(between.join(map(str, line)) for line in lines).encode() for between in (",", "\t")]
    return [[joined[0]], [joined[1]], ["\n".join(map(json.dumps, rows)).encode()]]


def texts(folder: Path) -> Target:
    """Labelled texts: CSV, TSV, JSONL, and plain lines."""
    rows = [{"text": f"word{i % 7} and {'oil' if i % 2 else 'corn'}", "label": "ab"[i % 2]} for i in range(30)]
    contents = [*_tables(rows), [b"one\ntwo\r\nthree"]]
    contents[0] += [
        b'a;b\n"x;y";1,5\n"q\n""z""";2\n',
        b'text,label\n"a\nb",1\n"c,d",2\n',
        b"\xef\xbb\xbflabel,text\n1,a\n2,b\n",
    ]
    contents[2] += [b'{"text": "a", "label": 1}\n\n{"label": true, "text": "b"}\n{"text": "c", "label": 1.5}']
    contents[2].append("\n".join(json.dumps({f"k{i}": i, "text": "t", "label": "a"}) for i in range(500)).encode())

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        path = _written(_SUFFIXES[choice % 4], data[1:])
        how = choice // 4 % 3
        if how == 1:
            return read_labelled(path, ["a", "b"])
        if how == 2 or path.suffix == ".txt":
            return read_texts(path)
        dataset = load_text(path)
        return Tfidf.fit(dataset.train.texts).transform(dataset.test.texts)

    return Target(
        run, variants(*contents), (DataError,), words=[b"text", b"label", b'","', b"\n\"", b'"\n'],
        change=after_first(mutate.change_json),
    )  # fmt: skip


def table(folder: Path) -> Target:
    """Tables with a target column."""
    rows = [{"x": i * 1.5, "kind": "ab"[i % 2], "target": i % 3} for i in range(20)]
    numbers = [{"x": i, "y": -i / 3, "target": i * 1e3 + 0.5} for i in range(20)]
    contents = [a + b for a, b in zip(_tables(rows), _tables(numbers), strict=True)]
    contents[0].append(b"x;target\n1,5;2,5\n2,5;3\n3;4,5\n1,25;3,5\n7;8,5\n9;1,5\n")
    contents[2].append(b"\n".join(b'{"x": %d, "l": [1], "target": %d.5}' % (i, i) for i in range(10)))

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        path = _written(_SUFFIXES[choice % 3], data[1:])
        task = (None, "regression", "classification", None)[choice // 3 % 4]
        return load_table(path, target="target", task=task, missing=("error", "fill")[choice // 12 % 2])

    return Target(
        run, variants(*contents, *contents, *contents, *contents, *contents), (DataError,),
        words=[b"target", b"\nNA,", b",?,", b"nan", b"null"], change=after_first(mutate.change_json),
    )  # fmt: skip


def stdin(folder: Path) -> Target:
    """Lines at standard input of `minidl predict` for a text run, a regression and a classification."""
    folders = [OLD / kind for kind in ("text", "table", "classes")]
    found = list(map(predict.load, folders))
    rows = [
        b'{"size": 100, "age": 10, "kind": "house"}\n{"age": 1, "size": 2.5, "kind": "new", "more": 1}\n',
        b"size,age,kind\n100,10,house\n50,20,flat\n",
        b"age;size;kind\n1,5;100;house\n",
    ]
    contents = [
        [b"crude oil\nwheat\n\n", b"one"],
        rows,
        [row.replace(b"kind", b"price").replace(b"house", b"5") for row in rows],
    ]

    def run(data: bytes) -> object:
        number = data[0] % 3 if data else 0
        write = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with (
            mock.patch("minidl.training.prediction.predict._of_documents", return_value=found[number]),
            mock.patch("minidl.training.prediction.inputs.standard_input", return_value=io.BytesIO(data[1:])),
        ):
            predict.predict(Predict(run=folders[number]), write)
        write.flush()
        return write

    return Target(
        run, variants(*contents), (DataError, DamagedError), words=[b"size", b"age", b"kind", b"price"],
        change=after_first(mutate.change_json),
    )  # fmt: skip


def idx(folder: Path) -> Target:
    """IDX files of one and three dimensions, gzipped or not."""
    pixels = struct.pack(">IIII", 0x803, 2, 3, 4) + bytes(range(24))
    labels = struct.pack(">II", 0x801, 5) + bytes(5)
    huge = [
        struct.pack(">IIII", 0x803, *sizes) for sizes in ((2**32 - 1,) * 3, (0, 2**32 - 1, 2**32 - 1), (2**31, 2, 0))
    ]

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        content = gunzip(data[1:], 64 * limits.MIB) if choice & 1 else data[1:]
        return parse_idx(content, 3 if choice & 2 else 1, "input")

    bomb = [gzip.compress(bytes(200 * limits.MIB)), gzip.compress(gzip.compress(bytes(2**20)))]
    contents = ([labels], [gzip.compress(labels), *bomb], [pixels, *huge], [gzip.compress(pixels), *bomb])
    return Target(run, variants(*contents), (DataError,), memory=limits.ARCHIVE_MEMORY, traced=(*READERS, "/gzip.py"))


_SGML = (
    b'<!DOCTYPE lewis SYSTEM "lewis.dtd">\n<REUTERS TOPICS="YES" LEWISSPLIT="TRAIN" NEWID="1">\n'
    b"<TOPICS><D>earn</D></TOPICS>\n"
    b"<TEXT>&#2;\n<TITLE>A &lt;B> &amp; C</TITLE>\n<DATELINE>x</DATELINE><BODY>Text.\n&#3;</BODY></TEXT>\n</REUTERS>\n"
    b'<REUTERS TOPICS="YES" LEWISSPLIT="TEST" NEWID="2"><TOPICS><D>earn</D></TOPICS>'
    b'<TEXT TYPE="UNPROC">all of it</TEXT></REUTERS>'
)


def _archive(*members: tuple[str, bytes], kind: str = "w:gz", **header: object) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=kind) as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for key, value in header.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(body))
    return content.getvalue()


def _sparse(size: int) -> bytes:
    """A gzipped tar of one member that says it is a sparse file of `size` bytes with one byte in it."""
    info = tarfile.TarInfo("a.sgm")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"%011o\0" % 0, b"%011o\0" % 512
    header[483:495] = size.to_bytes(12, "big") if size >= 8**11 else b"%011o\0" % size
    if size >= 8**11:
        header[483] = 0x80
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return gzip.compress(bytes(header) + bytes(512) + bytes(1024))


def archive(folder: Path) -> Target:
    """The Reuters archive and its SGML."""
    archives = [
        _archive(("a.sgm", _SGML), ("b.txt", b"no")),
        _archive(("x/../../../tmp/a.sgm", _SGML)), _sparse(2**20), _sparse(2**34),
        _sparse(2**50), gzip.compress(bytes(200 * limits.MIB)),
        _archive(("a.sgm", b""), type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _archive(("a.sgm", b""), type=tarfile.LNKTYPE, linkname="a.sgm"),
        gzip.compress(_archive(("a.sgm", _SGML), kind="w")[:700]),
    ]  # fmt: skip
    documents = [
        _SGML,
        b"<REUTERS " * 3000,
        b"<REUTERS x>" * 2000,
        b"<TEXT " * 300,
        _SGML.replace(b"&amp;", b"&#x110000;&#xD800;&#99999999999;"),
    ]

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        if choice % 2 == 0:
            return unpack(data[1:])
        return single_topic_dataset("reuters-r8", parse_sgml(data[1:].decode("latin-1")), "input")

    return Target(
        run, variants(archives, documents), (DataError,), memory=limits.ARCHIVE_MEMORY,
        words=[b"<TEXT>", b"</REUTERS>", b"<D>"],
        traced=(*READERS, "/tarfile.py", "/gzip.py"),
    )  # fmt: skip


def _pictures() -> list[bytes]:
    found = []

    def save(image: Image.Image, kind: str, **options: object) -> None:
        content = io.BytesIO()
        image.save(content, kind, **options)
        found.append(content.getvalue())

    colour = Image.radial_gradient("L").resize((13, 9)).convert("RGB")
    ImageDraw.Draw(colour).line((0, 0, 12, 8), fill=(255, 0, 7))
    grey = colour.convert("L")
    turned = Image.Exif()
    turned[0x0112] = 6
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"):
        save(colour, kind)
        save(grey, kind)
    save(colour, "JPEG", exif=turned, progressive=True)
    save(colour.convert("CMYK"), "JPEG")
    save(colour.convert("RGBA"), "PNG", exif=turned)
    save(colour.convert("RGBA"), "WEBP", lossless=True)
    save(grey.convert("LA"), "PNG")
    save(colour.quantize(16), "PNG", transparency=3)
    save(grey.convert("1"), "PNG")
    save(grey.convert("1"), "PPM")
    save(Image.fromarray(np.arange(117, dtype=np.uint16).reshape(9, 13) * 500), "PNG")
    for image in (
        grey.convert("F"),
        grey.convert("I"),
        Image.fromarray(np.arange(117, dtype=np.uint16).reshape(9, 13)),
    ):
        save(image, "TIFF")
    for compression in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg"):
        save(colour, "TIFF", compression=compression)
    save(grey.convert("1"), "TIFF", compression="group4")
    save(colour.convert("CMYK"), "TIFF")
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        save(colour, kind, save_all=True, append_images=[colour.rotate(90), grey.convert("RGB")])
    found += [b"P3 2 1 255 1 2 3 4 5 6", b"P2\n#c\n2 2 65535 1 2 3 65535", b"P1 3 1 1 0 1", b"Pf 1 1 -1.0\n\0\0\x80?"]
    found += [b"P5 50000 50000 255\n", b"P6 8192 8192 255\n", b"P4 8192 8192\n", b"P5 8192 8192 65535\n\0\0"]
    for side, mode in ((8192, "I;16"), (8192, "1"), (8192, "L"), (8192, "P")):
        save(Image.new(mode, (side, side)), "PNG")
    save(Image.new("P", (8192, 8192)), "PNG", transparency=0)
    found.append(found[0][:16] + struct.pack(">II", 50_000, 50_000) + found[0][24:])
    return [content for content in found if len(content) < 4 * limits.INPUT]


def picture(folder: Path) -> Target:
    """Picture files of every format that is read."""

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        path = _written(".png", data[1:])
        picture_size(path)
        return read_picture(path, (8, 8), 3 if choice & 1 else 1)

    found = _pictures()
    return Target(
        run, variants(found, found), (DataError,), memory=limits.PICTURE_MEMORY, traced=(*READERS, "/PIL/"),
        words=[b"IHDR", b"IDAT", b"acTL", b"tRNS", b"iCCP", b"eXIf", b"zTXt",
            b"\xff\xdb", b"\xff\xe1", b"VP8X", b"ANMF", b"II*\0", b"MM\0*"],
    )  # fmt: skip


def _npy(shape: str, kind: str = "<f4", order: bool = False, body: bytes = b"") -> bytes:
    header = f"{{'descr': {kind!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


def latent(folder: Path) -> Target:
    """Files of latents: text and .npy."""
    arrays = []
    for values in (
        np.zeros((2, 4)),
        np.ones(4, np.float32),
        np.ones((1, 4, 1, 1), np.int8),
        np.asfortranarray(np.eye(4)),
    ):
        content = io.BytesIO()
        np.save(content, values)
        arrays.append(content.getvalue())
    arrays += [
        _npy(shape)
        for shape in (
            "(1000000000, 4)",
            "(2147483648, 2147483648, 2147483648)",
            "(300000000, 4)",
            "(-1, 4)",
            "()",
            "(0, 4)",
        )
    ]
    arrays += [
        _npy("(1, 4)", kind, body=bytes(64))
        for kind in ("|O", "<f2", ">f8", "<f16", "<c8", "|b1", "<M8[s]", "|S4", "<U4")
    ]
    arrays += [
        _npy("(" * 90 + ")" * 90),
        _npy("[" * 3000),
        _npy("(4,)" + " " * 20000),
        b"\x93NUMPY\x03\x00\xff\xff\xff\x7f{}",
        b"PK\x03\x04",
    ]

    def run(data: bytes) -> object:
        choice = data[0] if data else 0
        return latents.read(_written(".npy" if choice % 2 else ".txt", data[1:]), 4)

    return Target(
        run, variants([b"1 2 3 4\n0.5 -1e3 .5 1.\n", b"\xef\xbb\xbf0 0 0 0"], arrays), (DataError,),
        words=[b"(1, 4)", b"'descr'", b"'|O'", b"True", b"<f8"], traced=(*READERS, "/numpy/lib/"),
    )  # fmt: skip
