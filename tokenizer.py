"""Text to token ids and back: encoding, streaming decode, chat templates.

Owns the way from text to ids and from ids, as they arrive, to text. Knows nothing of files: vocab.py makes a Tokenizer
of them. Merging itself is left to the tokenizers and sentencepiece libraries, imported when needed; decoding is ours.
Start at `Tokenizer`.

Decoding is lossless: every token stands for fixed bytes, a text is their concatenation, read as UTF-8 with U+FFFD for
what is not. "Clean-up" of blanks before punctuation, which some configs ask for, would lose text and is not done.
"""
from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from chat_template import ChatTemplate, map_texts

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Pipeline

SPACE_MARK = "\u2581"  # sentencepiece writes a blank as a lower one eighth block


# Tokenizer ---------------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Tokenizer:
    """Text <-> ids of one model.

    Added tokens are of two kinds: control tokens (<|im_end|>) structure a prompt, never show in decoded text and never
    come out of a message or of text encoded without `special`; user-defined ones (<tool_call>) are text that is always
    one token.
    `vocab_size` covers the padded part of the model's vocabulary too: its ids decode to nothing. `notes` grows, once,
    when a text holds what the vocabulary cannot spell.
    """
    kind: str
    encoder: Encoder
    vocabulary: Vocabulary
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... for the template
    prefix_ids: tuple[int, ...] = ()  # what stands before a text instead of BOS alone
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Ids of `text`. With `special`, the text of control tokens is taken for these tokens.

        Without, what the text gives has no control tokens, but the unknown one where the vocabulary cannot spell it.
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
        """Ids of a conversation in the model's own format. Text of messages never becomes a control token; roles, types
        and keys that are plain words are no text, but names.

        messages: {"role", "content"}, content a string or a list of {"type": "text", "text"}.
        continue_final: leave the last message open, so that generation goes on in it.
        No template, what the template itself refuses, or text that it changes so that it may be one of its own
        control tokens, is a ValueError.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: give the text as it should stand (--raw)")
        parts = self._rendered(messages, add_generation_prompt and not continue_final, continue_final)
        ids: list[int] = []
        for i, (token_id, text) in enumerate(parts):
            ids += self.encoder.encode(text, special=False, at_start=i == 0) if token_id is None else [token_id]
        self._note_loss("".join(text for _, text in parts), ids)
        return self._with_bos(ids, self.add_bos)

    def _rendered(self, messages: Sequence[Mapping], *options: bool) -> list[tuple[int | None, str]]:
        """A conversation in its template, cut at the control tokens that the template wrote.

        Messages are rendered in disguise: other characters stand for those that control tokens are made of, so that
        no work of the template on them (joining, slicing, upper) makes such a token. Put back, they must give the
        plain rendering. They do not where the template searches a message for some text; then only look-alikes are
        disguised, or nothing is, and there must be as many control tokens, in the same order, as in full disguise.
        """
        controls, used = self.encoder.controls, set()
        map_texts(messages, lambda text: used.update(text) or text)
        alphabet = {char for token_id in controls for char in self.vocabulary.added[token_id].content}
        unused = (char for char in map(chr, range(0x10FFFD, 0, -1)) if char not in used and char not in alphabet)
        mark = next(unused)
        disguise = {ord(char): next(unused) for char in sorted(used)
                    if not alphabet.isdisjoint(char + char.upper() + char.lower() + char.casefold())}
        undo = {ord(stand_in): char for char, stand_in in disguise.items()}
        plain, written = self._template.render(messages, *options, mark), None
        check_unicode(plain)
        for change in (lambda text: text.translate(disguise),
                       lambda text: "".join(part if token_id is None else part.translate(disguise)
                                            for token_id, part in self.encoder.cut(text, controls)), str):
            shown = self._template.render(map_texts(messages, change), *options, mark)
            parts = [(token_id, text.translate(undo)) for token_id, text in self.encoder.cut(shown, controls)]
            found = [token_id for token_id, _ in parts if token_id is not None]
            written = found if written is None else written
            if found == written and "".join(text for _, text in parts) == plain:
                return parts
        raise ValueError("the chat template changes message text that looks like a control token, so that it cannot be "
                         "told from the template's own: take it out of the message")

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template, self.named)

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What is put before a text, where something is: BOS, in some models more."""
        return self.prefix_ids or (() if self.bos_id is None else (self.bos_id,))

    def _with_bos(self, ids: list[int], bos: bool) -> list[int]:
        return [*self.start_ids, *ids] if bos and ids[:1] != [*self.start_ids[:1]] else ids

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
    added: Mapping[int, AddedToken]  # tokens that are found in a text first, and stand for themselves
    byte_level: bool  # characters of a token stand for bytes, by GPT-2's alphabet
    byte_of: Mapping[int, int] = field(default_factory=dict)  # ids of byte pieces like <0x0A>
    unused: frozenset[int] = frozenset()
    has_dummy_blank: bool = False  # encoding puts a blank before a text, so that its first word is like any other
    unknown_id: int | None = None  # what the encoder gives for text that it cannot spell
    unspelt: frozenset[int] = frozenset()  # bytes for which it gives nothing
    padded_to: int = 0  # the model's vocabulary may be wider than the tokenizer's: those ids stand for nothing
    _data: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def controls(self) -> frozenset[int]:
        return control_ids(self.added)

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
            return self.added[token_id].content.encode()
        if token_id >= self.num_tokens or token_id in self.unused:
            return b""
        token = self.token_of(token_id) or ""
        if token_id in self.byte_of:
            return bytes([self.byte_of[token_id]])
        if self.byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes([BYTE_OF_CHAR[char] for char in token])
        return token.replace(SPACE_MARK, " ").encode()


