"""Vocabulary files become a Tokenizer: a GGUF's metadata, tokenizer.json, tokenizer.model, llama2.c's tokenizer.bin.

Owns what these files mean, the rules by which a named pre-tokenizer cuts text into words, and the files that lie beside
them (tokenizer_config.json, chat_template.jinja). Knows a model only through its checkpoint's metadata. Start at
`load_tokenizer`.
"""
from __future__ import annotations

import codecs
import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import open_checkpoint, parse_json
from families import REQUIRED, Fields
from terminal import decode_utf8
from tokenizer import (BYTE_OF_CHAR, SPACE_MARK, PipelineEncoder, SentencePieceEncoder, Tokenizer, Vocabulary,
                       added_token, build_pipeline, byte_pieces, control_ids, load_sentencepiece)

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.pre_tokenizers import PreTokenizer

    from checkpoint import Checkpoint

# Token types of sentencepiece and GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Converters to GGUF keep one end token; these control tokens end a turn or a document wherever they exist.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>",
              "<end_of_utterance>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


def load_tokenizer(checkpoint: Checkpoint, path: Path | None = None) -> Tokenizer:
    """The tokenizer that belongs to a checkpoint, or the one at `path`: tokenizer.json, tokenizer.model, tokenizer.bin,
    a GGUF file, or a folder with one of these. What is missing, damaged or unknown is a ValueError."""
    if path is None and checkpoint.container == "gguf":
        made = from_gguf(checkpoint.metadata)
    elif path is None and checkpoint.container == "llama2c":
        raise ValueError(f"{checkpoint.path.name} holds no tokenizer: give one with --tokenizer")
    else:
        made = from_path(Path(path or checkpoint.path))
    config, num_tokens = checkpoint.config, made.vocabulary.num_tokens
    made.vocabulary.padded_to = config.vocab
    made.chat_template = made.chat_template or None  # an empty one shows no message
    made.eos_ids = tuple(dict.fromkeys((*made.eos_ids, *config.eos_ids)))
    if made.bos_id is None:
        made.bos_id = config.bos_id
    if num_tokens > config.vocab:
        made.notes.append(f"the tokenizer has {num_tokens} ids but the model knows only {config.vocab}")
    return made


def from_path(path: Path) -> Tokenizer:
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not found:
            raise ValueError(f"{path} holds neither tokenizer.json nor tokenizer.model: give one with --tokenizer")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"there is no tokenizer at {path}")
    readers = {".json": from_json, ".model": from_sentencepiece, ".bin": from_llama2c, ".gguf": from_gguf_file}
    if path.suffix not in readers:
        raise ValueError(f"{path.name} is not a tokenizer: expected a folder or a file {', '.join(readers)}")
    return readers[path.suffix](path)


# GGUF

@dataclass(frozen=True)
class CuttingRule:
    """How a text is cut into words before merging. steps: regular expressions (each isolates its matches in what the
    steps before left), or the names of steps of the tokenizers library, see `cutting`."""
    steps: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # where the file does not say


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + BLANKS
CASED_WORDS = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
               r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*")
TEKKEN = "|".join([*CASED_WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", BLANKS])
GPT4O = "|".join([*(f"{word}{CONTRACTIONS}?" for word in CASED_WORDS), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                  BLANKS])
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
             r" ?[\p{P}\p{S}]+[\r\n]*|" + BLANKS)

# Names as converters write them into `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp). The rules are llama.cpp's
# too, but where a model's own tokenizer is known to differ (NFC, what counts as a digit) they are that tokenizer's.
PRE_TOKENIZERS: dict[str, CuttingRule] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "exaone4"), CuttingRule((GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), CuttingRule((GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), CuttingRule(("digit", GPT2))),
    "command-r": CuttingRule(("digit", GPT2), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"),
                    CuttingRule((LLAMA3,), ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), CuttingRule((LLAMA3,))),
    "qwen2": CuttingRule((QWEN2,), nfc=True),
    "qwen35": CuttingRule((QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), CuttingRule((QWEN2,))),
    "tekken": CuttingRule((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), CuttingRule((GPT4O,))),
    "deepseek-coder": CuttingRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+",
                                   "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "digit")),
    "deepseek-v3": CuttingRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3)),
    "falcon": CuttingRule(("punctuation", GPT2, "bytes", "digits", "[0-9][0-9][0-9]")),
    "default": CuttingRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def cutting(steps: tuple[str, ...]) -> PreTokenizer:
    import tokenizers
    from tokenizers import pre_tokenizers as pre
    named = {"digit": pre.Digits(individual_digits=True), "digits": pre.Digits(individual_digits=False),
             "punctuation": pre.Punctuation("contiguous"),
             "bytes": pre.ByteLevel(add_prefix_space=False, use_regex=False)}
    steps = steps if "bytes" in steps else (*steps, "bytes")
    return pre.Sequence([named.get(step) or pre.Split(tokenizers.Regex(step), "isolated") for step in steps])


