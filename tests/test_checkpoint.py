"""checkpoint.py against the writers of the three formats and transformers' configs; and every way to be refused."""
from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import checkpoint
import quant
import tiny
from checkpoint import open_checkpoint

ROOT = Path(checkpoint.__file__).parent


def refused(path, *words: str) -> str:
    """The message with which opening fails: a one-line ValueError, at once, without using memory."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(ValueError) as caught:
            open_checkpoint(path)
        seconds, peak_nbytes = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.isprintable() and len(message) < 1000
    assert seconds < 1 and peak_nbytes < 100e6
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def values_of(opened, name: str) -> torch.Tensor:
    info = opened.tensors[name]
    raw = torch.frombuffer(bytearray(opened.data(name)), dtype=torch.uint8)
    return quant.dequantize(raw, info.format, info.shape, torch.float64)


# GGUF, well-formed -------------------------------------------------------------------------------------------------

def test_every_kind_of_metadata(tmp_path):
    """What gguf's writer stores comes back, type by type."""
    kinds = gguf.GGUFValueType
    numbers = {kinds.UINT8: 255, kinds.INT8: -128, kinds.UINT16: 65535, kinds.INT16: -32768, kinds.UINT32: 2**32 - 1,
               kinds.INT32: -2**31, kinds.UINT64: 2**64 - 1, kinds.INT64: -2**63, kinds.FLOAT32: 0.15625,
               kinds.FLOAT64: math.pi, kinds.BOOL: True, kinds.STRING: "ünï\0code 😀"}
    path = tiny.write_gguf(tmp_path / "plain.gguf", tokenizer=None)
    writer, want = gguf.GGUFWriter(tmp_path / "m.gguf", "llama"), {}
    tiny.add_gguf_config(writer, tiny.tiny_config())
    for kind, value in numbers.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value] * 3, kinds.ARRAY, sub_type=kind)
        want |= {f"one.{kind.name}": value, f"many.{kind.name}": [value] * 3}
    tiny.finish(writer)
    with open_checkpoint(tmp_path / "m.gguf") as opened, open_checkpoint(path) as plain:
        assert {key: opened.metadata[key] for key in want} == want
        assert opened.metadata["general.architecture"] == "llama"
        assert plain.container == "gguf" and plain.generation == {} and plain.notes == []


@pytest.mark.parametrize("form", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k",
                                  "q4_k", "q5_k", "q6_k", "f64"])
def test_tensors_lie_where_gguf_reads_them(tmp_path, form):
    """Type, shape and bytes of each tensor agree with gguf's own reader, whatever the alignment."""
    kind = gguf.GGMLQuantizationType[form.upper()]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(128)
    tiny.add_gguf_config(writer, tiny.tiny_config())
    rng = np.random.default_rng(0)
    for i, rows in enumerate([(3,), (1,), (2, 5), (2, 3, 2)]):
        raw = rng.integers(0, 256, (*rows, nbytes * 2), dtype=np.uint8)
        writer.add_tensor(f"t{i}", raw, raw_dtype=kind)
    tiny.finish(writer)
    with open_checkpoint(tmp_path / "m.gguf") as opened:
        wanted = gguf.GGUFReader(tmp_path / "m.gguf").tensors
        assert [t.name for t in wanted] == list(opened.tensors)
        for tensor in wanted:
            info = opened.tensors[tensor.name]
            assert (info.format, info.offset, info.nbytes) == (form, tensor.data_offset, tensor.n_bytes)
            assert list(info.shape) == list(tensor.shape)[::-1]
            assert bytes(opened.data(tensor.name)) == tensor.data.tobytes()
            opened.release(tensor.name)
            assert bytes(opened.data(tensor.name)) == tensor.data.tobytes()


@pytest.mark.models
@pytest.mark.parametrize("model", ["smollm2", "qwen_05b", "qwen_15b"])
def test_real_files_open_at_once(model, request):
    """Vocabulary and merges included. (Measured: 0.04 to 0.13 s of one core.)"""
    path = request.getfixturevalue(model)
    started = time.perf_counter()
    with open_checkpoint(path) as opened:
        assert time.perf_counter() - started < 1
        assert len(opened.metadata["tokenizer.ggml.tokens"]) == opened.config.vocab
        assert opened.config.dtype == "quantized" and opened.config.max_context == opened.config.context


