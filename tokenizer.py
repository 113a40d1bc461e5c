"""Text to token ids and back: encoding, streaming decode, chat templates.

Owns what a vocabulary file means, from a GGUF file, `tokenizer.json`, `tokenizer.model` (sentencepiece) or llama2.c's
`tokenizer.bin`. Knows nothing of tensors, and a model only through its checkpoint's metadata. Merging itself is left to
the tokenizers and sentencepiece libraries, imported when needed; decoding is ours. Start at `Tokenizer`; files become
one in `load_tokenizer`, at the end.

Decoding is lossless: every token stands for fixed bytes, a text is their concatenation, read as UTF-8 with U+FFFD for
what is not. "Clean-up" of blanks before punctuation, which some configs ask for, would lose text and is not done.
"""
from __future__ import annotations

import codecs
import json
import re
import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.pre_tokenizers import PreTokenizer

    from checkpoint import Checkpoint

SPACE_MARK = "\u2581"  # sentencepiece writes a blank as a lower one eighth block
# Token types of sentencepiece and GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Converters to GGUF keep one end token; these control tokens end a turn or a document wherever they exist.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>",
              "<end_of_utterance>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


# Tokenizer ---------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Tokenizer:
    """Text <-> ids of one model.

    Added tokens are of two kinds: control tokens (<|im_end|>) structure a prompt, never show in decoded text and never
    come out of what a user typed in a chat; user-defined ones (<tool_call>) are text that is always one token.
    `vocab_size` covers the padded part of the model's vocabulary too: its ids decode to nothing. `notes` grows, once,
    when a text holds what the vocabulary cannot spell.
    """
    kind: str
    encoder: PipelineEncoder | SentencePieceEncoder
    vocabulary: Vocabulary
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... for the template
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Ids of `text`. With `special`, the text of control tokens is taken for these tokens.

        bos None: put BOS in front where the model adds one. It is never put in front of itself.
        """
        check_unicode(text)
        ids = self.encoder.encode(text, special)
        self._note_loss(text, ids)
        return self._with_bos(ids, self.add_bos if bos is None else bos)

    def decode(self, ids: Iterable[int], show_special: bool = False) -> str:
        """Text of a whole sequence; the blank that sentencepiece puts before a text is dropped. ids: see `stream`."""
        stream = self.stream(show_special=show_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def piece(self, token_id: int) -> str:
        """What one token looks like on its own: control tokens by name, bytes that are no character as U+FFFD."""
        return self.vocabulary.data(token_id, show_special=True).decode("utf-8", "replace")

    def stream(self, prompt_ids: Iterable[int] = (), show_special: bool = False) -> TextStream:
        """A decoder of what follows `prompt_ids`: a blank before its first word is part of it, unless nothing visible
        stands before. An id outside the vocabulary is a ValueError."""
        starts_text = not any(self.vocabulary.data(token_id, show_special) for token_id in prompt_ids)
        return TextStream(self.vocabulary, starts_text, show_special)

    def chat(self, messages: Sequence[Mapping], add_generation_prompt: bool = True,
             continue_final: bool = False) -> list[int]:
        """Ids of a conversation in the model's own format. Text of messages never becomes a control token.

        messages: {"role", "content"}, content a string or a list of {"type": "text", "text"}.
        continue_final: leave the last message open, so that generation goes on in it.
        No template, or what the template itself refuses, is a ValueError.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: give the text as it should stand (--raw)")
        text, sentinel = self._template.render(messages, add_generation_prompt and not continue_final, continue_final)
        check_unicode(text)
        ids, at_start = [], True
        for part in self.encoder.cut(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self.encoder.encode(part.replace(sentinel, ""), special=False, at_start=at_start)
            at_start = False
        self._note_loss(text.replace(sentinel, ""), ids)
        return self._with_bos(ids, self.add_bos)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        controls = [self.vocabulary.added[token_id] for token_id in self.vocabulary.controls]
        return ChatTemplate(self.chat_template, controls, self.named)

    def _with_bos(self, ids: list[int], bos: bool) -> list[int]:
        return [self.bos_id, *ids] if bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def _note_loss(self, text: str, ids: list[int]) -> None:
        unknown_id, unspelt = self.vocabulary.unknown_id, self.vocabulary.unspelt
        if unspelt and not unspelt.isdisjoint(text.encode()):
            lost = next(char for char in text if not unspelt.isdisjoint(char.encode()))
            note = f"the vocabulary has no piece for some of the text (first U+{ord(lost):04X}): left out of the prompt"
        elif unknown_id is not None and unknown_id in ids:
            note = "the vocabulary has no piece for some of the text: it became the unknown token"
        else:
            return
        if note not in self.notes:
            self.notes.append(note)


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}: "
                         "it is half a character, remove it") from None


