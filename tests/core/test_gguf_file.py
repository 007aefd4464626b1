"""The header parser agrees with the `gguf` package's, and survives what is not a GGUF file."""

import gguf
import numpy as np
import pytest

from leadframe.errors import CheckpointError
from leadframe.gguf_file import read_gguf
from leadframe.models.default_model import default_model_path


def write(path, alignment=None):
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_int8("a.small", -3)
    writer.add_uint64("a.large", 2**40)
    writer.add_string("a.text", "héllo ▁ 🎉")
    writer.add_array("a.texts", ["", "x", "yé"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 0.25])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    raw = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("third", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_header_equals_what_the_gguf_package_reads(tmp_path, alignment):
    path = write(tmp_path / "x.gguf", alignment)
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    for key, value in file.metadata.items():
        assert value == reader.fields[key].contents(), key
    assert len(file.metadata) == len([k for k in reader.fields if not k.startswith("GGUF.")])
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape[::-1])
        assert info.type_name == tensor.tensor_type.name
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_the_default_models_header_is_read_quickly_and_exactly():
    file = read_gguf(default_model_path())
    assert file.metadata["general.architecture"] == "llama"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert len(file.tensors) == 272


def test_truncated_anywhere_is_one_error_with_a_remedy(tmp_path):
    data = write(tmp_path / "x.gguf").read_bytes()
    for size in [*range(4, len(data) - 100, 13), len(data) - 64]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="fetch it again"):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize("data", [b"", b"GGU", b"\x80\x04pickle", b"PK\x03\x04"])
def test_other_files_are_told_apart(tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        read_gguf(tmp_path / "x.gguf")


def patched(data, old, new):
    assert data.count(old) == 1
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d[:4] + (1).to_bytes(4, "little") + d[8:], "version 1"),
        (lambda d: d[:4] + (3).to_bytes(4, "big") + d[8:], "little endian"),
        (lambda d: d[:8] + (2**60).to_bytes(8, "little") + d[16:], "header"),
        (lambda d: d[:16] + (2**60).to_bytes(8, "little") + d[24:], "header"),
        (lambda d: patched(d, "héllo".encode(), b"h\xff\xffllo"), "not UTF-8"),
        (lambda d: patched(d, "yé".encode(), b"y\xff\xff"), "not UTF-8"),
    ],
)
def test_damage_is_described(tmp_path, change, said):
    path = write(tmp_path / "x.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("split.count", 3, "one of 3 parts"), ("general.alignment", 0, "alignment 0")],
)
def test_metadata_that_cannot_be_right(tmp_path, key, value, said):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=said):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(("name", "taken"), [(b"a.small", b"a.large"), (b"third", b"first")])
def test_a_name_that_comes_twice_is_refused(tmp_path, name, taken):
    path = write(tmp_path / "x.gguf")
    path.write_bytes(patched(path.read_bytes(), name, taken))
    with pytest.raises(CheckpointError, match="twice"):
        read_gguf(path)