@pytest.mark.models
@pytest.mark.slow
def test_real_file_agrees_with_gguf(smollm2):
    with open_checkpoint(smollm2) as opened:
        reader = gguf.GGUFReader(smollm2)
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                assert opened.metadata[key] == field.contents(), key
        assert [(t.name, t.data_offset, t.n_bytes) for t in reader.tensors] == \
               [(t.name, t.offset, t.nbytes) for t in opened.tensors.values()]
        config = opened.config
        assert (config.family, len(config.layers), config.heads, config.kv_heads) == ("llama", 30, 9, 3)
        assert (config.norm_eps, config.rope.theta, config.tied) == (1e-5, 1e5, True)
        assert (config.bos_id, config.eos_ids, opened.interleaved_rope) == (1, (2,), True)


def test_split_files(tmp_path):
    """gguf's writer splits; the parts together equal the whole; a later or lonely part says what to do."""
    config = tiny.tiny_config("qwen2")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2", split_max_tensors=10)
    tiny.add_gguf_config(writer, config)
    tensors = {tiny.gguf_name(name): tensor for name, tensor in tiny.tiny_tensors(config).items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    tiny.finish(writer)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    with open_checkpoint(parts[0]) as opened:
        assert {info.part for info in opened.tensors.values()} == set(range(len(parts)))
        for name, tensor in tensors.items():
            assert torch.equal(values_of(opened, name), tensor.double())
    refused(parts[1], "open the first one", parts[0].name)
    shutil.copy(parts[0], tmp_path / "renamed.gguf")
    refused(tmp_path / "renamed.gguf", "split.count", "original names")
    parts[1].unlink()
    refused(parts[0], parts[1].name, "missing")


# GGUF, malformed ---------------------------------------------------------------------------------------------------

def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def uint32(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def array(key: str, kind: int, count: int, items: bytes) -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, count) + items)