class TextStream:
    """Text of ids as they arrive: what was given is never taken back, and all pieces join to the whole decode."""

    def __init__(self, vocabulary: Vocabulary, starts_text: bool, show_special: bool):
        self._vocabulary = vocabulary
        self._drop_blank = starts_text and vocabulary.has_dummy_blank
        self._show_special = show_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps back the bytes of half a character

    def push(self, token_id: int) -> str:
        """The characters that are complete now and were not before; often one word, sometimes nothing."""
        data = self._vocabulary.data(token_id, self._show_special)
        if data and self._drop_blank:
            data, self._drop_blank = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """U+FFFD if the text ends in half a character, else nothing."""
        return self._utf8.decode(b"", final=True)


# Vocabulary: the bytes of a token ----------------------------------------------------------------------------------

def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode` in openai/gpt-2, encoder.py): printable Latin-1
    characters stand for themselves, the other bytes, in order, for U+0100 and what follows."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = byte_alphabet()


@dataclass(eq=False)
class Vocabulary:
    """What every id stands for."""
    num_tokens: int
    token_of: Callable[[int], str | None]  # the token as the file spells it; None for an id without one
    added: Mapping[int, str]  # tokens that are found in a text before anything else, and stand for themselves
    controls: frozenset[int]  # those of them that structure a prompt
    byte_level: bool  # characters of a token stand for bytes, by GPT-2's alphabet
    byte_of: Mapping[int, int] = field(default_factory=dict)  # ids of byte pieces like <0x0A>
    unused: frozenset[int] = frozenset()
    has_dummy_blank: bool = False  # encoding puts a blank before a text, so that its first word is like any other
    unknown_id: int | None = None  # what the encoder gives for text that it cannot spell
    unspelt: frozenset[int] = frozenset()  # bytes for which it gives nothing
    padded_to: int = 0  # the model's vocabulary may be wider than the tokenizer's: those ids stand for nothing
    _data: dict[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return max(self.num_tokens, self.padded_to)

    def data(self, token_id: int, show_special: bool) -> bytes:
        """UTF-8 of a token, perhaps a part of a character. Nothing for unused ids and, unless shown, control tokens."""
        if token_id in self.controls and not show_special:
            return b""
        if token_id not in self._data:
            self._data[token_id] = self._spell(token_id)
        return self._data[token_id]

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            raise ValueError(f"token id {token_id} is outside the vocabulary: ids run from 0 to {self.size - 1}")
        if token_id in self.added:
            return self.added[token_id].encode()
        if token_id >= self.num_tokens or token_id in self.unused:
            return b""
        token = self.token_of(token_id) or ""
        if token_id in self.byte_of:
            return bytes([self.byte_of[token_id]])
        if self.byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes([BYTE_OF_CHAR[char] for char in token])
        return token.replace(SPACE_MARK, " ").encode()


def texts_and_controls(added: Mapping[int, AddedToken]) -> tuple[dict[int, str], frozenset[int]]:
    return ({token_id: token.content for token_id, token in added.items()},
            frozenset(token_id for token_id, token in added.items() if token.special))


def byte_pieces(id_of: Callable[[str], int | None]) -> dict[int, int]:
    found = {id_of(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


# Encoders: both offer encode(text, special, at_start) and cut(text) ------------------------------------------------

class PipelineEncoder:
    """The tokenizers library: normalizer, pre-tokenizer, model."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._controls = {i for i, token in pipeline.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, special: bool, at_start: bool = True) -> list[int]:
        """Ids of `text`, without BOS. at_start False: it continues a text (no dummy blank, if that is for starts)."""
        self._pipeline.encode_special_tokens = not special  # the library's name for "control tokens are text"
        metaspace = self._pipeline.pre_tokenizer
        if at_start or getattr(metaspace, "prepend_scheme", None) != "first":
            return self._pipeline.encode(text, add_special_tokens=False).ids
        metaspace.prepend_scheme = "never"
        ids = self._pipeline.encode(text, add_special_tokens=False).ids
        metaspace.prepend_scheme = "first"
        return ids

    def cut(self, text: str) -> Iterator[int | str]:
        """The ids of control tokens in `text`, and the text between them."""
        self._pipeline.encode_special_tokens = False
        return cut_at(self._pipeline, text, self._controls)


class SentencePieceEncoder:
    """The sentencepiece library, with added tokens, which it does not know, cut out first.

    blank: before what a dummy blank goes: "first" part of a text, "all" parts between added tokens.
    """

    def __init__(self, proto: bytes, added: Mapping[int, AddedToken], blank: str):
        self._model = load_sentencepiece(proto)
        # A field given again replaces the first: normalizer_spec (3) { add_dummy_prefix (3): false }.
        self._model_without_blank = load_sentencepiece(proto + message(3, integer(3, 0)))
        self._added = added
        self._controls = {token_id for token_id, token in added.items() if token.special}
        self._finder = build_pipeline({token.content: token_id for token_id, token in added.items()}, [], added)
        self._blank = blank

    def encode(self, text: str, special: bool, at_start: bool = True) -> list[int]:
        self._finder.encode_special_tokens = not special
        ids = []
        for part in cut_at(self._finder, text, self._added):
            if isinstance(part, int):
                ids.append(part)
            else:
                model = self._model if at_start or self._blank == "all" else self._model_without_blank
                ids += model.encode(part)
            at_start = False
        return ids

    def cut(self, text: str) -> Iterator[int | str]:
        self._finder.encode_special_tokens = False
        return cut_at(self._finder, text, self._controls)


def cut_at(finder: Pipeline, text: str, wanted: Container[int]) -> Iterator[int | str]:
    found, end = finder.encode(text, add_special_tokens=False), 0
    for token_id, (start, stop) in zip(found.ids, found.offsets):
        if token_id in wanted:
            if start > end:
                yield text[end:start]
            yield token_id
            end = stop
    if end < len(text):
        yield text[end:]


def build_pipeline(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], added: Mapping[int, AddedToken],
                   ignore_merges: bool = False) -> Pipeline:
    import tokenizers
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    pipeline.add_special_tokens([token for token in added.values() if token.special])
    pipeline.add_tokens([token for token in added.values() if not token.special])
    return pipeline


def added_token(content: str, special: bool, **flags: bool) -> AddedToken:
    """flags: lstrip and rstrip (blanks on that side belong to the token), single_word (not inside a word)."""
    import tokenizers
    return tokenizers.AddedToken(content, special=special, normalized=False, **flags)


# Chat templates ----------------------------------------------------------------------------------------------------

class ChatTemplate:
    """A model's own Jinja template, rendered in a sandbox with the helpers that public templates use.

    So that message text which looks like a control token stays text, a sentinel character is put into it: it no longer
    looks like one when the rendered text is cut at control tokens, and whoever does that drops the sentinel after.
    """

    def __init__(self, source: str, controls: Iterable[str], named: Mapping[str, str]):
        import jinja2
        self._errors = jinja2.TemplateError
        self._named = named
        self._starts = tuple({control[:size] for control in controls for size in range(1, len(control))})
        self._lookalike = lookalike_pattern(controls)
        try:
            self._template = jinja_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool, open_end: bool) -> tuple[str, str]:
        """The text of a conversation with sentinels in it, and the sentinel. open_end: cut after the last message."""
        if not messages:
            raise ValueError("the conversation has no messages: give at least one")
        used = set()
        map_strings(messages, lambda text: used.update(text) or text)
        private = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        sentinel, mark = next(private), next(private)
        messages = map_strings(messages, lambda text: self._break_lookalikes(text, sentinel))
        text = self._render(messages, add_generation_prompt)
        if open_end:
            # Searching for the last message's text could find an earlier copy of it, or one that was trimmed.
            # What follows the mark in a second rendering is what follows the message.
            _, found, rest = self._render(mark_end(messages, mark), add_generation_prompt).rpartition(mark)
            if not found or not text.endswith(rest):
                raise ValueError("the last message cannot be continued: the chat template does not show it as it is")
            text = text.removesuffix(rest)
        return text, sentinel

    def _render(self, messages: Sequence[Mapping], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=None,
                                         documents=None, **self._named)
        except self._errors as error:  # what raise_exception says, or the name of an unknown function
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the model's chat template failed on this conversation: {error}") from error

    def _break_lookalikes(self, text: str, sentinel: str) -> str:
        broken = self._lookalike.sub(lambda found: found[0] + sentinel, text)
        if not text.rstrip().endswith(self._starts):
            return broken
        # It ends like the start of a control token, which the text of the next message could complete.
        kept = broken.rstrip()
        return kept + sentinel + broken[len(kept):]


def lookalike_pattern(controls: Iterable[str]) -> re.Pattern:
    """Matches the first character of every control token, overlapping ones too; fast by its choice of first ones."""
    rests: dict[str, list[str]] = {}
    for control in controls:
        rests.setdefault(control[0], []).append(re.escape(control[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def map_strings(value, change: Callable[[str], str]):
    """A copy of a JSON value with every string in it changed, keys excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def mark_end(messages: Sequence[Mapping], mark: str) -> list[Mapping]:
    content = messages[-1].get("content")
    if isinstance(content, str):
        content += mark
    elif content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise ValueError("the last message has no text to continue")
    return [*messages[:-1], {**messages[-1], "content": content}]


def jinja_environment():
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks for training what the assistant says; here it changes nothing."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(text: str):
        raise jinja2.TemplateError(text)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=["jinja2.ext.loopcontrols", Generation])
    made.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


# Files -------------------------------------------------------------------------------------------------------------

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
    import checkpoint
    with checkpoint.open_checkpoint(path) as opened:
        return from_gguf(opened.metadata)


def from_gguf(metadata: Mapping) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*`, as llama.cpp's converters write them)."""
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = fields.get("model")
    builders = {"gpt2": from_gguf_bpe, "llama": from_gguf_sentencepiece}
    if model not in builders:
        raise ValueError(f"tokenizer model {model!r} in the GGUF file is not one of {', '.join(builders)}")
    tokens = fields.get("tokens") or []
    types = fields.get("token_type") or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ValueError(f"the GGUF file lists {len(tokens)} tokens and {len(types)} token types: expected one for one")
    added = {token_id: added_token(tokens[token_id], special=kind != USER_DEFINED)
             for token_id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN, USER_DEFINED) and tokens[token_id]}
    ids = {name: fields[f"{name}_token_id"] for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
           if 0 <= fields.get(f"{name}_token_id", -1) < len(tokens)}
    made = builders[model](fields, tokens, types, added, ids)
    made.vocabulary.unused = frozenset(token_id for token_id, kind in enumerate(types) if kind == UNUSED)
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids] or made.eos_ids
    others = [token_id for token_id, token in added.items() if token.special and token.content in END_TOKENS]
    made.eos_ids = tuple(dict.fromkeys((*ends, *others)))
    made.bos_id = ids.get("bos", made.bos_id)
    made.add_bos = fields.get("add_bos_token", made.add_bos)
    made.chat_template = metadata.get("tokenizer.chat_template")
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    made.named = {named[name]: tokens[token_id] for name, token_id in ids.items() if name in named}
    return made