def control_ids(added: Mapping[int, AddedToken]) -> frozenset[int]:
    """Those of the added tokens that structure a prompt."""
    return frozenset(token_id for token_id, token in added.items() if token.special)


def byte_pieces(id_of: Callable[[str], int | None]) -> dict[int, int]:
    found = {id_of(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


# Encoders ----------------------------------------------------------------------------------------------------------

class Encoder:
    """Text to ids: added tokens are found first, what stands between them is the model's."""

    def __init__(self, added: Mapping[int, AddedToken]):
        self.controls = control_ids(added)
        self._added = added
        self._others = added.keys() - self.controls

    def encode(self, text: str, special: bool, at_start: bool = True) -> list[int]:
        """Ids of `text`, without BOS. at_start False: it continues a text (no dummy blank, if that is for starts)."""
        ids = []
        for token_id, part in self.cut(text, self._added if special else self._others):
            ids += self._encode_part(part, at_start) if token_id is None else [token_id]
            at_start = False
        return ids

    def cut(self, text: str, wanted: Collection[int]) -> Iterator[tuple[int | None, str]]:
        """`text` in pieces: (id, its text) for each of the `wanted` added tokens, (None, text) for what is between."""
        finder, id_of = self._finder
        finder.encode_special_tokens = self.controls.isdisjoint(wanted)  # the library's name for "they are text"
        found, end = finder.encode(text, add_special_tokens=False), 0
        for index, (start, stop) in zip(found.ids, found.offsets):
            if id_of[index] in wanted:
                if start > end:
                    yield None, text[end:start]
                yield id_of[index], text[start:stop]
                end = stop
        if end < len(text):
            yield None, text[end:]

    @cached_property
    def _finder(self) -> tuple[Pipeline, dict[int, int]]:
        """A pipeline that knows added tokens and nothing else, and what its ids mean."""
        pipeline = build_pipeline({}, [], self._added)
        return pipeline, {pipeline.token_to_id(token.content): token_id for token_id, token in self._added.items()}


class PipelineEncoder(Encoder):
    """The tokenizers library: normalizer, pre-tokenizer, model. The model may know the text of control tokens: if it
    makes one where there is to be none, the text is encoded again by a copy that does not."""

    def __init__(self, pipeline: Pipeline, added: Mapping[int, AddedToken]):
        super().__init__(added)
        self._pipeline = pipeline
        self._cutters = {True: pipeline.pre_tokenizer, False: without_first_blank(pipeline.pre_tokenizer)}

    def encode(self, text: str, special: bool, at_start: bool = True) -> list[int]:
        self._pipeline.encode_special_tokens = not special
        ids = self._run(self._pipeline, text, at_start)
        return ids if special or self.controls.isdisjoint(ids) else super().encode(text, special, at_start)

    def _encode_part(self, part: str, at_start: bool) -> list[int]:
        return self._run(self._plain, part, at_start)

    def _run(self, pipeline: Pipeline, text: str, at_start: bool) -> list[int]:
        pipeline.pre_tokenizer = self._cutters[at_start]
        return pipeline.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain(self) -> Pipeline:
        """The pipeline without added tokens, its model without control tokens (but the unknown one, which it needs)."""
        import tokenizers
        made = json.loads(self._pipeline.to_str())
        model, texts = made["model"], {self._added[token_id].content for token_id in self.controls}
        if isinstance(model["vocab"], list):  # an id is a place in the list
            model["vocab"] = [["" if token in texts else token, score] for token, score in model["vocab"]]
        else:
            vocab = {token: token_id for token, token_id in model["vocab"].items()
                     if token not in texts or token == model.get("unk_token")}
            prefix = model.get("continuing_subword_prefix") or ""
            model["merges"] = [(a, b) for a, b in model.get("merges", ())
                               if a in vocab and b in vocab and a + b.removeprefix(prefix) in vocab]
            model["vocab"] = vocab
        return tokenizers.Tokenizer.from_str(json.dumps(made | {"added_tokens": [], "post_processor": None}))


def without_first_blank(pre_tokenizer):
    """The same pre-tokenizer for a text that continues another: no blank where only the first word gets one."""
    state = pre_tokenizer.__getstate__() if pre_tokenizer else b""
    if b'"first"' not in state:
        return pre_tokenizer
    made = copy.copy(pre_tokenizer)
    made.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
    return made


class SentencePieceEncoder(Encoder):
    """The sentencepiece library, with a model in which no text gives a control token.

    blank: before what a dummy blank goes: "first" part of a text, "all" parts between added tokens.
    """

    def __init__(self, proto: bytes, added: Mapping[int, AddedToken], blank: str):
        super().__init__(added)
        self._model = load_sentencepiece(proto)
        # A field given again replaces the first: normalizer_spec (3) { add_dummy_prefix (3): false }.
        self._model_without_blank = load_sentencepiece(proto + b"\x1a\x02\x18\x00")
        self._blank = blank

    def _encode_part(self, part: str, at_start: bool) -> list[int]:
        return (self._model if at_start or self._blank == "all" else self._model_without_blank).encode(part)


def build_pipeline(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], added: Mapping[int, AddedToken],
                   ignore_merges: bool = False) -> Pipeline:
    import tokenizers
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    pipeline.add_tokens([*added.values()])
    return pipeline


def added_token(content: str, special: bool, **flags: bool) -> AddedToken:
    """flags: lstrip and rstrip (blanks on that side belong to the token), single_word (not inside a word)."""
    import tokenizers
    return tokenizers.AddedToken(content, special=special, **{"normalized": False} | flags)


def load_sentencepiece(proto: bytes, source: object = "the sentencepiece model") -> SentencePieceProcessor:
    import sentencepiece
    sentencepiece.set_min_log_level(3)  # the library reports damage on stderr too
    try:
        if not proto:
            raise RuntimeError("it is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{source} is damaged: {error}") from error
