"""Reader and writer: values, tensors and splits come back as they went in; nothing partial is ever left."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_bytes as g
from ggufc.formats import gguf_values
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import TYPES, row_bytes, tensor_bytes, type_by_id
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter

NUMPY_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32")
VALUES = {
    "bool": (True, "bool"),
    "small": (7, "uint32"),
    "negative": (-7, "int32"),
    "wide": (1 << 40, "uint64"),
    "wide-negative": (-(1 << 40), "int64"),
    "float": (0.5, "float32"),
    "text": ("gr\u00fc\u00df dich \U0001f600", "string"),
    "empty": ("", "string"),
    "long": ("x" * 70000, "string"),
    "texts": (["", "a", "x" * 255, "y" * 256, "z" * 70000, "\u2581"], "array[string]"),
    "ints": ([1, -2, 3], "array[int32]"),
    "wide-ints": ([1, 1 << 40], "array[int64]"),
    "floats": ([0.5, -1.5], "array[float32]"),
    "bools": ([True, False], "array[bool]"),
    "numpy-scalar": (np.uint16(9), "uint16"),
    "numpy-float": (np.float64(0.1), "float64"),
    **{f"numpy-{d}": (np.array([0, 1, 100], d), f"array[{d}]") for d in NUMPY_TYPES},
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, tmp_path: Path):
    value, kind = VALUES[name]
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add("lead", "abc")
        w.add("key", value)
        w.add("tail", 1)
    with GGUFFile.open(tmp_path / "x.gguf") as f:
        assert f.kv_type("key") == kind
        got = f.metadata["key"]
        if kind.startswith("array") and kind not in ("array[string]",):
            assert isinstance(got, np.ndarray)
            assert got.tolist() == np.asarray(value).tolist()
        else:
            assert got == value and type(got) is type(value if not isinstance(value, np.generic) else value.item())
        assert f.metadata["key"] is got
        assert list(f.metadata) == ["lead", "key", "tail"] and f.metadata["tail"] == 1 and len(f.metadata) == 3
        assert "none" not in f.metadata and f.metadata.get("none") is None
        with pytest.raises(KeyError):
            f.kv_type("none")


def test_explicit_types(tmp_path: Path):
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add("a", 3, "uint16")
        w.add("b", 3, "u8")
        w.add("c", 3, "float32")
        w.add("d", [1, 2], "array[uint8]")
        w.add("e", [], "array[string]")
        w.add("f", [1, 2], "f32")
    with GGUFFile.open(tmp_path / "x.gguf") as f:
        assert [f.kv_type(k) for k in "abcdef"] == ["uint16", "uint8", "float32", "array[uint8]", "array[string]", "array[float32]"]
        assert f.metadata["e"] == [] and f.metadata["c"] == 3.0


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("k", 300, "uint8", "'k' cannot hold its value"),
        ("k", [1, 300], "array[uint8]", "do not fit into uint8"),
        ("k", [0.5], "array[int32]", "are not int32"),
        ("k", 1 << 64, None, "more than 64 bits"),
        ("k", 1, "bool", "not a bool"),
        ("k", [], None, "needs an explicit type"),
        ("k", {}, None, "dict has no GGUF type"),
        ("k", [[1], [2]], "array[int32]", "arrays of arrays"),
        ("k", 1, "quad", "'quad' is not a GGUF value type"),
        ("", 1, None, "must be 1 to 65535 bytes"),
        ("a\nb", 1, None, "printable"),
        pytest.param("k", "x" * (gguf_values.MAX_STRING_BYTES + 1), None, "too long", id="too-long"),
    ],
)
def test_unwritable_values(key: str, value: object, kind: str | None, message: str, tmp_path: Path):
    w = GGUFWriter(tmp_path / "x.gguf")
    with pytest.raises(GGUFError, match=message):
        w.add(key, value, kind)


@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_tensors(alignment: int, tmp_path: Path):
    rng = np.random.default_rng(1)
    floats = rng.standard_normal((3, 5), np.float32)
    raw = rng.integers(0, 256, (7, row_bytes("iq4_ks", 512)), np.uint8)
    with GGUFWriter(tmp_path / "x.gguf", alignment) as w:
        w.add_tensor("floats", (5, 3), "f32", floats)
        w.add_tensor("strided", (3, 5), "f32", floats.T)
        w.add_tensor("blocks", (512, 7), "IQ4_KS", raw)
        w.add_tensor("chunks", (10,), "i8", iter([b"abc", bytearray(b"de"), b"", memoryview(b"fghij")]))
        w.add_tensor("late", (4, 1, 2), "f16")
        w.add_tensor("called", (6,), "i16", lambda: (np.arange(i, i + 3, dtype=np.int16) for i in (0, 3)))
        w.set_data("late", np.arange(8, dtype=np.float16))
    with GGUFFile.open(tmp_path / "x.gguf") as f:
        assert f.alignment == alignment and (alignment == 32) == ("general.alignment" not in f.metadata)
        assert list(f.tensors) == ["floats", "strided", "blocks", "chunks", "late", "called"]
        assert f.tensors["late"].ne == (4, 1, 2) and f.tensors["blocks"].type is TYPES["iq4_ks"]
        assert all(t.offset % alignment == 0 and t.nbytes == len(f.data(n)) for n, t in f.tensors.items())
        assert np.array_equal(f.data("floats").view(np.float32).reshape(3, 5), floats)
        assert np.array_equal(f.data("strided").view(np.float32).reshape(5, 3), floats.T)
        assert np.array_equal(f.data("blocks"), raw.reshape(-1))
        assert f.data("chunks").tobytes() == b"abcdefghij"
        assert f.data("called").view(np.int16).tolist() == list(range(6))
        assert f.size == os.path.getsize(tmp_path / "x.gguf") and f.size % alignment == 0
        assert f.sha256() == hashlib.sha256((tmp_path / "x.gguf").read_bytes()).hexdigest()
        with pytest.raises(ValueError, match="read-only"):
            f.data("floats")[0] = 1
        with pytest.raises(GGUFError, match="no tensor 'none'"):
            f.data("none")


def test_the_gguf_package_reads_what_we_write(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add("general.architecture", "llama")
        w.add("list", ["a", "b\u00e9"])
        w.add_tensor("t", (6, 4), "f32", data)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["list"].contents() == ["a", "b\u00e9"]
    assert np.array_equal(reader.tensors[0].data, data) and reader.tensors[0].name == "t"


def test_copied_metadata_is_byte_equal(tmp_path: Path):
    source = g.save(
        tmp_path, g.model(extra=[g.strings("odd", [b"\xff\xfe", b"ok"]), g.u32("general.alignment", 32), g.u32("split.no", 0)]), "in.gguf"
    )
    with GGUFFile.open(source) as f:
        with GGUFWriter(tmp_path / "out.gguf", 64) as w:
            w.add("llama.block_count", 9)
            w.copy_metadata(f, except_keys=["tokenizer.ggml.scores"])
        with GGUFFile.open(tmp_path / "out.gguf") as out:
            same = set(f.metadata) - {"llama.block_count", "tokenizer.ggml.scores", "general.alignment", "split.no"}
            assert set(out.metadata) == same | {"general.alignment", "llama.block_count"}
            assert all(out.value(k).raw == f.value(k).raw for k in same)
            assert out.metadata["llama.block_count"] == 9 and out.alignment == 64
            # Bytes that are not UTF-8 survive decoding and encoding too.
            odd = out.metadata["odd"]
            assert isinstance(odd, list) and [t.encode("utf-8", "surrogateescape") for t in odd] == [b"\xff\xfe", b"ok"]
    with GGUFWriter(tmp_path / "again.gguf") as w:
        w.add("odd", odd)
    with GGUFFile.open(tmp_path / "again.gguf") as f:
        assert f.metadata["odd"] == odd


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Stop(BaseException):
    """Stands for an interrupt."""


def failing():
    yield bytes(100)
    raise Stop


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (failing, Stop, None),
        (lambda: [bytes(399)], GGUFError, "1 bytes too few"),
        (lambda: [bytes(300), bytes(101)], GGUFError, "1 bytes too many"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt, None),
    ],
)
def test_nothing_partial_is_left(data, error, message: str | None, tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"the former file")
    with pytest.raises(error, match=message), GGUFWriter(tmp_path / "x.gguf") as w:
        w.add_tensor("t", (100,), "f32", data)
    assert left(tmp_path) == ["x.gguf"]
    assert (tmp_path / "x.gguf").read_bytes() == b"the former file"


def test_an_exception_in_the_block_writes_nothing(tmp_path: Path):
    with pytest.raises(Stop), GGUFWriter(tmp_path / "x.gguf") as w:
        w.add("a", 1)
        raise Stop
    assert left(tmp_path) == []


def test_writer_refusals(tmp_path: Path):
    w = GGUFWriter(tmp_path / "x.gguf")
    w.add("a", 1)
    w.add_tensor("t", (32,), "q8_0")
    for call, message in (
        (lambda: w.add("a", 2), "'a' is set twice"),
        (lambda: w.add_tensor("t", (32,), "q8_0"), "'t' is declared twice"),
        (lambda: w.add_tensor("u", (33,), "q8_0"), "tensor 'u': a row of 33 values cannot be q8_0"),
        (lambda: w.add_tensor("u", (32, 0), "q8_0"), "not all positive"),
        (lambda: w.add_tensor("u", (1,) * 5, "f32"), "1 to 4 dimensions"),
        (lambda: w.add_tensor("u" * 65, (1,), "f32"), "1 to 64 bytes"),
        (lambda: w.add_tensor("u", (1,), "q3"), "'q3' is unknown"),
        (lambda: w.set_data("t", np.zeros(33, np.uint8)), "takes 34 bytes but its array has 33"),
        (lambda: w.set_data("v", b""), "'v' is not declared"),
        (lambda: w.finish(), "'t' has no data"),
        (lambda: GGUFWriter(tmp_path / "y.gguf", 24), "alignment 24"),
        (lambda: GGUFWriter(tmp_path / "no" / "y.gguf").finish(), "cannot write the file: No such file"),
    ):
        with pytest.raises(GGUFError, match=message):
            call()
    assert left(tmp_path) == []
    w.set_data("t", np.zeros(34, np.uint8))
    w.finish()
    w.finish()
    assert left(tmp_path) == ["x.gguf"] and os.stat(tmp_path / "x.gguf").st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_shards(folder: Path, edits: dict[int, dict[str, int]] | None = None, *, count: int = 3, twice: bool = False) -> Path:
    for no in range(count):
        keys = {"split.no": no, "split.count": count, "split.tensors.count": 2 * count, **(edits or {}).get(no, {})}
        with GGUFWriter(folder / f"m-{no + 1:05d}-of-{count:05d}.gguf") as w:
            if no == 0:
                w.add("general.architecture", "llama")
            for key, value in keys.items():
                w.add(key, value, "int32" if key.endswith("tensors.count") else "uint16")
            for k in range(2):
                name = "t0" if twice and no == 1 and k == 0 else f"t{2 * no + k}"
                w.add_tensor(name, (4,), "f32", np.full(4, 2 * no + k, np.float32))
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_split_files_open_as_one(tmp_path: Path):
    first = write_shards(tmp_path)
    with GGUFFile.open(first) as f:
        assert [p.name for p in f.paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)] and f.path == first
        assert list(f.tensors) == [f"t{i}" for i in range(6)]
        assert [t.shard for t in f.tensors.values()] == [0, 0, 1, 1, 2, 2]
        assert [f.data(f"t{i}").view(np.float32)[0] for i in range(6)] == list(range(6))
        whole = b"".join(p.read_bytes() for p in f.paths)
        assert f.sha256() == hashlib.sha256(whole).hexdigest() and f.size == len(whole)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({1: {"split.no": 2}}, "split.no is 2 where 1 is expected"),
        ({2: {"split.count": 4}}, "split.count is 4 where 3 is expected"),
        ({0: {"split.tensors.count": 7}}, "hold 6 tensors together and split.tensors.count says 7"),
        ({0: {"split.count": 2}}, "the name says 3 files and split.count says 2"),
    ],
)
def test_shards_that_disagree_are_refused(edits: dict[int, dict[str, int]], message: str, tmp_path: Path):
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(write_shards(tmp_path, edits))


def test_damaged_splits_are_refused(tmp_path: Path):
    first = write_shards(tmp_path)
    with pytest.raises(GGUFError, match=r"file 2 of a split model; open m-00001-of-00003\.gguf"):
        GGUFFile.open(tmp_path / "m-00002-of-00003.gguf")
    second = tmp_path / "m-00002-of-00003.gguf"
    content = second.read_bytes()
    second.write_bytes(content[:-20])
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.gguf: .* beyond the end"):
        GGUFFile.open(first)
    second.unlink()
    with pytest.raises(GGUFError, match=r"m-00002-of-00003.gguf: cannot open"):
        GGUFFile.open(first)
    os.rename(first, tmp_path / "renamed.gguf")
    with pytest.raises(GGUFError, match="restore the names"):
        GGUFFile.open(tmp_path / "renamed.gguf")
    with pytest.raises(GGUFError, match="'t0' is also in m-00001"):
        GGUFFile.open(write_shards(tmp_path, twice=True))


def test_version_2_is_read(tmp_path: Path):
    path = g.save(tmp_path, g.file([g.u32("a", 5)], [g.tensor("t", (2,))], struct.pack("<2f", 1, 2), version=2))
    with GGUFFile.open(path) as f:
        assert f.version == 2 and f.metadata["a"] == 5 and f.data("t").view(np.float32).tolist() == [1, 2]


def test_views_outlive_the_file(tmp_path: Path):
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add_tensor("t", (4,), "f32", np.arange(4, dtype=np.float32))
    with GGUFFile.open(tmp_path / "x.gguf") as f:
        view = f.data("t")
    assert view.view(np.float32).tolist() == [0, 1, 2, 3]


def test_a_closed_file_says_so(tmp_path: Path):
    f = GGUFFile.open(g.save(tmp_path, g.model()))
    name = f.metadata["general.architecture"]
    f.close()
    f.close()
    assert f.metadata["general.architecture"] is name
    with pytest.raises(GGUFError, match="file is closed"):
        f.metadata["llama.rope.freq_base"]
    with pytest.raises(GGUFError, match="file is closed"):
        f.data("a")


def test_tensors_larger_than_the_memory_used(tmp_path: Path):
    n = 64 << 20
    tracemalloc.start()
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add_tensor("t", (n,), "i8", lambda: (bytes(1 << 18) for _ in range(n >> 18)))
    with GGUFFile.open(tmp_path / "x.gguf") as f, GGUFWriter(tmp_path / "y.gguf") as w:
        w.add_tensor("t", (n,), "i8", f.data("t"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert os.path.getsize(tmp_path / "y.gguf") > n


def test_dialects(tmp_path: Path):
    with GGUFWriter(tmp_path / "x.gguf") as w:
        w.add_tensor("t", (256,), "iq3_k", np.zeros(110, np.uint8))
    GGUFFile.open(tmp_path / "x.gguf").close()
    with pytest.raises(GGUFError, match=r"type 138 \(iq3_k\) belongs to the ik dialect"):
        GGUFFile.open(tmp_path / "x.gguf", dialect="ggml")
    assert type_by_id(39, "ggml") is TYPES["mxfp4"]
    assert tensor_bytes("iq2_ks", (512, 3)) == 3 * (2 + 2 * 70)


@settings(max_examples=40, deadline=None)
@given(
    values=st.dictionaries(
        st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=12),
        st.one_of(
            st.booleans(),
            st.integers(-(1 << 63), (1 << 64) - 1),
            st.floats(width=32, allow_nan=False),
            st.text(st.characters(exclude_categories=["Cs"])),
            st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
            st.lists(st.integers(-(1 << 62), 1 << 62), min_size=1),
        ),
        max_size=8,
    )
)
def test_any_metadata_round_trips(values: dict[str, object], tmp_path_factory: pytest.TempPathFactory):
    values = {k: v for k, v in values.items() if not k.startswith(("general.", "split.", "tokenizer."))}
    path = tmp_path_factory.mktemp("any") / "x.gguf"
    with GGUFWriter(path) as w:
        for key, value in values.items():
            w.add(key, value)
    with GGUFFile.open(path) as f:
        got = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in f.metadata.items()}
    assert got == values