def from_gguf_bpe(fields: Mapping, tokens: list[str], types: list[int], added: Mapping[int, AddedToken],
                  ids: Mapping[str, int]) -> Tokenizer:
    name = fields.get("pre")
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
    vocabulary = Vocabulary(len(tokens), tokens.__getitem__, *texts_and_controls(added), byte_level=True,
                            unspelt=frozenset(byte for char, byte in BYTE_OF_CHAR.items() if char not in vocab))
    return Tokenizer(f"bpe {name}", PipelineEncoder(pipeline), vocabulary, add_bos=rule.add_bos)


def from_gguf_sentencepiece(fields: Mapping, tokens: list[str], types: list[int], added: Mapping[int, AddedToken],
                            ids: Mapping[str, int]) -> Tokenizer:
    scores = fields.get("scores") or []
    if len(scores) != len(tokens):
        raise ValueError(f"the GGUF file lists {len(tokens)} tokens and {len(scores)} scores: expected one for one")
    blank = fields.get("add_space_prefix", True)
    return sentencepiece_tokenizer(tokens, scores, types, added, ids.get("unknown", 0), blank)


# sentencepiece

def sentencepiece_tokenizer(tokens: list[str], scores: list[float], types: list[int], added: Mapping[int, AddedToken],
                            unknown_id: int, blank: bool) -> Tokenizer:
    """From a list of scored pieces. blank: encoding puts a blank before a text and after added tokens, as llama.cpp
    does and the older ("legacy") tokenizers of such models do."""
    proto = sentencepiece_proto(tokens, scores, types, unknown_id, blank)
    encoder = SentencePieceEncoder(proto, added, blank="all")
    byte_of = byte_pieces({tokens[i]: i for i, kind in enumerate(types) if kind == BYTE}.get)
    vocabulary = Vocabulary(len(tokens), tokens.__getitem__, *texts_and_controls(added), byte_level=False,
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
        token = f"<unreachable {token_id}>" if not token or token in seen else token
        seen.add(token)
        pieces.append(message(1, message(1, token.encode()) + number(2, score) + integer(3, kind)))
    trainer = message(2, integer(3, 2) + integer(35, has_all_bytes))  # model_type BPE; byte_fallback
    normalizer = message(3, integer(3, blank) + integer(4, 0) + integer(5, 1))  # blanks: one before, kept, escaped
    return b"".join(pieces) + trainer + normalizer


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


def load_sentencepiece(proto: bytes):
    import sentencepiece
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"the sentencepiece model is damaged: {error}") from error


