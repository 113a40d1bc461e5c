"""Text to token ids and back: encoding, streaming decode, chat templates.

Owns the way from text to ids and from ids, as they arrive, to text. Knows nothing of files: vocab.py makes a Tokenizer
of them. Merging itself is left to the tokenizers and sentencepiece libraries, imported when needed; decoding is ours.
Start at `Tokenizer`.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Pipeline

SPACE_MARK = "\u2581"  # sentencepiece writes a blank as a lower one eighth block


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
