"""Tokenizers for tests: vocabularies of bytes and of a small sentencepiece model, as GGUF metadata and as files."""

import json
from pathlib import Path
from types import SimpleNamespace

import sentencepiece

from vocab import load_tokenizer

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def gpt2_alphabet() -> list[str]:
    """The 256 stand-ins in the order of bytes, from openai/gpt-2's rule, without a table."""
    stand_ins, extra = [], 0
    for byte in range(256):
        if chr(byte).isprintable() and byte not in (0x20, 0xA0):
            stand_ins.append(chr(byte))
        else:
            stand_ins.append(chr(0x100 + extra))
            extra += 1
    return stand_ins


BYTES = gpt2_alphabet()


def fake_checkpoint(container="gguf", metadata=None, path=".", vocab=0, bos_id=None, eos_ids=()):
    config = SimpleNamespace(vocab=vocab, bos_id=bos_id, eos_ids=eos_ids)
    return SimpleNamespace(container=container, metadata=metadata or {}, path=Path(path), config=config)


def from_gguf(metadata, vocab=None):
    vocab = len(metadata["tokenizer.ggml.tokens"]) if vocab is None else vocab
    return load_tokenizer(fake_checkpoint(metadata=metadata, vocab=vocab))


def from_path(path, **fields):
    return load_tokenizer(fake_checkpoint("safetensors", **fields), Path(path))


def byte_metadata(controls=("<s>", "</s>", "<|im_start|>", "<|im_end|>"), merged=(), merges=(), **fields):
    """A GGUF vocabulary of the 256 bytes, then `merged` tokens, then control tokens."""
    tokens = [*BYTES, *merged, *controls]
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [*merges],
                "token_type": [NORMAL] * (len(tokens) - len(controls)) + [CONTROL] * len(controls)}
    for name, token in (("bos", "<s>"), ("eos", "</s>")):
        if token in controls:
            metadata[f"{name}_token_id"] = tokens.index(token)
    template = {"tokenizer.chat_template": fields.pop("template")} if "template" in fields else {}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | fields).items()} | template


def tokenizer_json(vocab, merges=(), added=(), pre_tokenizer=None, normalizer=None, decoder=None, post_processor=None,
                   **model):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "added_tokens": [flags | token for token in added], "post_processor": post_processor, "decoder": decoder,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": [*merges]} | model})


def byte_level(**fields):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | fields


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": [*steps]}


def byte_json(added=({"content": "<s>"}, {"content": "</s>"}), **fields):
    vocab = {token: token_id for token_id, token in enumerate(BYTES)}
    added = [{"id": 256 + i} | token for i, token in enumerate(added)]
    return tokenizer_json(vocab, added=added, **{"pre_tokenizer": byte_level(), "decoder": byte_level()} | fields)


def write(folder, **files):
    """Files by name, with _ for the dot before the ending; objects become JSON."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        name = ".".join(name.rsplit("_", 1))
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


def byte_tokenizer(folder):
    """Byte-level tokenizer.json without merges."""
    return from_path(write(folder, tokenizer_json=byte_json()))


def train_sentencepiece(folder):
    """A small sentencepiece model with byte fallback, and its pieces as (text, score, type)."""
    prefix = folder / "tokenizer"
    lines = ["once upon a time there was a leading user", "the user said hello to A and B", "time and time again, x y"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20), model_prefix=str(prefix), vocab_size=340, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False)
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (model.get_piece_size() - 259)
    pieces = [(model.id_to_piece(i), model.get_score(i), kind) for i, kind in enumerate(kinds)]
    return SimpleNamespace(path=Path(f"{prefix}.model"), model=model, pieces=pieces)


def spm_metadata(spm, added=(), **fields):
    pieces = [*spm.pieces, *((text, 0.0, kind) for text, kind in added)]
    metadata = {"model": "llama", "tokens": [p[0] for p in pieces], "scores": [p[1] for p in pieces],
                "token_type": [p[2] for p in pieces], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | fields).items()}


def spm_json(spm, added=(), legacy=False):
    """The same model for the tokenizers library: merges in the order of the scores of what they make."""
    vocab = {text: token_id for token_id, (text, _, _) in enumerate(spm.pieces)}
    merges = []
    for text, score, kind in spm.pieces:
        halves = [(text[:i], text[i:]) for i in range(1, len(text)) if kind == NORMAL]
        merges += [(-score, vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
    specials = [{"id": i, "content": text} for i, (text, _, _) in enumerate(spm.pieces[:3])]
    specials += [{"id": len(vocab) + i, "content": text} for i, text in enumerate(added)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    older = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    newer = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    blanks = {"normalizer": older} if legacy else {"pre_tokenizer": newer}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return tokenizer_json(vocab, [[a, b] for *_, a, b in sorted(merges)], specials, decoder=decoder, fuse_unk=True,
                          byte_fallback=True, unk_token="<unk>", **blanks)


def streamed(ours, ids, prompt_ids=(), **options):
    stream, text = ours.stream(prompt_ids, **options), ""
    for token_id in ids:
        text += stream.push(token_id)
    return text + stream.finish()


def byte_ids(data: bytes) -> list[int]:
    return [BYTES.index(BYTES[byte]) for byte in data]