def from_sentencepiece(path: Path) -> Tokenizer:
    """tokenizer.model, with the added tokens of tokenizer_config.json and added_tokens.json beside it."""
    proto, config = path.read_bytes(), read_config(path.parent)
    model = load_sentencepiece(proto)
    num_pieces = model.get_piece_size()
    added = {i: added_token(model.id_to_piece(i), special=True)
             for i in range(num_pieces) if model.is_control(i) or model.is_unknown(i)}
    names, flags = named_tokens(config), ("lstrip", "rstrip", "single_word")
    for content, token_id in read_json(path.parent / "added_tokens.json").items():
        added[token_id] = added_token(content, content in names.values())
    for token_id, entry in config.get("added_tokens_decoder", {}).items():
        special = entry.get("special", False) or entry["content"] in names.values()
        given = {flag: entry[flag] for flag in flags if flag in entry}
        added[int(token_id)] = added_token(entry["content"], special, **given)
    ids = {token.content: token_id for token_id, token in added.items()}
    bos_id, eos_id = (ids.get(names.get(name), default if default >= 0 else None)
                      for name, default in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())))
    vocabulary = Vocabulary(
        max(num_pieces, 1 + max(added, default=-1)),
        lambda token_id: model.id_to_piece(token_id) if token_id < num_pieces else None,
        *texts_and_controls(added), byte_level=False, unknown_id=model.unk_id(),
        byte_of={i: byte for i, byte in byte_pieces(model.piece_to_id).items() if model.is_byte(i)},
        has_dummy_blank="".join(model.encode("a", out_type=str)).startswith(SPACE_MARK))
    encoder = SentencePieceEncoder(proto, added, blank="all" if config.get("legacy", True) else "first")
    return Tokenizer("sentencepiece", encoder, vocabulary, bos_id, eos_ids=() if eos_id is None else (eos_id,),
                     add_bos=config.get("add_bos_token", True), chat_template=read_template(path.parent, config),
                     named=names)


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
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer that the tokenizers library can read: {error}") from error
    pipeline.no_truncation()  # both are for training, and would change a prompt silently
    pipeline.no_padding()
    config = read_config(path.parent)
    names = named_tokens(config)
    known = {name: pipeline.token_to_id(text) for name, text in names.items() if pipeline.token_to_id(text) is not None}
    added = {token.content: token for token in pipeline.get_added_tokens_decoder().values()}
    # Control tokens that the file itself does not flag as such.
    pipeline.add_special_tokens([added.get(names[name], names[name]) for name in known])
    before_text = pipeline.encode("", add_special_tokens=True).ids  # what the post-processor adds
    bos_id = known.get("bos_token", next(iter(before_text), None))
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = bos_id is not None and before_text[:1] == [bos_id]
    return Tokenizer(f"tokenizer.json {type(pipeline.model).__name__}", PipelineEncoder(pipeline),
                     json_vocabulary(pipeline), bos_id,
                     eos_ids=(known["eos_token"],) if "eos_token" in known else (), add_bos=add_bos,
                     chat_template=read_template(path.parent, config), named=names)