def from_gguf_file(path: Path) -> Tokenizer:
    with open_checkpoint(path) as opened:
        return from_gguf(opened.metadata)


def from_gguf(metadata: Mapping) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*`, as llama.cpp's converters write them)."""
    fields = Fields("the GGUF file", {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()},
                    prefix="tokenizer.ggml.")
    model = read_text(fields, "model")
    builders = {"gpt2": from_gguf_bpe, "llama": from_gguf_sentencepiece}
    if model not in builders:
        raise ValueError(f"tokenizer model {model!r} in the GGUF file is not one of {', '.join(builders)}")
    tokens = fields.read("tokens", [])
    types = fields.read("token_type", None) or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ValueError(f"the GGUF file lists {len(tokens)} tokens and {len(types)} token types: expected one for one")
    text = BYTE_OF_CHAR if model == "gpt2" else ()  # what spells a byte is text, whatever the file calls it
    added = {token_id: added_token(token, special=kind != USER_DEFINED)
             for token_id, (token, kind) in enumerate(zip(tokens, types))
             if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token and token not in text}
    ids = {name: token_id for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
           if (token_id := read_id(fields, f"{name}_token_id", None, least=-1)) in range(len(tokens))}
    made = builders[model](fields, tokens, types, added, ids)
    made.vocabulary.unused = frozenset(token_id for token_id, kind in enumerate(types) if kind == UNUSED)
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids] or made.eos_ids
    others = [token_id for token_id, token in added.items() if token.special and token.content in END_TOKENS]
    made.eos_ids = tuple(dict.fromkeys((*ends, *others)))
    made.bos_id = ids.get("bos", made.bos_id)
    made.add_bos = fields.flag("add_bos_token", made.add_bos)
    made.chat_template = read_text(Fields("the GGUF file", metadata), "tokenizer.chat_template")
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    made.named = {named[name]: tokens[token_id] for name, token_id in ids.items() if name in named}
    return made


def from_gguf_bpe(fields: Fields, tokens: list[str], types: list[int], added: Mapping[int, AddedToken],
                  ids: Mapping[str, int]) -> Tokenizer:
    name = read_text(fields, "pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {name!r} in the GGUF file is not one of {', '.join(PRE_TOKENIZERS)}: "
                         "give the model's tokenizer.json with --tokenizer")
    import tokenizers
    rule = PRE_TOKENIZERS[name]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", ())]
    try:
        pipeline = build_pipeline(vocab, merges, added, rule.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    pipeline.pre_tokenizer = cutting(rule.steps)
    if rule.nfc:
        pipeline.normalizer = tokenizers.normalizers.NFC()
    vocabulary = Vocabulary(len(tokens), tokens.__getitem__, added, byte_level=True,
                            unspelt=frozenset(byte for char, byte in BYTE_OF_CHAR.items() if char not in vocab))
    return Tokenizer(f"bpe {name}", PipelineEncoder(pipeline, added), vocabulary, add_bos=rule.add_bos)


def from_gguf_sentencepiece(fields: Fields, tokens: list[str], types: list[int], added: Mapping[int, AddedToken],
                            ids: Mapping[str, int]) -> Tokenizer:
    scores = fields.read("scores", [])
    if len(scores) != len(tokens):
        raise ValueError(f"the GGUF file lists {len(tokens)} tokens and {len(scores)} scores: expected one for one")
    return sentencepiece_tokenizer(tokens, scores, types, added, ids.get("unknown", 0),
                                   blank=fields.flag("add_space_prefix", True))


# sentencepiece

def sentencepiece_tokenizer(tokens: list[str], scores: list[float], types: list[int], added: Mapping[int, AddedToken],
                            unknown_id: int, blank: bool) -> Tokenizer:
    """From a list of scored pieces. blank: encoding puts a blank before a text and after added tokens, as llama.cpp
    does and the older ("legacy") tokenizers of such models do."""
    proto = sentencepiece_proto(tokens, scores, types, unknown_id, blank)
    encoder = SentencePieceEncoder(proto, added, blank="all")
    byte_of = byte_pieces({tokens[i]: i for i, kind in enumerate(types) if kind == BYTE}.get)
    vocabulary = Vocabulary(len(tokens), tokens.__getitem__, added, byte_level=False,
                            byte_of=byte_of, has_dummy_blank=blank, unknown_id=unknown_id)
    return Tokenizer("sentencepiece", encoder, vocabulary, bos_id=1, eos_ids=(2,), add_bos=True)


def sentencepiece_proto(tokens: list[str], scores: list[float], types: list[int], unknown_id: int,
                        blank: bool) -> bytes:
    """A serialized sentencepiece ModelProto (sentencepiece_model.proto in google/sentencepiece) with these pieces."""
    has_all_bytes = types.count(BYTE) == 256
    pieces, seen = [], set()
    for token_id, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        if token_id == unknown_id:
            kind = UNKNOWN  # the library wants exactly one
        elif kind in (UNKNOWN, USER_DEFINED) or kind == BYTE and not has_all_bytes or not token or token in seen:
            kind = CONTROL  # never found in a text: added tokens are cut out before
        token = f"<unreachable {token_id}>" if kind == CONTROL else token
        seen.add(token)
        pieces.append(message(1, message(1, token.encode()) + number(2, score) + integer(3, kind)))
    trainer = message(2, integer(3, 2) + integer(35, has_all_bytes))  # model_type BPE; byte_fallback
    normalizer = message(3, integer(3, blank) + integer(4, 0) + integer(5, 1))  # blanks: one before, kept, escaped
    return b"".join(pieces) + trainer + normalizer


def from_sentencepiece(path: Path) -> Tokenizer:
    """tokenizer.model, with the added tokens of tokenizer_config.json and added_tokens.json beside it."""
    proto, config = path.read_bytes(), read_config(path.parent)
    model = load_sentencepiece(proto, path)
    num_pieces = model.get_piece_size()
    added = {i: added_token(model.id_to_piece(i), special=True)
             for i in range(num_pieces) if model.is_control(i) or model.is_unknown(i)}
    names, listed = named_tokens(config), read_fields(path.parent / "added_tokens.json")
    for content in listed:
        added[read_id(listed, content)] = added_token(content, content in names.values())
    added |= read_added(config, names)
    # Pieces that the library finds in a text although they are control tokens.
    exposed = [i for i in control_ids(added) if i < num_pieces and not model.is_unknown(i) and
               (not model.is_control(i) or len(model.id_to_piece(i)) == 1)]
    ids = {token.content: token_id for token_id, token in added.items()}
    bos_id, eos_id = (ids.get(names.get(name), default if default >= 0 else None)
                      for name, default in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())))
    vocabulary = Vocabulary(
        max(num_pieces, 1 + max(added, default=-1)),
        lambda token_id: model.id_to_piece(token_id) if token_id < num_pieces else None,
        added, byte_level=False, unknown_id=model.unk_id(),
        byte_of={i: byte for i, byte in byte_pieces(model.piece_to_id).items() if model.is_byte(i)},
        has_dummy_blank="".join(model.encode("a", out_type=str)).startswith(SPACE_MARK))
    encoder = SentencePieceEncoder(hide_pieces(proto, exposed) if exposed else proto, added,
                                   blank="all" if config.flag("legacy", True) else "first")
    return Tokenizer("sentencepiece", encoder, vocabulary, bos_id, eos_ids=() if eos_id is None else (eos_id,),
                     add_bos=config.flag("add_bos_token", True), chat_template=read_template(path.parent, config),
                     named=names)


def hide_pieces(proto: bytes, ids: Collection[int]) -> bytes:
    """The same ModelProto, in which these pieces are control tokens with names that no text spells."""
    made, offset, num_pieces = [], 0, 0
    while offset < len(proto):
        end = next(i for i in range(offset + 1, len(proto)) if proto[i] < 0x80) + 1  # after a key of one byte, a length
        stop = end + sum((byte & 0x7F) << 7 * i for i, byte in enumerate(proto[offset + 1:end]))
        key, data = proto[offset] >> 3, proto[end:stop]
        if key == 1 and num_pieces in ids:  # a field given again replaces the first: piece (1), type (3)
            data += message(1, f"<unreachable {num_pieces}>".encode()) + integer(3, CONTROL)
        num_pieces += key == 1
        made.append(message(key, data))
        offset = stop
    return b"".join(made)


# Protocol buffers' wire format (https://protobuf.dev/programming-guides/encoding): a key, then the value.

def varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def integer(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value)


def message(key: int, data: bytes) -> bytes:
    return varint(key << 3 | 2) + varint(len(data)) + data


def number(key: int, value: float) -> bytes:
    return varint(key << 3 | 5) + struct.pack("<f", value)


def from_llama2c(path: Path) -> Tokenizer:
    """tokenizer.bin of llama2.c (tokenizer.py there): the longest length, then a score, a length and UTF-8 for every
    piece. The first three are unknown, BOS, EOS; then the 256 bytes. Both BOS and EOS end a story."""
    data, offset = path.read_bytes(), 4
    tokens, scores = [], []
    while offset < len(data):
        if offset + 8 > len(data):
            raise ValueError(f"{path.name} ends in the middle of piece {len(tokens)}")
        score, nbytes = struct.unpack_from("<fi", data, offset)
        piece = data[offset + 8:offset + 8 + nbytes]
        if nbytes < 0 or len(piece) < nbytes:
            raise ValueError(f"{path.name}: piece {len(tokens)} of {nbytes} bytes goes beyond the end of the file")
        scores.append(score)
        tokens.append(piece.decode("utf-8", "replace").replace(" ", SPACE_MARK))
        offset += 8 + nbytes
    if len(tokens) < 259:
        raise ValueError(f"{path.name} holds {len(tokens)} pieces: a tokenizer of llama2.c has 259 or more")
    tokens[:3] = "<unk>", "<s>", "</s>"
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    added = {token_id: added_token(tokens[token_id], special=True) for token_id in range(3)}
    made = sentencepiece_tokenizer(tokens, scores, types, added, unknown_id=0, blank=True)
    made.eos_ids = (1, 2)
    return made


# tokenizer.json

def from_json(path: Path) -> Tokenizer:
    """The tokenizers library's file, with tokenizer_config.json beside it."""
    import tokenizers
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(path))
        pipeline.no_truncation()  # both are for training, and would change a prompt silently
        pipeline.no_padding()
        probe = pipeline.encode("a 0")  # with what the post-processor adds
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer that the tokenizers library can read: {error}") from error
    config = read_config(path.parent)
    names, notes = named_tokens(config), []
    given, present = read_added(config, names), pipeline.get_added_tokens_decoder()
    pipeline.add_tokens([token for token_id, token in sorted(given.items()) if token != present.get(token_id)])
    if moved := [token.content for token_id, token in given.items() if pipeline.token_to_id(token.content) != token_id]:
        notes.append(f"tokenizer_config.json and tokenizer.json differ in the id of {moved[0]!r}: the latter's counts")
    known = {name: found for name, text in names.items() if (found := pipeline.token_to_id(text)) is not None}
    added = {token.content: token for token in pipeline.get_added_tokens_decoder().values()}
    # Control tokens that the file itself does not flag as such.
    pipeline.add_special_tokens([added.get(names[name], names[name]) for name in known])
    text = [i for i, sequence_id in enumerate(probe.sequence_ids) if sequence_id is not None] or [0, len(probe.ids)]
    start, end = tuple(probe.ids[:text[0]]), probe.tokens[text[-1] + 1:]
    if end:
        notes.append(f"tokenizer.json puts {' '.join(end)} after a text: left out, for a prompt goes on")
    vocabulary = json_vocabulary(pipeline)
    return Tokenizer(f"tokenizer.json {type(pipeline.model).__name__}", PipelineEncoder(pipeline, vocabulary.added),
                     vocabulary, bos_id=known.get("bos_token", next(iter(start), None)), prefix_ids=start,
                     eos_ids=(known["eos_token"],) if "eos_token" in known else (),
                     add_bos=config.flag("add_bos_token", bool(start)), named=names, notes=notes,
                     chat_template=read_template(path.parent, config))


# Steps of decoding that are understood, with the settings that count.
DECODERS = ({"type": "ByteLevel"}, {"type": "ByteFallback"}, {"type": "Metaspace"}, {"type": "Fuse"},
            {"type": "Sequence"}, {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
            *({"type": "Strip", "content": " ", "start": start, "stop": 0} for start in (0, 1)))


def json_vocabulary(pipeline: Pipeline) -> Vocabulary:
    """How tokens spell bytes, from the decoder and the pre-tokenizer together: there are files in which one of them is
    left over from another tokenizer."""
    before, after = (*parts(pipeline.normalizer), *parts(pipeline.pre_tokenizer)), parts(pipeline.decoder)
    for part in (*before, *after):
        if part["type"] == "Metaspace" and part["replacement"] != SPACE_MARK:
            raise ValueError(f"tokenizer.json writes blanks as {part['replacement']!r}, expected {SPACE_MARK!r}")
    for part in after:
        if not any(part | known == part for known in DECODERS):
            raise ValueError(f"tokenizer.json asks for decoder {part}, which is not supported")
    byte_level = any(part["type"] == "ByteLevel" for part in (*before, *after))
    if not after and not byte_level:
        raise ValueError("tokenizer.json has no decoder: how tokens make a text is not known")
    drops_blank = any(part["type"] == "Strip" and part["start"] or
                      part["type"] == "Metaspace" and part["prepend_scheme"] != "never" for part in after)
    is_left_over = byte_level and all(part["type"] != "ByteLevel" for part in after)
    has_byte_pieces = any(part["type"] == "ByteFallback" for part in after)
    added = {token_id: token for token_id, token in pipeline.get_added_tokens_decoder().items()
             if not (byte_level and token.content in BYTE_OF_CHAR)}  # what spells a byte is text
    unknown = getattr(pipeline.model, "unk_token", None)
    unspelt = {byte for char, byte in BYTE_OF_CHAR.items() if pipeline.token_to_id(char) is None}
    return Vocabulary(max(pipeline.get_vocab_size(), 1 + max(added, default=-1)), pipeline.id_to_token, added,
                      byte_level, byte_of=byte_pieces(pipeline.token_to_id) if has_byte_pieces else {},
                      has_dummy_blank=drops_blank and not is_left_over,
                      unknown_id=unknown and pipeline.token_to_id(unknown),
                      unspelt=frozenset(unspelt if byte_level and not unknown else ()))


def parts(component) -> list[dict]:
    """The steps that a normalizer, pre-tokenizer or decoder (or None) is made of, as in tokenizer.json."""
    def flatten(part: dict) -> list[dict]:
        inner = [item for value in part.values() if isinstance(value, list) for item in value if isinstance(item, dict)]
        return [part, *(found for item in inner for found in flatten(item))]
    return flatten(json.loads(component.__getstate__())) if component else []


# Files beside a tokenizer

def read_config(folder: Path) -> Fields:
    """tokenizer_config.json, with the tokens that special_tokens_map.json names."""
    config, older = read_fields(folder / "tokenizer_config.json"), read_fields(folder / "special_tokens_map.json")
    return Fields(config.source, named_tokens(older) | {key: item for key, item in config.items() if item is not None})


def read_fields(path: Path) -> Fields:
    return Fields(path, parse_json(path, path.read_bytes().removeprefix(codecs.BOM_UTF8)) if path.is_file() else {})


def named_tokens(config: Fields) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token, where a config gives them as a string or as {"content"}."""
    found = {name: read_text(Fields(config.source, config[name], prefix=f"{name}."), "content")
             if isinstance(config.get(name), dict) else read_text(config, name)
             for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {name: text for name, text in found.items() if text}


def read_added(config: Fields, names: Mapping[str, str]) -> dict[int, AddedToken]:
    """added_tokens_decoder: by id, what tokens of a vocabulary are found in a text first, and how."""
    found, decoder = {}, config.read("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise config.error("added_tokens_decoder", "but must be an object")
    for key, value in decoder.items():
        entry = Fields(config.source, value if isinstance(value, dict) else {}, prefix=f"added_tokens_decoder.{key}.")
        content = read_text(entry, "content", REQUIRED)
        special = entry.flag("special", False) or content in names.values()
        flags = {flag: entry.flag(flag, False) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        ids = {key: int(key) if key.isdecimal() and len(key) < 11 else key}
        token_id = read_id(Fields(config.source, ids, prefix="added_tokens_decoder."), key)
        found[token_id] = added_token(content, special, **flags)
    return found


def read_id(fields: Fields, name: str, default=REQUIRED, least: int = 0) -> int | None:
    value = fields.read(name, default)
    if value is not default and (type(value) is not int or not least <= value < 1 << 32):
        raise fields.error(name, "but must be a token id")
    return value


def read_text(fields: Fields, name: str, default=None) -> str | None:
    value = fields.read(name, default)
    if value is not default and not isinstance(value, str):
        raise fields.error(name, "but must be a string")
    return value


def read_template(folder: Path, config: Fields) -> str | None:
    """chat_template.jinja, else the config's template or, of several named ones, the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return decode_utf8(file.read_bytes(), str(file))
    template = config.read("chat_template", None)
    if not isinstance(template, list):
        return read_text(config, "chat_template")
    entries = [Fields(config.source, entry if isinstance(entry, dict) else {}, prefix=f"chat_template.{i}.")
               for i, entry in enumerate(template)]
    named = {read_text(entry, "name", REQUIRED): read_text(entry, "template", REQUIRED) for entry in entries}
    return named.get("default")