def tensor(name: str = "t", dims=(32,), kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    return (text(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
            + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset))


ARCHITECTURE = entry("general.architecture", 8, text("llama"))
SIZES = [uint32(f"llama.{key}", value) for key, value in
         {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
          "attention.head_count": 4}.items()]
EPS = entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
SOUND = [ARCHITECTURE, *SIZES, EPS]


def make(path: Path, keys=(), tensors=(), num_keys=None, num_tensors=None, version=3, data=256) -> Path:
    body = struct.pack("<4sIQQ", b"GGUF", version, len(tensors) if num_tensors is None else num_tensors,
                       len(keys) if num_keys is None else num_keys) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(body + b"\0" * (-len(body) % 32 + data))
    return path


CASES = {
    "no keys but 2^60": (dict(num_keys=2**60, data=0), "key count", str(2**60)),
    "no tensors but 2^61": (dict(num_tensors=2**61, data=0), "tensor count", str(2**61)),
    "version 1": (dict(version=1), "version 1"),
    "big-endian": (dict(version=3 << 24), "big-endian"),
    "string of 2^63 bytes": (dict(keys=[entry("a", 8, struct.pack("<Q", 2**63))]), "'a'", str(2**63)),
    "key of 2^63 bytes": (dict(keys=[struct.pack("<Q", 2**63) + b"abcdefgh"]), "key 0", str(2**63)),
    "key of 100000 bytes": (dict(keys=[uint32("k" * 100000, 1)]), "key 0", "65535", "100000"),
    "empty key": (dict(keys=[uint32("", 1)]), "key 0", "1 to"),
    "key that is not UTF-8": (dict(keys=[struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)]), "UTF-8"),
    "key twice": (dict(keys=[uint32("a", 1), uint32("a", 2)]), "'a'", "two"),
    "value type 13": (dict(keys=[entry("a", 13, b"\0" * 8)]), "'a'", "13"),
    "array of 2^62 uint64": (dict(keys=[array("a", 10, 2**62, b"")]), "'a'", str(2**62)),
    "array of 2^62 strings": (dict(keys=[array("a", 8, 2**62, b"")]), "'a'", str(2**62)),
    "array of too many": (dict(keys=[array("a", 0, 2**22 + 1, b"\0" * (2**22 + 1))]), "'a'", str(2**22)),
    "array of arrays": (dict(keys=[array("a", 9, 1, struct.pack("<IQ", 4, 0))]), "'a'", "array"),
    "array item past the end": (dict(keys=[array("a", 8, 2, text("x") + struct.pack("<Q", 999999))]), "item 1"),
    "array item that is not UTF-8": (dict(keys=[array("a", 8, 1, struct.pack("<Q", 1) + b"\xff")]), "item 0", "UTF-8"),
    "alignment 0": (dict(keys=[uint32("general.alignment", 0)]), "general.alignment", "power of two"),
    "alignment 3": (dict(keys=[uint32("general.alignment", 3)]), "general.alignment", "found 3"),
    "alignment a string": (dict(keys=[entry("general.alignment", 8, text("32"))]), "general.alignment"),
    "alignment 2^31": (dict(keys=[uint32("general.alignment", 2**31)]), "general.alignment"),
    "200 dimensions": (dict(tensors=[tensor(dims=(1,) * 200)]), "'t'", "1 to 4", "200"),
    "no dimensions": (dict(tensors=[tensor(num_dims=0)]), "'t'", "1 to 4"),
    "dims overflow": (dict(tensors=[tensor(dims=(2**62, 4))]), "'t'", str(2**62)),
    "dim 0": (dict(tensors=[tensor(dims=(32, 0))]), "'t'", "above 0"),
    "offset 2^40": (dict(tensors=[tensor(offset=1 << 40)]), "'t'", "the file's end", str((1 << 40) + 128 + 64)),
    "offset 2^64 - 32": (dict(tensors=[tensor(offset=2**64 - 32)]), "'t'", "the file's end"),
    "offset 8": (dict(tensors=[tensor(offset=8)]), "'t'", "multiple of 32"),
    "tensor longer than the file": (dict(tensors=[tensor(dims=(2**20,))]), "'t'", "the file's end"),
    "tensor twice": (dict(tensors=[tensor(), tensor(offset=128)]), "'t'", "two"),
    "tensors overlap": (dict(tensors=[tensor(), tensor("u", offset=64)]), "'u'", "'t' ends"),
    "tensor type 99": (dict(tensors=[tensor(kind=99)]), "'t'", "type 99", "q4_k (12)"),
    "tensor type i8": (dict(tensors=[tensor(kind=24)]), "'t'", "type 24"),
    "rows that are no blocks": (dict(tensors=[tensor(dims=(33,), kind=8)]), "'t'", "multiple of 32", "33"),
    "name that writes to the terminal": (dict(tensors=[tensor("a\n\33[2J", kind=99)]), "'a??[2J'", "type 99"),
    "no name": (dict(tensors=[tensor("")]), "name of tensor 0"),
    "scores as uint8": (dict(keys=[array("tokenizer.ggml.scores", 0, 1, b"\1")]), "tokenizer.ggml.scores", "float32"),
    "tokens as int32": (dict(keys=[array("tokenizer.ggml.tokens", 5, 1, b"\0" * 4)]), "tokenizer.ggml.tokens",
                        "string", "int32"),
    "types as uint8": (dict(keys=[array("tokenizer.ggml.token_type", 0, 1, b"\1")]), "token_type", "uint8"),
    "tokens no array": (dict(keys=[uint32("tokenizer.ggml.tokens", 5)]), "tokenizer.ggml.tokens", "an array"),
    "fewer types than tokens": (dict(keys=[
        *SOUND, array("tokenizer.ggml.tokens", 8, 2, text("a") + text("b")),
        array("tokenizer.ggml.token_type", 5, 1, b"\1\0\0\0")]), "token_type", "2 items", "found 1"),
    "type -7": (dict(keys=[*SOUND, array("tokenizer.ggml.tokens", 8, 2, text("a") + text("b")),
                           array("tokenizer.ggml.token_type", 5, 2, struct.pack("<ii", 1, -7))]), "token_type", "-7"),
    "type 7": (dict(keys=[*SOUND, array("tokenizer.ggml.tokens", 8, 1, text("a")),
                          array("tokenizer.ggml.token_type", 4, 1, b"\7\0\0\0")]), "token_type", "1 to 6", "7"),
    "more tokens than rows": (dict(keys=[*SOUND, uint32("llama.vocab_size", 1),
                                         array("tokenizer.ggml.tokens", 8, 2, text("a") + text("b"))]), "tokens", "1"),
    "a million layers": (dict(keys=[ARCHITECTURE, uint32("llama.block_count", 10**6), *SIZES[1:], EPS,
                                    uint32("llama.vocab_size", 9)]), "'llama.block_count'", "1000000", "1024"),
    "head counts for one layer": (dict(keys=[
        ARCHITECTURE, *SIZES[:-1], EPS, array("llama.attention.head_count", 4, 1, b"\4\0\0\0")]),
        "'llama.attention.head_count'", "1 items for 2 layers"),
    "head counts that differ": (dict(keys=[
        ARCHITECTURE, *SIZES[:-1], EPS, array("llama.attention.head_count", 4, 2, b"\4\0\0\0\2\0\0\0")]),
        "'llama.attention.head_count'", "differs"),
    "no context length": (dict(keys=[ARCHITECTURE, EPS]), "'llama.context_length'", "missing"),
    "no layers": (dict(keys=[ARCHITECTURE, *SIZES[1:], EPS, uint32("llama.vocab_size", 9)]), "'llama.block_count'"),
    "width 0": (dict(keys=[*SOUND[:3], uint32("llama.embedding_length", 0), *SOUND[4:],
                           uint32("llama.vocab_size", 9)]), "'llama.embedding_length'", "is 0"),
    "experts": (dict(keys=[*SOUND, uint32("llama.expert_count", 8)]), "'llama.expert_count'", "8"),
    "values of another width": (dict(keys=[*SOUND, uint32("llama.attention.key_length", 16),
                                           uint32("llama.attention.value_length", 8)]), "key_length", "8"),
    "eos a string": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9),
                                entry("tokenizer.ggml.eos_token_id", 8, text("</s>"))]), "eos_token_id", "</s>"),
    "another architecture": (dict(keys=[entry("general.architecture", 8, text("rwkv7"))]), "rwkv7", "llama, qwen2"),
    "no architecture": (dict(keys=[uint32("a", 1)]), "model_type", "llama, qwen2"),
    "unknown rope": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9),
                                entry("llama.rope.scaling.type", 8, text("spiral"))]), "'spiral'", "yarn"),
    "rope of a list": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9), array("llama.rope.scaling.type", 4, 0, b"")]),
                       "rope scaling []"),
    "rope of 0 entries": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9), uint32("llama.rope.dimension_count", 0)]),
                          "'llama.rope.dimension_count'", "is 0"),
    "factor of 0": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9), uint32("llama.rope.scaling.factor", 0)]),
                    "'llama.rope.scaling.factor'", "is 0"),
    "old factor of 0": (dict(keys=[*SOUND, uint32("llama.vocab_size", 9), uint32("llama.rope.scale_linear", 0)]),
                        "'llama.rope.scale_linear'", "is 0"),
    "longrope without factors": (dict(keys=[*SOUND, entry("llama.rope.scaling.type", 8, text("longrope"))]),
                                 "rope_factors_short.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_gguf_refused(tmp_path, case):
    layout, *words = CASES[case]
    path = make(tmp_path / "m.gguf", **layout)
    refused(path, str(path), *words)


def test_gguf_sound(tmp_path):
    """What the cases above are built from is itself accepted, so each is refused for its own fault."""
    path = make(tmp_path / "m.gguf", SOUND + [uint32("llama.vocab_size", 9)], [tensor(), tensor("u", offset=128)])
    with open_checkpoint(path) as opened:
        assert opened.config.kv_heads == 4 and list(opened.tensors) == ["t", "u"]
    same = array("llama.attention.head_count", 4, 3, b"\4\0\0\0" * 3)       # a spare item is no fault
    with open_checkpoint(make(path, [ARCHITECTURE, *SIZES[:-1], EPS, same, uint32("llama.vocab_size", 9)])) as opened:
        assert opened.config.heads == 4


def test_gguf_version_2(tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    path.write_bytes(raw)
    assert open_checkpoint(path).config.vocab == 320


@pytest.fixture(scope="module")
def header(request, tmp_path_factory) -> bytes:
    """The real file's metadata, vocabulary and tensor table, behind which a sparse file fakes the weights."""
    path = Path(request.getfixturevalue("models_dir")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        path = tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    with open_checkpoint(path) as opened:
        start = min(info.offset for info in opened.tensors.values())
        return path.stat().st_size, bytes(opened.parts[0].view[:start])


def opens_or_refuses(path: Path) -> None:
    started = time.perf_counter()
    try:
        open_checkpoint(path).close()
    except ValueError as error:
        assert str(path) in str(error) and str(error).isprintable()
    assert time.perf_counter() - started < 2


@given(st.data())
def test_gguf_corrupted_anywhere(header, tmp_path_factory, data):
    """Flipped bytes in the header of a real file, or a file cut anywhere: it opens or says why not, quickly."""
    nbytes, sound = header
    raw = bytearray(sound)
    near_the_ends = st.one_of(st.integers(0, 2000), st.integers(len(raw) - 20000, len(raw) - 1),
                              st.integers(0, len(raw) - 1))
    for position in data.draw(st.lists(near_the_ends, min_size=1, max_size=4)):
        raw[position % len(raw)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "corrupted.gguf"
    path.write_bytes(raw)
    with open(path, "r+b") as file:
        file.truncate(data.draw(st.one_of(st.just(nbytes), st.integers(0, nbytes))))
    opens_or_refuses(path)


# Safetensors -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors(tmp_path, dtype, shards):
    config = tiny.tiny_config("qwen2")
    tiny.write_safetensors(tmp_path, "qwen2", dtype=dtype, shards=shards, generation={"eos_token_id": [5, 256, 7]})
    with open_checkpoint(tmp_path) as opened:
        for name, tensor in tiny.tiny_tensors(config).items():
            assert torch.equal(values_of(opened, name), tensor.to(getattr(torch, dtype)).double())
        assert opened.tensors.keys() == tiny.shapes(config).keys()
        assert opened.container == "safetensors" and not opened.interleaved_rope
        assert opened.config.dtype == dtype and opened.config.eos_ids == (256, 5, 7)
        assert opened.generation == {"eos_token_id": [5, 256, 7]}
        assert opened.metadata == json.loads((tmp_path / "config.json").read_text())


def safetensors_folder(folder: Path, header: dict | bytes, data: bytes = b"\0" * 64, nbytes: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw) if nbytes is None else nbytes) + raw + data)
    tiny.write_json(folder / "config.json", tiny.tiny_config())
    return folder


def stored(dtype="F32", shape=(4,), offsets=(0, 16)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


SAFETENSORS_CASES = {
    "header of 2^63 bytes": (dict(header={}, nbytes=2**63), "header length", str(2**63)),
    "header longer than the file": (dict(header={}, nbytes=67), "header length", "at most 66", "67"),
    "not JSON": (dict(header=b"{'a'}"), "JSON"),
    "not an object": (dict(header=b"[1]"), "JSON", "list"),
    "deep JSON": (dict(header=b'{"a":' + b"[" * 100000), "JSON"),
    "not UTF-8": (dict(header=b'{"\xff":1}'), "JSON"),
    "name twice": (dict(header=b'{"a":{},"a":{}}'), "JSON", "twice"),
    "entry no object": (dict(header={"a": 5}), "'a'", "shape"),
    "negative shape": (dict(header={"a": stored(shape=(-4,))}), "'a'", "-4"),
    "shape of booleans": (dict(header={"a": stored(shape=(True, 4))}), "'a'"),
    "huge shape": (dict(header={"a": stored(shape=(2**62, 4))}), "'a'", str(2**66)),
    "bytes too few": (dict(header={"a": stored(shape=(5,))}), "'a'", "20 bytes", "found 16"),
    "offsets backwards": (dict(header={"a": stored(offsets=(16, 0))}), "'a'", "-16"),
    "three offsets": (dict(header={"a": stored(offsets=(0, 16, 32))}), "'a'", "two data_offsets"),
    "past the end": (dict(header={"a": stored(offsets=(56, 72))}), "'a'", "the file's end"),
    "overlap": (dict(header={"a": stored(), "b": stored(offsets=(12, 28))}), "'b'", "'a' ends"),
    "FP8": (dict(header={"a": stored("F8_E4M3", (16,))}), "'a'", "F8_E4M3", "BF16"),
    "INT8": (dict(header={"a": stored("I8", (16,))}), "'a'", "I8"),
    "dtype no string": (dict(header={"a": stored(["F32"])}), "'a'", "F32"),
}


@pytest.mark.parametrize("case", SAFETENSORS_CASES)
def test_safetensors_refused(tmp_path, case):
    layout, *words = SAFETENSORS_CASES[case]
    refused(safetensors_folder(tmp_path, **layout), "model.safetensors", *words)


def test_safetensors_sound(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": stored(), "scalar": stored(shape=(), offsets=(16, 20))}
    with open_checkpoint(safetensors_folder(tmp_path, header)) as opened:
        assert opened.tensors["scalar"].shape == () and opened.tensors["a"].nbytes == 16


def test_shards_refused(tmp_path):
    index = tiny.write_safetensors(tmp_path, shards=2) / "model.safetensors.index.json"
    first, second = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    sound = json.loads(index.read_text())

    def with_map(**changes):
        tiny.write_json(index, sound | {"weight_map": sound["weight_map"] | changes})
        return tmp_path

    open_checkpoint(with_map()).close()
    refused(with_map(ghost=second), second, "'ghost'", "no such tensor")
    refused(with_map(ghost="../other.safetensors"), "weight_map", "../other.safetensors")
    refused(with_map(ghost="pytorch_model.bin"), "weight_map", "pytorch_model.bin")
    refused(with_map(ghost=5), "weight_map")
    tiny.write_json(index, {})
    refused(tmp_path, "weight_map")
    (with_map() / second).unlink()
    refused(tmp_path, second, "missing")


@given(st.data())
def test_safetensors_corrupted_anywhere(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "corrupted"
    file = tiny.write_safetensors(folder) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    header_nbytes = 8 + struct.unpack_from("<Q", raw)[0]
    for position in data.draw(st.lists(st.integers(0, header_nbytes - 1), max_size=3)):
        raw[position] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[:data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])
    opens_or_refuses(folder)


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_pickles_never_run(tmp_path):
    """Pickled weights and code beside a model stay untouched; safetensors are preferred where both exist."""
    marker, folder = tmp_path / "marker", tmp_path / "model"
    tiny.write_safetensors(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    torch.save(Payload(marker), folder / "pytorch_model.bin")
    torch.save(Payload(marker), folder / "old.pt", _use_new_zipfile_serialization=False)
    open_checkpoint(folder).close()
    (folder / "model.safetensors").unlink()
    refused(folder, "pickle", "safetensors or GGUF")
    refused(folder / "pytorch_model.bin", "pickle", "safetensors or GGUF")
    refused(folder / "old.pt", "pickle")
    assert not marker.exists()


# llama2.c ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_llama2c(tmp_path, version, tied):
    """Each tensor lies where the writer put it; int8 groups are within half a step of the weights."""
    path = tiny.write_llama2c(tmp_path / "m.bin", version, tie_word_embeddings=tied)
    config = tiny.tiny_config(tie_word_embeddings=tied)
    tensors = tiny.interleave_qk(tiny.tiny_tensors(config), config)
    with open_checkpoint(path) as opened:
        assert opened.tensors.keys() == {tiny.gguf_name(name) for name in tensors}
        for name, tensor in tensors.items():
            got = values_of(opened, tiny.gguf_name(name))
            if version == 2 and tensor.dim() == 2:
                step = tensor.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
                assert ((got.reshape(-1, 32) - tensor.reshape(-1, 32)).abs() <= 0.501 * step).all()
            else:
                assert torch.equal(got, tensor.double())
        assert (opened.container, opened.interleaved_rope, opened.config.tied) == ("llama2c", True, tied)
        assert (opened.config.eos_ids, opened.config.kv_heads, opened.config.context) == ((2, 1), 2, 512)
        assert opened.config.dtype == ("quantized" if version == 2 else "float32")


def test_llama2c_refused(tmp_path):
    path = tmp_path / "m.bin"
    for version in (0, 1, 2):
        raw = tiny.write_llama2c(path, version).read_bytes()
        path.write_bytes(raw[:-1])
        refused(path, str(path), f"expected {len(raw)} bytes", f"found {len(raw) - 1}")
        path.write_bytes(raw + b"\0")
        refused(path, f"expected {len(raw)} bytes")
        path.write_bytes(raw[:20])
        refused(path, "20")
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 3) + raw[8:])
    refused(path, "version 3")
    for group in (0, -32, 7, 2**31 - 1):
        path.write_bytes(raw[:37] + struct.pack("<i", group) + raw[41:])
        refused(path, "group_size", str(group))
    for i, name in enumerate(checkpoint.LLAMA2C_PARAMETERS):
        for value in (0, -2**31) + ((2**31 - 1,) if name != "max_position_embeddings" else ()):
            path.write_bytes(raw[:8 + 4 * i] + struct.pack("<i", value) + raw[12 + 4 * i:])
            refused(path, str(path))


def test_width_640_is_no_pickle(tmp_path):
    """A legacy header of that width starts with the two bytes that open a pickle."""
    path = tiny.write_llama2c(tmp_path / "m.bin", hidden_size=640, num_attention_heads=10, num_key_value_heads=5)
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert open_checkpoint(path).config.hidden == 640


# Twins, foreign files ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": None},
                                     {"hidden_size": 40, "num_attention_heads": 6, "head_dim": 16},
                                     {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
                                     {"rope_scaling": {"type": "linear", "factor": 4.0}},
                                     {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                       "original_max_position_embeddings": 128}}])
def test_same_config_from_every_form(tmp_path, family, changes):
    """Published form, transformers 5's form and GGUF describe one model."""
    published = open_checkpoint(tiny.write_safetensors(tmp_path / "a", family, **changes))
    saved = open_checkpoint(tiny.write_safetensors(tmp_path / "b", family, form="transformers5", **changes))
    twin = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", family, **changes))
    assert published.config == saved.config == twin.config


def test_longrope_gguf(tmp_path):
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.25] * 4, "long_factor": [1.5, 2.7] * 4,
               "original_max_position_embeddings": 128}
    with open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", rope_scaling=scaling)) as opened:
        rope = opened.config.rope
        assert (rope.kind, rope.original_context, rope.factor) == ("longrope", 128, 4.0)
        assert rope.short_factor == (1.0, 1.25) * 4 and rope.long_factor == (1.5, 2.7) * 4
        assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)), abs=1e-6)