def json_vocabulary(pipeline: Pipeline) -> Vocabulary:
    """How tokens spell bytes, from the decoder and the pre-tokenizer together: there are files in which one of them is
    left over from another tokenizer."""
    before, after = (*parts(pipeline.normalizer), *parts(pipeline.pre_tokenizer)), parts(pipeline.decoder)
    known = ("ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip", "Replace", "Sequence")
    for part in after:
        if part["type"] not in known or part["type"] == "Replace" and part["pattern"] != {"String": SPACE_MARK}:
            raise ValueError(f"tokenizer.json asks for decoder {part}, which is not one of {', '.join(known)}")
    byte_level = any(part["type"] == "ByteLevel" for part in (*before, *after))
    drops_blank = any(part["type"] == "Strip" and part["start"] or
                      part["type"] == "Metaspace" and part["prepend_scheme"] != "never" for part in after)
    has_byte_pieces = any(part["type"] == "ByteFallback" for part in after)
    added = pipeline.get_added_tokens_decoder()
    unknown = getattr(pipeline.model, "unk_token", None)
    unspelt = {byte for char, byte in BYTE_OF_CHAR.items() if pipeline.token_to_id(char) is None}
    return Vocabulary(max(pipeline.get_vocab_size(), 1 + max(added, default=-1)), pipeline.id_to_token,
                      *texts_and_controls(added), byte_level,
                      byte_of=byte_pieces(pipeline.token_to_id) if has_byte_pieces else {},
                      has_dummy_blank=drops_blank and not byte_level,
                      unknown_id=unknown and pipeline.token_to_id(unknown),
                      unspelt=frozenset(unspelt if byte_level and not unknown else ()))


def parts(component) -> list[dict]:
    """The steps that a normalizer, pre-tokenizer or decoder (or None) is made of, as in tokenizer.json."""
    def flatten(part: dict) -> list[dict]:
        inner = [item for value in part.values() if isinstance(value, list) for item in value if isinstance(item, dict)]
        return [part, *(found for item in inner for found in flatten(item))]
    return flatten(json.loads(component.__getstate__())) if component else []


# Files beside a tokenizer

def read_config(folder: Path) -> dict:
    return read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text("utf-8-sig")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def named_tokens(config: Mapping) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token, where a config gives them as a string or as {"content"}."""
    given = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if text}


def read_template(folder: Path, config: Mapping) -> str | None:
    """chat_template.jinja, else the config's template or, of several named ones, the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
