"""Model files: three containers, one description of what is inside.

Owns the parsers of GGUF, safetensors folders and llama2.c files; what their settings mean is families.py's. Knows
nothing of torch and never turns bytes into numbers; weights.py does. Start at `open_checkpoint`.

A file is taken for hostile until checked: every count, size, offset and type is compared with what the file can hold
before anything of that size is touched. Nothing here unpickles, and no code that lies beside a model is ever imported.
"""
from __future__ import annotations

import json
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import quant
from families import MAX_LAYERS, Fields, ModelConfig, check_family, configure, head_dim_of, is_count

MAX_HEADER_NBYTES = 64 << 20    # names, metadata and vocabulary; the largest public models need 40 MB
MAX_ARRAY_ITEMS = 1 << 22       # items of one metadata array; the largest public vocabularies have 262144 tokens
MAX_NAME_NBYTES = 65535         # longest key or tensor name; the limit for keys in the GGUF specification


# What a checkpoint says --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from `offset` of the checkpoint's file number `part`."""
    name: str
    format: str                     # key of quant.FORMATS
    shape: tuple[int, ...]          # outermost first, as in torch
    part: int
    offset: int
    nbytes: int


class MappedFile:
    """A file's bytes, mapped read-only."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise damaged(path, "file", "a model", "0 bytes")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self.map)

    def close(self) -> None:
        try:
            self.view.release()
            self.map.close()
        except BufferError:         # a tensor still reads from it: the mapping goes with the last of them
            pass


class Checkpoint:
    """An open model file or folder: its config, its metadata, and where its tensors lie. Use as a context manager.

    container         "gguf" | "safetensors" | "llama2c"
    metadata          GGUF keys and values, or config.json
    generation        generation_config.json, or {}
    tensors           name as in the file -> TensorInfo; llama2.c files have no names and get GGUF's
    interleaved_rope  rows of Q and K are stored in the pairs (2i, 2i+1) that rope rotates, not as two halves
    notes             what a user should know, a line each
    """

    def __init__(self, path: Path, container: str, parts: list[MappedFile], tensors: dict[str, TensorInfo],
                 metadata: Mapping, config: ModelConfig, generation: Mapping, interleaved_rope: bool):
        self.path, self.container, self.parts, self.tensors = path, container, parts, tensors
        self.metadata, self.generation, self.interleaved_rope = metadata, generation, interleaved_rope
        self.config, self.notes = drop_foreign_ids(config)

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, not copied."""
        info = self.tensors[name]
        return self.parts[info.part].view[info.offset:info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Give back the memory that reading this tensor took; when touched again, it is read from disk again."""
        info = self.tensors[name]
        spare = info.offset % mmap.PAGESIZE
        self.parts[info.part].map.madvise(mmap.MADV_DONTNEED, info.offset - spare, info.nbytes + spare)

    def close(self, *_) -> None:
        for part in self.parts:
            part.close()

    def __enter__(self) -> Checkpoint:
        return self

    __exit__ = close


def drop_foreign_ids(config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Special ids outside the vocabulary can never occur: config without them, and a note about each."""
    ids = dict.fromkeys(config.eos_ids + (() if config.bos_id is None else (config.bos_id,)))
    foreign = [i for i in ids if not 0 <= i < config.vocab]
    notes = [f"special token id {i} is outside the vocabulary of {config.vocab} and is ignored" for i in foreign]
    eos_ids = tuple(i for i in config.eos_ids if i not in foreign)
    return replace(config, eos_ids=eos_ids, bos_id=None if config.bos_id in foreign else config.bos_id), notes


def plain(value: object) -> str:
    """What a file says, for a message: short and without control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:200])


def damaged(path: Path, field: str, expected: object, found: object) -> ValueError:
    return ValueError(f"{path}: {plain(field)}: expected {plain(expected)}, found {plain(found)}: "
                      "the file is damaged or incomplete, fetch it again")


# Opening -----------------------------------------------------------------------------------------------------------

PICKLE_ADVICE = ("pickle files can run any code and are not opened: use the model's safetensors or GGUF file, or "
                 "convert it with transformers' save_pretrained")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file, a folder with config.json and safetensors, or a llama2.c .bin.

    Everything is validated here, nothing large is read. ValueError says what is wrong with which field of which file.
    """
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return open_gguf(path)
    if is_pickle(magic):
        raise ValueError(f"{path}: {PICKLE_ADVICE}")
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: a safetensors file needs the config.json beside it: give the folder {path.parent}")
    if path.suffix == ".bin":
        return open_llama2c(path)
    raise ValueError(f"{path}: not a model file: give a .gguf file, a folder with config.json and safetensors, "
                     "or a llama2.c .bin")


def is_pickle(magic: bytes) -> bool:
    """torch.save writes a zip or, before 1.6, a bare pickle. (A llama2.c header of width 640 starts 80 02 00 00.)"""
    bare = magic[:1] == b"\x80" and magic[1:2] in (b"\2", b"\3", b"\4", b"\5") and magic[2:4] != b"\0\0"
    return bare or magic == b"PK\3\4"


def lay_out(part: MappedFile, tensors: Iterable[TensorInfo], start: int) -> dict[str, TensorInfo]:
    """Tensors of one file by name, after checking that each lies behind `start`, inside the file and on its own."""
    by_name = {}
    for info in tensors:
        if info.name in by_name:
            raise damaged(part.path, f"tensor '{info.name}'", "one of that name", "two")
        if not start <= info.offset <= len(part.view) - info.nbytes:
            raise damaged(part.path, f"tensor '{info.name}'", f"bytes {start} to {len(part.view)}, the file's end",
                          f"bytes {info.offset} to {info.offset + info.nbytes}")
        by_name[info.name] = info
    for left, right in pairwise(sorted(by_name.values(), key=lambda info: (info.offset, info.nbytes))):
        if left.offset + left.nbytes > right.offset:
            raise damaged(part.path, f"tensor '{right.name}'",
                          f"offset {left.offset + left.nbytes} or more, where '{left.name}' ends", right.offset)
    return by_name


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The largest tensor's type (norms may be in a wider one), or "quantized" if any is; whole numbers do not count."""
    names = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    dtypes = [names.get(info.format, "quantized") for info in sorted(tensors.values(), key=lambda info: info.nbytes)
              if info.format not in ("i64", "bool")]
    return "quantized" if "quantized" in dtypes else dtypes[-1] if dtypes else "float32"


# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ---------------------------------------------------

VALUE_TYPES = {0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h"), 4: ("uint32", "I"),
               5: ("int32", "i"), 6: ("float32", "f"), 7: ("bool", "?"), 8: ("string", ""), 9: ("array", ""),
               10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d")}
STRING, ARRAY = 8, 9
TENSOR_TYPES = {row.ggml_id: row for row in quant.FORMATS.values() if row.ggml_id is not None}
ARRAY_TYPES = {"tokenizer.ggml.tokens": ("string",), "tokenizer.ggml.merges": ("string",),
               "tokenizer.ggml.scores": ("float32",), "tokenizer.ggml.token_type": ("int32", "uint32")}
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file, or the first file of a split one (`-00001-of-0000N.gguf`), whose others lie beside it."""
    parts = [MappedFile(path)]
    metadata, tensors = read_gguf(parts[0], 0)
    for other in split_paths(path, metadata):
        if not other.exists():
            raise ValueError(f"{other}: missing, but '{path.name}' is one of several files: fetch them all")
        parts.append(MappedFile(other))
        _, more = read_gguf(parts[-1], len(parts) - 1)
        if both := tensors.keys() & more.keys():
            raise damaged(other, f"tensor '{min(both)}'", "one of that name in all files", "two")
        tensors |= more
    config = gguf_config(path, metadata, tensors, parts)
    check_vocabulary(path, metadata, config.vocab)
    return Checkpoint(path, "gguf", parts, tensors, metadata, config, generation={},
                      interleaved_rope=config.family == "llama")


def split_paths(path: Path, metadata: Mapping) -> list[Path]:
    """The files that follow the first one of a split model."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    name = SPLIT_NAME.fullmatch(path.name)
    if not name or int(name[3]) != count:
        raise ValueError(f"{path}: key 'split.count' is {count}, but the name is not NAME-00001-of-{count:05}.gguf: "
                         "give the files their original names")
    paths = [path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if metadata.get("split.no") != 0 or path != paths[0]:
        raise ValueError(f"{path}: part {int(name[2])} of {count}: open the first one, {paths[0].name}")
    return paths[1:]


def read_gguf(file: MappedFile, part: int) -> tuple[dict, dict[str, TensorInfo]]:
    """Metadata and tensors of one GGUF file of version 2 or 3."""
    cursor = Cursor(file)
    cursor.take(4, "magic")
    version = cursor.scalar("I", "version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise ValueError(f"{file.path}: a big-endian GGUF file: get the little-endian one")
        raise ValueError(f"{file.path}: GGUF version {version} is not 2 or 3: get a current file")
    num_tensors = cursor.count("tensor count", 8 + 4 + 8 + 4 + 8)
    num_keys = cursor.count("key count", 8 + 4 + 1)
    metadata: dict = {}
    for i in range(num_keys):
        key = cursor.name(f"key {i}")
        if key in metadata:
            raise damaged(file.path, f"key '{key}'", "one of that name", "two")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not is_count(alignment) or alignment & (alignment - 1) or alignment > MAX_HEADER_NBYTES:
        raise damaged(file.path, "key 'general.alignment'", "a power of two", alignment)
    stubs = [cursor.tensor_info(i, part) for i in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    for info in stubs:
        if info.offset % alignment:
            raise damaged(file.path, f"offset of tensor '{info.name}'", f"a multiple of {alignment}", info.offset)
    return metadata, lay_out(file, [replace(info, offset=start + info.offset) for info in stubs], start)


class Cursor:
    """Walks through the header of a GGUF file and never past its end."""

    def __init__(self, file: MappedFile):
        self.path, self.map, self.view, self.position = file.path, file.map, file.view, 0
        self.end = min(len(file.view), MAX_HEADER_NBYTES)

    def take(self, nbytes: int, what: str) -> int:
        """Step over nbytes and return where they start."""
        start = self.position
        if nbytes > self.end - start:
            raise damaged(self.path, what, f"{nbytes} bytes", f"{self.end - start} before the header must end")
        self.position += nbytes
        return start

    def scalar(self, code: str, what: str):
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.map, self.take(layout.size, what))[0]

    def count(self, what: str, least_nbytes: int) -> int:
        """A number of things that take at least `least_nbytes` bytes each."""
        count = self.scalar("Q", what)
        if count > (room := (self.end - self.position) // least_nbytes):
            raise damaged(self.path, what, f"at most {room}, for {self.end - self.position} bytes", count)
        return count

    def string(self, what: str) -> str:
        nbytes = self.scalar("Q", f"length of {what}")
        start = self.take(nbytes, what)
        try:
            return self.map[start:start + nbytes].decode()
        except UnicodeDecodeError as error:
            raise damaged(self.path, what, "UTF-8", error.reason) from None

    def name(self, what: str) -> str:
        name = self.string(what)
        if not 0 < len(name) <= MAX_NAME_NBYTES:
            raise damaged(self.path, what, f"a name of 1 to {MAX_NAME_NBYTES} characters", len(name))
        return name

    def type(self, what: str) -> int:
        number = self.scalar("I", f"type of {what}")
        if number not in VALUE_TYPES:
            raise damaged(self.path, f"type of {what}", "0 to 12", number)
        return number

    def value(self, key: str):
        what = f"key '{key}'"
        kind = self.type(what)
        if key in ARRAY_TYPES and kind != ARRAY:
            raise damaged(self.path, what, "an array", VALUE_TYPES[kind][0])
        if kind == ARRAY:
            return self.array(key, what)
        return self.string(what) if kind == STRING else self.scalar(VALUE_TYPES[kind][1], what)

    def array(self, key: str, what: str) -> list:
        kind = self.type(what)
        name, code = VALUE_TYPES[kind]
        allowed = ARRAY_TYPES.get(key, (name,))
        if kind == ARRAY or name not in allowed:
            raise damaged(self.path, what, f"an array of {' or '.join(allowed)}", f"one of {name}")
        item_nbytes = struct.calcsize("<" + code) or 8      # a string is at least its length
        count = self.count(f"length of {what}", item_nbytes)
        if count > MAX_ARRAY_ITEMS:
            raise damaged(self.path, f"length of {what}", f"at most {MAX_ARRAY_ITEMS}", count)
        if kind == STRING:
            return self.strings(count, what)
        start = self.take(count * item_nbytes, what)
        return self.view[start:self.position].cast(code).tolist()

    def strings(self, count: int, what: str) -> list[str]:
        """The loop that decides how fast a file opens: a vocabulary and its merges are 300,000 strings."""
        raw, position, end = self.map, self.position, self.end
        length_of = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                nbytes, = length_of(raw, position)
                position += 8
                if nbytes > end - position:
                    raise damaged(self.path, f"{what}, item {len(result)}", f"{nbytes} bytes", max(end - position, 0))
                result.append(raw[position:position + nbytes].decode())
                position += nbytes
        except struct.error:
            raise damaged(self.path, what, f"{count} strings", f"the file's end after {len(result)}") from None
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"{what}, item {len(result)}", "UTF-8", error.reason) from None
        self.position = position
        return result

    def tensor_info(self, index: int, part: int) -> TensorInfo:
        """One tensor's entry; its offset still counts from the start of the data."""
        name = self.name(f"name of tensor {index}")
        what = f"tensor '{name}'"
        num_dims = self.scalar("I", f"dimensions of {what}")
        if not 1 <= num_dims <= 4:
            raise damaged(self.path, f"dimensions of {what}", "1 to 4", num_dims)
        shape = tuple(self.scalar("Q", f"shape of {what}") for _ in range(num_dims))[::-1]
        if not all(shape) or math.prod(shape) >= 1 << 63:
            raise damaged(self.path, f"shape of {what}", "sizes above 0 with a product below 2^63", list(shape))
        number = self.scalar("I", f"type of {what}")
        if number not in TENSOR_TYPES:
            known = ", ".join(f"{row.name} ({i})" for i, row in sorted(TENSOR_TYPES.items()))
            raise ValueError(f"{self.path}: {plain(what)} has type {number}, which is not supported: known are {known}")
        row = TENSOR_TYPES[number]
        if shape[-1] % row.block:
            raise damaged(self.path, f"shape of {what}", f"rows that are a multiple of {row.block}", shape[-1])
        offset = self.scalar("Q", f"offset of {what}")
        return TensorInfo(name, row.name, shape, part, offset, math.prod(shape) // row.block * row.nbytes)


def check_vocabulary(path: Path, metadata: Mapping, vocab: int) -> None:
    """The model has a row for each token; scores and types, where present, are one a token, and types are known."""
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > vocab:
        raise damaged(path, "key 'tokenizer.ggml.tokens'", f"at most {vocab} items, the model's vocabulary", num_tokens)
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if len(metadata.get(key, ())) not in (0, num_tokens):
            raise damaged(path, f"key '{key}'", f"{num_tokens} items, one a token", len(metadata[key]))
    if strange := set(metadata.get("tokenizer.ggml.token_type", ())) - set(range(1, 7)):
        raise damaged(path, "key 'tokenizer.ggml.token_type'", "types from 1 to 6", min(strange))


# GGUF metadata in config.json's words ------------------------------------------------------------------------------

GGUF_FIELDS = {
    "hidden_size": "{arch}.embedding_length", "intermediate_size": "{arch}.feed_forward_length",
    "num_hidden_layers": "{arch}.block_count", "num_attention_heads": "{arch}.attention.head_count",
    "num_key_value_heads": "{arch}.attention.head_count_kv", "head_dim": "{arch}.attention.key_length",
    "max_position_embeddings": "{arch}.context_length", "vocab_size": "{arch}.vocab_size",
    "rms_norm_eps": "{arch}.attention.layer_norm_rms_epsilon", "rope_theta": "{arch}.rope.freq_base",
    "rope_dim": "{arch}.rope.dimension_count", "num_nextn_predict_layers": "{arch}.nextn_predict_layers",
    "bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id",
}
GGUF_ROPE_FIELDS = {
    "rope_type": "{arch}.rope.scaling.type", "factor": "{arch}.rope.scaling.factor",
    "original_max_position_embeddings": "{arch}.rope.scaling.original_context_length",
    "attention_factor": "{arch}.rope.scaling.attn_factor", "beta_fast": "{arch}.rope.scaling.yarn_beta_fast",
    "beta_slow": "{arch}.rope.scaling.yarn_beta_slow",
}
GGUF_EOS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_config(path: Path, metadata: Mapping, tensors: Mapping[str, TensorInfo],
                parts: list[MappedFile]) -> ModelConfig:
    """ModelConfig from GGUF keys. What the file can show (biases, a head of its own) is taken from its tensors."""
    arch = metadata.get("general.architecture")
    keys = {name: key.format(arch=arch) for name, key in (GGUF_FIELDS | GGUF_ROPE_FIELDS).items()}
    fields = Fields(path, {name: shortest(metadata.get(keys[name])) for name in GGUF_FIELDS}, keys)
    fields["model_type"] = arch
    check_family(fields)
    for name in ("max_position_embeddings", "rms_norm_eps"):
        fields.read(name)       # families have defaults for them, but for config.json only
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        fields[name] = same_in_all_layers(fields, name)
    if fields["num_nextn_predict_layers"]:  # here they count as layers, there they do not
        fields["num_hidden_layers"] = fields.count("num_hidden_layers") - fields.count("num_nextn_predict_layers")
    if experts := metadata.get(f"{arch}.expert_count"):
        raise ValueError(f"{path}: key '{arch}.expert_count' is {experts}: mixtures of experts are not supported")
    value_length = metadata.get(f"{arch}.attention.value_length", fields["head_dim"])
    if value_length != fields["head_dim"]:
        raise fields.error("head_dim", f"but values have {value_length}: heads of two widths are not supported")
    if fields["vocab_size"] is None:
        embedding, tokens = tensors.get("token_embd.weight"), metadata.get("tokenizer.ggml.tokens")
        fields["vocab_size"] = embedding.shape[0] if embedding else tokens and len(tokens)
    fields["eos_token_id"] = [metadata[key] for key in GGUF_EOS if key in metadata]
    fields["rope_scaling"] = gguf_rope(fields, arch, metadata, tensors, parts)
    if fields["rope_dim"] is not None:
        fields["partial_rotary_factor"] = fields.count("rope_dim") / head_dim_of(fields)
    biased = {name.split(".")[2] for name in tensors if re.fullmatch(r"blk\.\d+\.\w+\.bias", name)}
    return replace(configure(fields), tied="output.weight" not in tensors, dtype=stored_dtype(tensors),
                   qkv_bias=not biased.isdisjoint(("attn_q", "attn_k", "attn_v")), o_bias="attn_output" in biased,
                   mlp_bias=not biased.isdisjoint(("ffn_gate", "ffn_up", "ffn_down")))


def shortest(value):
    """The shortest decimal that rounds to the same float32: 1e-05 was meant where 9.999999747378752e-06 is stored."""
    if not isinstance(value, float) or not 1e-37 < abs(value) < 1e38:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def same_in_all_layers(fields: Fields, name: str):
    """GGUF may give a number for each layer; ours must agree."""
    value = fields[name]
    if not isinstance(value, list):
        return value
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    if len(value) < num_layers:
        raise fields.error(name, f"has {len(value)} items for {num_layers} layers", value=False)
    if len(set(value[:num_layers])) > 1:
        raise fields.error(name, "differs between layers: not supported", value=False)
    return value[0]


def gguf_rope(fields: Fields, arch: str, metadata: Mapping, tensors: Mapping[str, TensorInfo],
              parts: list[MappedFile]) -> dict | None:
    """rope_scaling as config.json has it. (llama3's scaling is no metadata here but the tensor rope_freqs.weight.)"""
    keys = fields.keys
    if keys["factor"] not in metadata:
        keys["factor"] = f"{arch}.rope.scale_linear"     # in files from before scaling had a type
    scaling = {name: shortest(metadata[keys[name]]) for name in GGUF_ROPE_FIELDS if keys[name] in metadata}
    kind = scaling.setdefault("rope_type", "linear" if scaling.get("factor", 1.0) != 1.0 else "none")
    if kind == "yarn" and scaling.pop("attention_factor", 1.0) != 1.0:
        raise fields.error("attention_factor", "together with yarn scaling is not supported", value=False)
    if kind == "longrope":
        for name in ("short", "long"):
            info = tensors.get(f"rope_factors_{name}.weight")
            if info is None or info.format != "f32" or info.nbytes > 1 << 16:
                raise damaged(fields.source, f"tensor 'rope_factors_{name}.weight'", "float32 factors", info)
            raw = parts[info.part].view[info.offset:info.offset + info.nbytes]
            scaling[f"{name}_factor"] = [shortest(factor) for factor in raw.cast("f")]
    return None if kind == "none" else scaling


# Safetensors: https://huggingface.co/docs/safetensors --------------------------------------------------------------

SAFETENSORS_TYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "BOOL": "bool"}


def open_folder(folder: Path) -> Checkpoint:
    """A model folder in the published form: config.json and one safetensors file or an index of several."""
    if not (folder / "config.json").is_file():
        ggufs = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
        raise ValueError(f"{folder}: no config.json there: give a model folder or a file ({ggufs or 'no .gguf'})")
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    fields = Fields(folder / "config.json", config)
    check_family(fields)
    if (method := fields.get("quantization_config")) is not None:
        name = method.get("quant_method", "of unknown kind") if isinstance(method, dict) else repr(method)
        raise fields.error("quantization_config", f"is {plain(name)}: get the unquantized model or a GGUF", value=False)
    parts, tensors = map_safetensors(folder, safetensors_files(folder))
    eos_sources = (fields, Fields(generation_path, generation))
    fields["eos_token_id"] = [i for source in eos_sources for i in source.token_ids("eos_token_id")]
    model = configure(fields)
    if model.dtype not in ("float64", "float32", "bfloat16", "float16"):
        model = replace(model, dtype=stored_dtype(tensors))
    return Checkpoint(folder, "safetensors", parts, tensors, config, model, generation, interleaved_rope=False)


def open_heads(folder: str | Path, model: ModelConfig) -> Checkpoint:
    """A folder of draft heads trained for a model: its only safetensors file and its config.json, which describes a
    decoder of one layer; without one, or for heads that have no layer, the sizes are the model's."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder: give one with the heads' safetensors file and config.json")
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) != 1:
        safetensors_files(folder)  # says so where there are only pickles
        raise ValueError(f"{folder}: holds {len(files)} safetensors files but heads have one: leave only theirs")
    parts, tensors = map_safetensors(folder, {files[0]: None})
    path = folder / "config.json"
    settings = read_json(path) if path.exists() else {}
    config = model
    if "num_attention_heads" in settings:
        fields = Fields(path, settings)
        config = configure(Fields(path, settings | {"model_type": fields.get("model_type", "llama")}))
    return Checkpoint(folder, "safetensors", parts, tensors, settings, config, {}, interleaved_rope=False)


def map_safetensors(folder: Path, files: Mapping[str, list[str] | None]) -> tuple[list[MappedFile], dict]:
    """The files, mapped, and their tensors; of each file the named ones (None: all)."""
    parts, tensors = [], {}
    for part, (file, names) in enumerate(files.items()):
        parts.append(MappedFile(folder / file))
        found = read_safetensors(parts[-1], part)
        if missing := [name for name in names or () if name not in found]:
            raise damaged(folder / file, f"tensor '{missing[0]}'", "present, as the index says", "no such tensor")
        tensors |= {name: found[name] for name in names or found}
    return parts, tensors


def safetensors_files(folder: Path) -> dict[str, list[str] | None]:
    """Names of the weight files, each with the tensors that the index expects there (None: whatever it holds)."""
    if (folder / "model.safetensors").exists():
        return {"model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if any(file.suffix in (".bin", ".pt", ".pth", ".ckpt") for file in folder.iterdir()):
            raise ValueError(f"{folder}: no model.safetensors there, only pickled weights: {PICKLE_ADVICE}")
        raise ValueError(f"{folder}: no model.safetensors there and no model.safetensors.index.json: fetch the weights")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise damaged(index, "key 'weight_map'", "file names by tensor", type(weight_map).__name__)
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, []).append(name)
    for file in files:
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise damaged(index, "key 'weight_map'", "safetensors files of the same folder", file)
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}: missing, but {index.name} lists it: fetch the whole model")
    return files


def read_safetensors(file: MappedFile, part: int) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file: 8 bytes header length, a JSON header, the data."""
    if len(file.view) < 8:
        raise damaged(file.path, "file", "8 bytes or more", len(file.view))
    header_nbytes, = struct.unpack_from("<Q", file.view)
    start = 8 + header_nbytes
    if header_nbytes > (most := min(MAX_HEADER_NBYTES, len(file.view) - 8)):
        raise damaged(file.path, "header length", f"at most {most}", header_nbytes)
    header = parse_json(file.path, bytes(file.view[8:start]), unique_names)
    header.pop("__metadata__", None)
    tensors = [safetensors_info(file.path, name, entry, start, part) for name, entry in header.items()]
    return lay_out(file, tensors, start)


def safetensors_info(path: Path, name: str, entry: object, start: int, part: int) -> TensorInfo:
    what = f"tensor '{name}'"
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not is_size_list(shape) or not is_size_list(offsets) or len(offsets) != 2:
        raise damaged(path, what, "a shape and two data_offsets", {"shape": shape, "data_offsets": offsets})
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise ValueError(f"{path}: {plain(what)} has dtype {plain(dtype)}, which is not supported: "
                         f"get a model in {', '.join(SAFETENSORS_TYPES)}, or a GGUF")
    row = quant.FORMATS[SAFETENSORS_TYPES[dtype]]
    nbytes = math.prod(shape) * row.nbytes
    if offsets[1] - offsets[0] != nbytes:
        raise damaged(path, what, f"{nbytes} bytes for shape {shape} in {dtype}", offsets[1] - offsets[0])
    return TensorInfo(name, row.name, tuple(shape), part, start + offsets[0], nbytes)


def is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def read_json(path: Path) -> dict:
    if path.stat().st_size > MAX_HEADER_NBYTES:
        raise damaged(path, "file", f"at most {MAX_HEADER_NBYTES} bytes", path.stat().st_size)
    return parse_json(path, path.read_bytes())


def parse_json(path: Path, raw: bytes, pairs_hook: Callable | None = None) -> dict:
    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "JSON", "an object", str(error) or type(error).__name__) from None
    if not isinstance(value, dict):
        raise damaged(path, "JSON", "an object", type(value).__name__)
    return value


def unique_names(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name that stands there twice")
    return result


# llama2.c: https://github.com/karpathy/llama2.c/blob/master/export.py ----------------------------------------------

LLAMA2C_PARAMETERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "vocab_size", "max_position_embeddings")


def open_llama2c(path: Path) -> Checkpoint:
    """A .bin of llama2.c: legacy (no magic, float32), version 1 (float32) or version 2 (int8 in groups).

    Version 2 keeps each matrix as its int8 values followed by a float32 scale for each group: the reader, runq.c,
    expects it so. The format has no names and no room for theta, eps and ids: llama2.c's own are used. Its texts end
    with EOS, or with the BOS of the next one.
    """
    file = MappedFile(path)
    if len(file.view) < 28:
        raise damaged(path, "file", "28 bytes or more", len(file.view))
    magic, version = struct.unpack_from("<Ii", file.view)
    if magic != 0x616B3432:
        version, start, numbers = 0, 28, struct.unpack_from("<7i", file.view)
        tied, group = numbers[5] > 0, 0
        numbers = numbers[:5] + (abs(numbers[5]), numbers[6])       # the sign says whether the head is shared
    elif len(file.view) < 256 or version not in (1, 2):
        raise damaged(path, "header", "256 bytes of version 1 or 2", f"{len(file.view)} bytes, version {version}")
    else:
        start, numbers = 256, struct.unpack_from("<7i", file.view, 8)
        tied, group = struct.unpack_from("<?i", file.view, 36)
    metadata = dict(zip(LLAMA2C_PARAMETERS, numbers), model_type="llama", version=version, rms_norm_eps=1e-5,
                    rope_theta=10000.0, bos_token_id=1, eos_token_id=[2, 1], tie_word_embeddings=tied)
    config = configure(Fields(path, metadata))
    tensors = llama2c_tensors(file, config, version, group, start)
    config = replace(config, dtype=stored_dtype(tensors))
    return Checkpoint(path, "llama2c", [file], tensors, metadata, config, generation={}, interleaved_rope=True)


def llama2c_tensors(file: MappedFile, config: ModelConfig, version: int, group: int,
                    start: int) -> dict[str, TensorInfo]:
    """Where each tensor must lie, which fixes the size of the whole file."""
    tensors, offset = [], start
    for name, shape in llama2c_order(config, version):
        num_weights = math.prod(shape)
        grouped = version == 2 and len(shape) == 2
        if grouped and (group < 1 or num_weights % group):
            raise damaged(file.path, "group_size", f"a divisor of the {num_weights} weights of {name}", group)
        nbytes = num_weights + num_weights // group * 4 if grouped else num_weights * 4
        if name:
            tensors.append(TensorInfo(name, "q8_llama2c" if grouped else "f32", shape, 0, offset, nbytes))
        offset += nbytes
    if offset != len(file.view):
        raise damaged(file.path, "file, as a llama2.c model", f"{offset} bytes by its header", len(file.view))
    return lay_out(file, tensors, start)


def llama2c_order(config: ModelConfig, version: int) -> list[tuple[str | None, tuple[int, ...]]]:
    """Canonical names and shapes in the order of the file; None for the legacy table of cosines and sines."""
    D, F, V, A = config.hidden, config.ffn, config.vocab, config.head_dim
    H, G, layers = config.heads, config.kv_heads, range(len(config.layers))

    def each(stem: str, *shape: int) -> list:
        return [(f"blk.{i}.{stem}.weight", shape) for i in layers]

    embedding, final_norm = [("token_embd.weight", (V, D))], [("output_norm.weight", (D,))]
    head = [] if config.tied else [("output.weight", (V, D))]
    attention_norms, ffn_norms = each("attn_norm", D), each("ffn_norm", D)
    attention = (each("attn_q", H * A, D) + each("attn_k", G * A, D) + each("attn_v", G * A, D)
                 + each("attn_output", D, H * A))
    ffn = each("ffn_gate", F, D) + each("ffn_down", D, F) + each("ffn_up", F, D)
    if version == 0:
        angles = [(None, (config.context, A))]
        return embedding + attention_norms + attention + ffn_norms + ffn + final_norm + angles + head
    return attention_norms + ffn_norms + final_norm + embedding + attention + ffn + head