def test_biases_are_taken_from_the_file(tmp_path):
    """From any layer: model.py then asks for those of all of them."""
    path = tiny.write_gguf(tmp_path / "m.gguf", attention_bias=True, mlp_bias=True)
    assert (c := open_checkpoint(path).config).qkv_bias and c.o_bias and c.mlp_bias
    plain = tiny.tiny_tensors(tiny.tiny_config())
    for name, *biases in (("self_attn.v_proj", True, False, False), ("self_attn.o_proj", False, True, False),
                          ("mlp.gate_proj", False, False, True)):
        tiny.write_gguf(path, tensors=plain | {f"model.layers.1.{name}.bias": torch.ones(4)})
        assert [(c := open_checkpoint(path).config).qkv_bias, c.o_bias, c.mlp_bias] == biases


def test_gguf_ends_with_any_of_three_ids(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.eom_token_id": 2**32 - 1}
    opened = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", extra=extra))
    assert opened.config.eos_ids == (256, 258)
    assert opened.notes == ["special token id 4294967295 is outside the vocabulary of 320 and is ignored"]


def test_linear_scaling_without_a_type(tmp_path):
    """llama.cpp's defaults: the type is linear, the factor is the old key's; type none scales nothing."""
    old, new, kind = "llama.rope.scale_linear", "llama.rope.scaling.factor", "llama.rope.scaling.type"
    for extra, want in (({old: 4.0}, 4.0), ({new: 4.0}, 4.0), ({old: 2.0, new: 4.0}, 4.0),
                        ({old: 4.0, kind: "linear"}, 4.0), ({new: 4.0, kind: "none"}, 1.0), ({new: 1.0}, 1.0)):
        rope = open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf", extra=extra)).config.rope
        assert (rope.kind, rope.factor) == ("default" if want == 1 else "linear", want)


def test_foreign_files(tmp_path):
    def write(name: str, raw: bytes) -> Path:
        (tmp_path / name).write_bytes(raw)
        return tmp_path / name

    refused(write("empty.gguf", b""), "not a model file")
    refused(write("short.gguf", b"GGUF"), "version", "found 0")
    refused(write("old.bin", b"tjgg\1\0\0\0" * 8), "old.bin")
    refused(write("zip.bin", b"PK\3\4rest"), "pickle")
    refused(write("notes.txt", b"hello, world"), "not a model file")
    refused(write("model.safetensors", b"\0" * 64), "config.json", str(tmp_path))
    refused(tmp_path, "no config.json", "empty.gguf, short.gguf")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "config.json", "model_type", "llama, qwen2")
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        open_checkpoint(tmp_path / "nothing-here")


def test_tensors_may_outlive_their_checkpoint(tmp_path):
    with open_checkpoint(tiny.write_gguf(tmp_path / "m.gguf")) as opened:
        kept = np.frombuffer(opened.data("output_norm.weight"), dtype=np.float32)
    assert kept.mean() == pytest.approx(1, abs=0.1)


def test_no_torch():
    code = "import sys, checkpoint; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# Configs -----------------------------------------------------------------------------------------------------------

def test_dtype_of_the_file(tmp_path):
    """Without a word in the config: what most weights are stored in."""
    tiny.write_safetensors(tmp_path, dtype="bfloat16", torch_dtype=None)
    assert open_checkpoint(tmp_path).config.dtype == "bfloat16"


def test_ids_of_the_end(tmp_path):
    tiny.write_safetensors(tmp_path, eos_token_id=1, bos_token_id=9, generation={"eos_token_id": [1, 5, 320]})
    opened = open_checkpoint(tmp_path)
    assert (opened.config.eos_ids, opened.config.bos_id) == ((1, 5), 9)
    assert opened.notes == ["special token id 320 is outside the vocabulary of 320 and is ignored"]
    tiny.write_json(tmp_path / "generation_config.json", {"eos_token_id": "</s>"})
    refused(tmp_path, "generation_config.json", "eos_token_id", "</s>")


def test_unsupported_models(tmp_path):
    for method in ("gptq", "awq", "fp8", "x" * 9999):
        tiny.write_safetensors(tmp_path, quantization_config={"quant_method": method, "bits": 4})
        refused(tmp_path, "quantization_config", method[:200], "unquantized")
    for value in ("awq", [4], False, {}):
        tiny.write_safetensors(tmp_path, quantization_config=value)
        refused(tmp_path, "quantization_config", "of unknown kind" if value == {} else repr(value), "unquantized")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "an object")
