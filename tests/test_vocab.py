"""vocab.py against the tokenizers and sentencepiece libraries.

References are built here from the files by another road: the gguf package reads the vocabulary, and a tokenizer.json
written below holds the rules that the models' publishers give.
"""

import json
import random
import struct
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

import checkpoint
from tokenizer import SentencePieceEncoder, added_token
from tokens import (BYTE, BYTES, CHATML, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_ids, byte_json, byte_level,
                    byte_metadata, fake_checkpoint, from_gguf, from_path, sequence, split, spm_json, spm_metadata,
                    streamed, tokenizer_json, write)
from vocab import load_tokenizer

DATA = Path(__file__).parent / "data"


# The three real vocabularies ---------------------------------------------------------------------------------------

# As Qwen/Qwen2.5-Coder publishes it.
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
         r"\s+")
RULES = {"smollm": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, byte_level())},
         "qwen2": {"pre_tokenizer": sequence(split(QWEN2), byte_level(use_regex=False)), "normalizer": {"type": "NFC"}}}


@cache
def reference(path):
    """The file's tokenizer in the tokenizers library, its vocabulary read with the gguf package."""
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(path).fields
    tokens, kinds, merges, pre = (fields[f"tokenizer.ggml.{name}"].contents()
                                  for name in ("tokens", "token_type", "merges", "pre"))
    added = [{"id": i, "content": tokens[i], "special": kind == CONTROL}
             for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    made = tokenizer_json(vocab, merges, added, decoder=byte_level(), **RULES[pre])
    return tokenizers.Tokenizer.from_str(made)


SCRIPTS = (
    "abcdefghijklmnopqrstuvwxyz ETAOIN", "0123456789", "٠١٢३४५Ⅷ½²", "äöüßéèñçåøł", "абвгдежз ий", "αβγδ ωάί",
    "中文字符日本語かなカナ", "한국어텍스트", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "ไทยภาษา", "ಕನ್ನಡ தமிழ்",
    "😀👍🏽🇺🇸👩\u200d👩\u200d👧❤\ufe0f🏴\U000e0067\U000e007f", "!?.,;:'\"()[]{}<>|/\\@#$%^&*-_=+~`", "—–…“”‘’«»¿¡€£¥",
    "\x00\x01\x02\x04\x07\x08\x0b\x0c\x1b\x1f\x7f\x85\xad", " \t\n\r\xa0\u2003\u3000\u200b\ufeff",
    "e\u0301o\u0308\u0338", "\U00010330\U0001d400\U00020000\U000f0000\U0010fffd", "\ufffd\ufffe\ufdd0")
PHRASES = (
    "'s", "'T", "I'm", "they'LL", "don't", "  ", "    ", "\n\n", "\r\n", " \n ", "\t\t", "1234567", "3.14", " 12", "x2",
    "def f(x):\n\treturn x", "http://a.b/c?d=e", "Straße", "déjà—vu!!", "naïve", "https", "ÀÉÎ", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<file_sep>",
    "<s>", "[PAD151665]", "Ġ", "Ċ", "▁", "<0x41>")


def generated_strings(count=2100):
    rng = random.Random(20240607)
    for i in range(count):
        parts = []
        for _ in range(rng.randint(1, 8)):
            script = rng.choice(SCRIPTS)
            parts.append(rng.choice(PHRASES) if rng.random() < 0.35 else
                         "".join(rng.choice(script) for _ in range(rng.randint(1, 9))))
        yield rng.choice(("", " ", "")).join(parts)


@pytest.fixture(scope="module", params=["smollm2", "qwen_05b", "qwen_15b"])
def real(request):
    """One file's tokenizer, and the library's. The two Qwen files have the same: the reference of one serves both."""
    path = request.getfixturevalue(request.param)
    with checkpoint.open_checkpoint(path) as opened:
        ours = load_tokenizer(opened)
    theirs = reference(request.getfixturevalue("smollm2" if request.param == "smollm2" else "qwen_05b"))
    return SimpleNamespace(ours=ours, theirs=theirs, name=request.param)


@pytest.mark.models
@pytest.mark.slow
def test_real_vocabularies_give_the_ids_of_the_tokenizers_library(real):
    for special in (True, False):
        real.theirs.encode_special_tokens = not special
        for text in generated_strings():
            expected = real.theirs.encode(text, add_special_tokens=False).ids
            assert real.ours.encode(text, special=special) == expected, repr(text)


@pytest.mark.models
@pytest.mark.slow
def test_real_vocabularies_decode_to_the_text_again(real):
    lossy = {"smollm2": {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}}.get(real.name, set())
    rng = random.Random(7)
    for text in generated_strings(700):
        if not lossy.isdisjoint(text.encode()):
            continue
        ids = real.ours.encode(text, special=False)
        composed = real.theirs.normalizer.normalize_str(text) if real.theirs.normalizer else text
        assert real.ours.decode(ids) == composed
        ids = [rng.randrange(real.theirs.get_vocab_size()) for _ in range(20)]
        assert streamed(real.ours, ids) == real.ours.decode(ids)


@pytest.mark.models
def test_known_ids_of_qwen(qwen_05b):
    with checkpoint.open_checkpoint(qwen_05b) as opened:
        ours = load_tokenizer(opened)
    assert ours.encode("Hello world") == [9707, 1879]  # as in Qwen's own documentation
    assert (ours.add_bos, ours.eos_ids[0], ours.vocab_size) == (False, 151645, 151936)
    assert 151643 in ours.eos_ids and ours.kind == "bpe qwen2" and ours.notes == []
    assert ours.decode([151935]) == "" and ours.decode([151644], show_special=True) == "<|im_start|>"
    ids = ours.chat([{"role": "user", "content": "hi"}])
    assert ours.decode(ids, show_special=True) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.models
def test_smollm2_isolates_digits_as_llama_cpp_does(smollm2):
    with checkpoint.open_checkpoint(smollm2) as opened:
        ours = load_tokenizer(opened)
    ids = json.loads((DATA / "text30k.llamacpp.ids.json").read_text())
    assert len(ids) == 6379
    assert ours.encode(ours.decode(ids)) == ids
    assert (ours.add_bos, ours.bos_id, ours.eos_ids[0], ours.kind) == (False, 1, 2, "bpe smollm")


@pytest.mark.models
def test_smollm2_says_what_it_cannot_spell(smollm2):
    with checkpoint.open_checkpoint(smollm2) as opened:
        ours = load_tokenizer(opened)
    ours.encode("all of this can be spelt")
    assert ours.notes == []
    assert ours.decode(ours.encode("a\x04b")) == "ab"  # what the tokenizers library and llama.cpp do
    ours.encode("again \x04 and \x06")
    assert len(ours.notes) == 1 and "U+0004" in ours.notes[0]


@pytest.mark.models
def test_smollm2_chat_has_the_default_system_message(smollm2):
    with checkpoint.open_checkpoint(smollm2) as opened:
        ours = load_tokenizer(opened)
    text = ours.decode(ours.chat([{"role": "user", "content": "hi"}]), show_special=True)
    assert text == ("<|im_start|>system\n"
                    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# Byte-level BPE ----------------------------------------------------------------------------------------------------

LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
PUBLISHED = {  # the pre_tokenizer of a model's own tokenizer.json
    "gpt-2": byte_level(),
    "smollm": sequence({"type": "Digits", "individual_digits": True}, byte_level()),
    "starcoder": sequence({"type": "Digits", "individual_digits": True}, byte_level()),
    "llama-bpe": sequence(split(LLAMA3), byte_level(use_regex=False)),
    "qwen2": sequence(split(QWEN2), byte_level(use_regex=False)),
    "falcon": sequence({"type": "Punctuation", "behavior": "Contiguous"}, byte_level(),
                       {"type": "Digits", "individual_digits": False}, split("[0-9][0-9][0-9]")),
    "deepseek-coder": sequence(split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"),
                               split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
                               {"type": "Digits", "individual_digits": True}, byte_level(use_regex=False)),
    "qwen35": sequence(split(QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")),
                       byte_level(use_regex=False)),
    "tekken": sequence(split("|".join([
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])),
        byte_level(use_regex=False)),
    "gpt-4o": sequence(split("|".join([
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])),
        byte_level(use_regex=False)),
}
SAMPLES = [
    "1234567 x's  \n\n déjà—vu!!", "It's 12 o'clock, I'LL be 3.14159 late...\t\tOK?\r\n\r\n  yes", "a1b22c333 d4444",
    "中文 字符 123 がな!", "HTTPServer's getURL() == x_1 += 22;\n\n\n    indent", " leading and trailing  ",
    "$5 + 66% = 777"]


@pytest.fixture(scope="session")
def greedy_bpe():
    """Merges learnt without any pre-tokenizer: they run across words, so every wrong split changes the ids."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=BYTES, show_progress=False, min_frequency=1)
    learner.train_from_iterator(SAMPLES * 3, trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [" ".join(merge) for merge in model["merges"]]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_named_pre_tokenizers_split_as_published(pre, greedy_bpe):
    vocab, merges = greedy_bpe
    whole_words = pre in ("llama-bpe", "tekken")
    theirs = tokenizers.Tokenizer.from_str(
        tokenizer_json(vocab, merges, pre_tokenizer=PUBLISHED[pre], ignore_merges=whole_words))
    ours = from_gguf({f"tokenizer.ggml.{key}": value for key, value in {
        "model": "gpt2", "pre": pre, "tokens": sorted(vocab, key=vocab.get), "merges": merges}.items()})
    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_named_pre_tokenizers_differ_in_digits():
    def cut(pre):
        words = [(a, b) for a in "0123456789" for b in "0123456789"]
        triples = [(a + b, c) for a, b in words for c in "0123456789"]
        merged = ["".join(pair) for pair in words + triples]
        ours = from_gguf(byte_metadata(merged=merged, merges=[" ".join(pair) for pair in words + triples], pre=pre))
        return [ours.piece(token_id) for token_id in ours.encode("1234567", bos=False)]
    assert cut("llama-bpe") == ["123", "456", "7"]
    assert cut("qwen2") == cut("smollm") == list("1234567")
    assert cut("gpt-2") == ["12", "34", "567"]  # one word: merges decide


@pytest.mark.parametrize("pre", [None, "qwen99", ""])
def test_an_unknown_pre_tokenizer_is_an_error_that_names_the_known_ones(pre):
    metadata = byte_metadata(pre=pre)
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ValueError, match=f"{pre!r}.*smollm.*qwen2"):
        from_gguf(metadata)


def test_an_unknown_tokenizer_model_is_an_error():
    with pytest.raises(ValueError, match="'rwkv'.*gpt2, llama"):
        from_gguf(byte_metadata(model="rwkv"))


def test_merges_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="merges do not fit"):
        from_gguf(byte_metadata(merges=["a b"]))
    with pytest.raises(ValueError, match="token types"):
        from_gguf(byte_metadata(token_type=[1, 1]))


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_a_whole_word_wins_over_merges_where_the_model_says_so(ignore_merges, tmp_path):
    expected = ["abc"] if ignore_merges else ["a", "b", "c"]
    gguf = from_gguf(byte_metadata(merged=["abc"], pre="llama-bpe" if ignore_merges else "gpt-2", add_bos_token=False))
    vocab = {token: token_id for token_id, token in enumerate([*BYTES, "abc"])}
    file = tokenizer_json(vocab, pre_tokenizer=byte_level(), decoder=byte_level(), ignore_merges=ignore_merges)
    for ours in (gguf, from_path(write(tmp_path / "m", tokenizer_json=file))):
        assert [ours.piece(token_id) for token_id in ours.encode("abc")] == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a" * 200_000, "ab" * 100_000, " " * 200_000, "word " * 100_000],
                         ids=["a", "ab", "blanks", "words"])
def test_long_text_without_a_break_is_not_quadratic(text, greedy_bpe, spm):
    vocab, merges = greedy_bpe
    doubling = [("a" * 2**i, "a" * 2**i) for i in range(5)]
    bpe = from_gguf(byte_metadata(merged=[a + b for a, b in doubling], merges=[f"{a} {b}" for a, b in doubling]))
    for ours in (bpe, from_gguf(spm_metadata(spm, add_bos_token=False))):
        started = time.process_time()
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert time.process_time() - started < 6


def test_random_letters_without_a_break(greedy_bpe):
    vocab, merges = greedy_bpe
    text = "".join(random.Random(3).choices("abcdefghijklmnopqrstuvwxyz", k=200_000))
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(vocab, merges, pre_tokenizer=byte_level()))
    ours = from_gguf({f"tokenizer.ggml.{key}": value for key, value in {
        "model": "gpt2", "pre": "gpt-2", "tokens": sorted(vocab, key=vocab.get), "merges": merges}.items()})
    assert ours.encode(text) == theirs.encode(text).ids


# sentencepiece, three containers -----------------------------------------------------------------------------------

TEXTS = ["once upon a time", " leading", "  two  blanks ", "A and <0x41>", "naïve 😀 世界", "a\nb\tc\x00d", "", " "]


def spm_tokenizers(spm, tmp_path):
    folder = write(tmp_path / "folder")
    (folder / "tokenizer.model").write_bytes(spm.path.read_bytes())
    records = [(score, text.replace("▁", " ").encode()) for text, score, _ in spm.pieces]
    binary = struct.pack("<i", 99) + b"".join(struct.pack("<fi", score, len(text)) + text for score, text in records)
    (tmp_path / "tokenizer.bin").write_bytes(binary)
    return {"gguf": from_gguf(spm_metadata(spm)), "model": from_path(folder),
            "bin": from_path(tmp_path / "tokenizer.bin")}


@pytest.mark.parametrize("container", ["gguf", "model", "bin"])
def test_sentencepiece_ids_and_decode(container, spm, tmp_path):
    ours = spm_tokenizers(spm, tmp_path)[container]
    assert ours.kind == "sentencepiece" and ours.add_bos and ours.bos_id == 1 and 2 in ours.eos_ids
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [1, *spm.model.encode(text)], text
        assert ours.decode(ids) == streamed(ours, ids) == text


def test_a_byte_piece_is_not_its_name(spm):
    ours = from_gguf(spm_metadata(spm))
    names = [piece[0] for piece in spm.pieces]
    assert ours.encode("tA")[-1] == names.index("A")
    assert names.index("<0x41>") not in ours.encode("<0x41>")
    assert ours.decode([names.index("<0x41>")]) == "A"


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("text", ["<|im_start|>user", "<|im_start|> user", "a<|im_start|>b", "<s>a", "a b</s> c", "x"])
def test_the_word_after_an_added_token(legacy, text, spm, tmp_path):
    theirs = tokenizers.Tokenizer.from_str(spm_json(spm, ["<|im_start|>"], legacy))
    expected = theirs.encode(text).ids
    file = from_path(write(tmp_path / "json", tokenizer_json=spm_json(spm, ["<|im_start|>"], legacy)))
    added = {str(len(spm.pieces)): {"content": "<|im_start|>", "special": True}}
    folder = write(tmp_path / "model", tokenizer_config_json={"legacy": legacy, "added_tokens_decoder": added})
    (folder / "tokenizer.model").write_bytes(spm.path.read_bytes())
    found = [file, from_path(folder)]
    if legacy:  # a GGUF file cannot say; it means what llama.cpp does
        found.append(from_gguf(spm_metadata(spm, [("<|im_start|>", CONTROL)])))
    for ours in found:
        assert ours.encode(text, bos=False) == expected
        assert ours.vocab_size == len(spm.pieces) + 1


def test_gguf_without_a_dummy_blank(spm):
    ours = from_gguf(spm_metadata(spm, [("<tool>", USER_DEFINED)], add_space_prefix=False, add_bos_token=False))
    assert ours.decode(ours.encode("time")) == "time" and ours.decode(ours.encode(" time")) == " time"
    assert ours.encode("time") != ours.encode(" time") == spm.model.encode("time")
    assert ours.encode("a<tool>b", special=False)[1] == len(spm.pieces)  # text that is always one token


def test_a_character_without_a_piece_becomes_the_unknown_token(spm):
    metadata = spm_metadata(spm)
    metadata["tokenizer.ggml.token_type"] = [NORMAL if kind == BYTE else kind for _, _, kind in spm.pieces]
    ours = from_gguf(metadata)
    assert ours.notes == [] and 0 in ours.encode("世") and "unknown token" in ours.notes[0]


def test_odd_vocabularies_are_read(spm):
    ours = from_gguf(spm_metadata(spm, [("", NORMAL), ("user", NORMAL), ("user", NORMAL), ("<u2>", UNKNOWN)]))
    assert ours.encode("time", bos=False) == spm.model.encode("time")


def test_damaged_files_are_refused(tmp_path):
    for name, data in {"t.model": b"\xff\xff\xff", "t.bin": struct.pack("<ifi", 9, 0.0, 99) + b"abc", "t.json": b"{}",
                       "short.bin": b"\0\0\0\0\0\0"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="damaged|beyond|no tokenizer|ends in"):
            from_path(tmp_path / name)
    for name in ("missing.json", "folder", "t.txt"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "t.txt").write_text("x")
        with pytest.raises(ValueError, match="no tokenizer|neither|not a tokenizer"):
            from_path(tmp_path / name)
    with pytest.raises(ValueError, match="--tokenizer"):
        load_tokenizer(fake_checkpoint("llama2c", path="stories.bin"))


def test_damage_is_reported_once(tmp_path, capfd):
    for data in (b"", b"\xff\xff\xff", b"\n\x03abc"):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(ValueError, match=r"tokenizer\.model is damaged: ") as caught:
            from_path(tmp_path)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


DEEP = "[" * 100_000


@pytest.mark.parametrize(("key", "value"), [
    ("bos_token", 5), ("bos_token", ["x"]), ("bos_token", {"content": 5}), ("eos_token", True), ("chat_template", 5),
    ("chat_template", {"default": "x"}), ("chat_template", ["x"]), ("chat_template", [{"name": "default"}]),
    ("chat_template", [{"template": "x"}]), ("chat_template", [{"name": 5, "template": "x"}]), ("add_bos_token", "x"),
    ("add_bos_token", 1), ("added_tokens_decoder", 5), ("added_tokens_decoder", {"x": {"content": "<x>"}}),
    ("added_tokens_decoder", {"-1": {"content": "<x>"}}), ("added_tokens_decoder", {"10000000000": {"content": "<x>"}}),
    ("added_tokens_decoder", {"300": 5}), ("added_tokens_decoder", {"300": {}}),
    ("added_tokens_decoder", {"300": {"content": 5}}), ("added_tokens_decoder", {"9" * 5000: {"content": "<x>"}}),
    ("added_tokens_decoder", {"300": {"content": "<x>", "special": "yes"}})])
@pytest.mark.parametrize("kind", ["json", "model"])
def test_a_config_that_makes_no_sense_is_an_error_that_names_file_and_key(key, value, kind, tmp_path, spm):
    folder = write(tmp_path / "odd", tokenizer_config_json={key: value})
    if kind == "json":
        write(folder, tokenizer_json=byte_json())
    else:
        (folder / "tokenizer.model").write_bytes(spm.path.read_bytes())
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: key '{key}") as caught:
        from_path(folder)
    assert "\n" not in str(caught.value)


def test_other_files_that_make_no_sense(tmp_path, spm):
    folder = write(tmp_path / "odd", special_tokens_map_json={"bos_token": ["<s>"]})
    (folder / "tokenizer.model").write_bytes(spm.path.read_bytes())
    with pytest.raises(ValueError, match=r"special_tokens_map\.json: key 'bos_token'"):
        from_path(folder)
    write(folder, special_tokens_map_json={})
    for token_id in ("5", -1, 1.5, True, 10**10, None):
        write(folder, added_tokens_json={"<x>": token_id})
        with pytest.raises(ValueError, match=r"added_tokens\.json: key '<x>'"):
            from_path(folder)
    for name in ("added_tokens", "special_tokens_map", "tokenizer_config"):
        (folder / "added_tokens.json").unlink(missing_ok=True)
        write(folder, **{f"{name}_json": DEEP})
        with pytest.raises(ValueError, match=rf"{name}\.json"):
            from_path(folder)
        write(folder, **{f"{name}_json": {}})
    (folder / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        from_path(folder)


@pytest.mark.parametrize(("key", "value"), [
    ("model", ["gpt2"]), ("pre", ["gpt-2"]), ("pre", 5), ("bos_token_id", "1"), ("eos_token_id", [257]),
    ("eot_token_id", 1.0), ("padding_token_id", True), ("add_bos_token", 1), ("add_bos_token", "x")])
def test_metadata_that_make_no_sense_are_an_error_that_names_the_key(key, value):
    with pytest.raises(ValueError, match=f"GGUF file: key 'tokenizer.ggml.{key}'"):
        from_gguf(byte_metadata(**{key: value}))


def test_other_metadata_that_make_no_sense(spm):
    with pytest.raises(ValueError, match=r"key 'tokenizer\.ggml\.add_space_prefix'"):
        from_gguf(spm_metadata(spm, add_space_prefix=1))
    with pytest.raises(ValueError, match=r"key 'tokenizer\.chat_template'"):
        from_gguf(byte_metadata(template=["x"]))
    assert from_gguf(byte_metadata(bos_token_id=-1, eos_token_id=2**32 - 1)).bos_id is None  # "there is none"


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@pytest.mark.parametrize("fields", [
    {"decoder": METASPACE | {"replacement": "_"}, "pre_tokenizer": METASPACE},
    {"decoder": METASPACE, "pre_tokenizer": METASPACE | {"replacement": "_"}},
    {"decoder": REPLACE | {"content": "_"}}, {"decoder": REPLACE | {"pattern": {"String": "a"}}},
    {"decoder": STRIP | {"start": 2}}, {"decoder": STRIP | {"stop": 1}}, {"decoder": STRIP | {"content": "a"}},
    {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, {"pre_tokenizer": None, "decoder": None}])
def test_ways_of_decoding_that_are_not_understood_are_refused(fields, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json (asks for decoder|writes blanks|has no decoder)"):
        from_path(write(tmp_path / "way", tokenizer_json=byte_json(**fields)))


def test_a_blank_that_the_decoder_drops_is_dropped(tmp_path):
    file = byte_json(decoder={"type": "Sequence", "decoders": [byte_level(), STRIP]})
    ours, theirs = from_path(write(tmp_path / "strip", tokenizer_json=file)), tokenizers.Tokenizer.from_str(file)
    for text in (" a b", "a ", "  a"):
        assert ours.decode(byte_ids(text.encode())) == theirs.decode(byte_ids(text.encode())) == text.removeprefix(" ")


# Added tokens, BOS -------------------------------------------------------------------------------------------------

FLAGS = [("x <m>  y", {"rstrip": True}), ("x  <m>y", {"lstrip": True}), ("a<m>b <m> c", {"single_word": True}),
         ("<m><m> <m>", {"lstrip": True, "rstrip": True}), ("x <m>  y", {})]


@pytest.mark.parametrize(("text", "flags"), FLAGS)
@pytest.mark.parametrize("special", [True, False])
def test_flags_of_added_tokens(text, flags, special, tmp_path, spm):
    file = byte_json(added=[{"content": "<m>", "special": special} | flags])
    ours = from_path(write(tmp_path / "flags", tokenizer_json=file))
    assert ours.encode(text) == tokenizers.Tokenizer.from_str(file).encode(text).ids
    # sentencepiece knows no added tokens: ours are cut out of the text first, by the same rules.
    encoder = SentencePieceEncoder(spm.path.read_bytes(), {999: added_token("<m>", special, **flags)}, blank="first")
    theirs = tokenizers.Tokenizer(models.WordLevel({"<m>": 999, "?": 0}, unk_token="?"))
    theirs.add_tokens([AddedToken("<m>", normalized=False, **flags)])
    shape = [part if part == 999 else "text" for part in theirs.encode(text).ids]
    found = [part if part == 999 else "text" for part in encoder.encode(text, special=True)]
    assert [a for i, a in enumerate(found) if a == 999 or found[i - 1:i] != ["text"]] == shape


def test_blanks_stripped_by_an_added_token_give_no_ids(tmp_path):
    for flags, text, expected in (({"rstrip": True}, "x <m>  y", "x <m>y"), ({"lstrip": True}, "x  <m> y", "x<m> y")):
        file = byte_json(added=[{"content": "<m>"} | flags])
        ours = from_path(write(tmp_path / "strip", tokenizer_json=file))
        assert ours.decode(ours.encode(text), show_special=True) == expected


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path):
    made = tokenizers.Tokenizer.from_str(byte_json())
    made.enable_truncation(4)
    made.enable_padding(length=9)
    ours = from_path(write(tmp_path / "cut", tokenizer_json=made.to_str()))
    assert ours.encode("longer than four") == byte_ids(b"longer than four")


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template_bos", ["", "{{ bos_token }}"])
def test_one_bos_at_most(add_bos, template_bos):
    ours = from_gguf(byte_metadata(template=template_bos + CHATML, add_bos_token=add_bos))
    ids = ours.chat([{"role": "user", "content": "hi"}])
    assert ids.count(256) == (1 if add_bos or template_bos else 0)
    assert ids[0] == (256 if add_bos or template_bos else 258)
    assert ours.encode("<s>hi").count(256) == 1
    assert ours.encode("hi").count(256) == add_bos
    assert ours.encode("hi", bos=True)[0] == 256 and ours.encode("hi", bos=False)[0] != 256
    assert ours.encode("<s>hi", bos=True).count(256) == 1


def test_two_control_tokens_of_a_template_stay():
    ours = from_gguf(byte_metadata(template="<s><|im_start|>{{ messages[0].content }}", add_bos_token=False))
    assert ours.chat([{"role": "user", "content": "x"}]) == [256, 258, ord("x")]


def test_bos_of_a_tokenizer_json(tmp_path):
    processor = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                 "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                 "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}}
    folder = write(tmp_path / "bos", tokenizer_json=byte_json(post_processor=processor))
    ours = from_path(folder)
    assert (ours.bos_id, ours.add_bos, ours.encode("a")) == (256, True, [256, 97])
    write(folder, tokenizer_config_json={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": False})
    ours = from_path(folder, eos_ids=(300, 257), vocab=320)
    assert (ours.bos_id, ours.add_bos, ours.eos_ids, ours.encode("a")) == (256, False, (257, 300), [97])


def post_processor(*single):
    """single: tokens, and "$A" for the text."""
    def part(name):
        return {"Sequence": {"id": "A", "type_id": 0}} if name == "$A" else {"SpecialToken": {"id": name, "type_id": 0}}
    special = {name: {"id": name, "ids": [256 + "st".index(name[-2])], "tokens": [name]} for name in {*single} - {"$A"}}
    return {"type": "TemplateProcessing", "single": [*map(part, single)], "pair": [part("$A")],
            "special_tokens": special}


@pytest.mark.parametrize("config", [{}, {"eos_token": "<t>"}, {"bos_token": "<s>"}])
def test_only_what_a_tokenizer_json_puts_before_a_text_is_put_there(config, tmp_path):
    def tokenizer(*single):
        file = byte_json(({"content": "<s>"}, {"content": "<t>"}), post_processor=post_processor(*single))
        return from_path(write(tmp_path / "post", tokenizer_json=file, tokenizer_config_json=config), vocab=258)
    both = tokenizer("<s>", "<t>", "$A")
    assert both.encode("a") == [256, 257, 97] and both.bos_id == 256 and both.notes == []
    assert both.encode("<s>a") == [256, 97] and both.encode("a", bos=False) == [97]
    after = tokenizer("$A", "<t>")
    assert after.encode("a") == [97] and not after.add_bos and "<t> after a text" in after.notes[0]
    assert after.bos_id == (256 if "bos_token" in config else None)
    around = tokenizer("<s>", "$A", "<t>")
    assert around.encode("a") == [256, 97] and len(around.notes) == 1
    assert not tokenizer("$A").add_bos


def entry(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": True} | flags


def test_added_tokens_of_the_config_beside_a_tokenizer_json(tmp_path):
    decoder = {"258": entry("<m>", rstrip=True), "256": entry("<s>"), "257": entry("<t>"),
               "259": entry("uu", special=False)}
    file = byte_json([{"content": "<s>"}, {"content": "<t>", "special": False}])
    folder = write(tmp_path / "added", tokenizer_json=file,
                   tokenizer_config_json={"added_tokens_decoder": decoder, "eos_token": "<m>"})
    ours = from_path(folder, vocab=260)
    assert ours.encode("<s>a<t><m>  buu") == [256, 97, 257, 258, 98, 259] and ours.eos_ids == (258,)
    assert ours.vocabulary.controls == {256, 257, 258} and ours.decode([97, 257, 258, 259]) == "auu" and not ours.notes
    write(folder, tokenizer_config_json={"added_tokens_decoder": {"300": entry("<x>")}})
    assert "differ in the id of '<x>'" in from_path(folder, vocab=260).notes[0]


def test_it_reads_what_transformers_reads_of_a_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    decoder = {"256": entry("<s>"), "257": entry("<t>", lstrip=True), "258": entry("<m>")}
    folder = write(tmp_path / "theirs", tokenizer_json=byte_json([{"content": "<s>"}]), tokenizer_config_json={
        "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder, "eos_token": "<m>"})
    theirs, text = transformers.AutoTokenizer.from_pretrained(folder), "a <t>b<m><s>"
    ours = from_path(folder, vocab=259)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.decode([97, 257, 258]) == theirs.decode([97, 257, 258], skip_special_tokens=True)


def test_a_token_that_only_the_config_calls_special_is_a_control_token(tmp_path):
    added = [{"content": "</s>", "special": False, "rstrip": True}]
    folder = write(tmp_path / "eos", tokenizer_json=byte_json(added=added),
                   tokenizer_config_json={"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"})
    ours = from_path(folder)
    assert ours.encode("a</s>  b") == [97, 256, 98] and ours.decode([97, 256, 98]) == "ab"
    assert ours.chat([{"role": "user", "content": "a</s>"}]) == byte_ids(b"a</s>")


def test_llama3_files_add_bos_unless_they_say_no():
    assert from_gguf(byte_metadata(pre="llama-bpe")).add_bos
    assert not from_gguf(byte_metadata(pre="llama-bpe", add_bos_token=False)).add_bos


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", "ok \ud83d\u0041"])
def test_half_a_character_is_an_error_with_its_position(tb, text):
    with pytest.raises(ValueError, match=rf"U\+D[8C][0-9A-F]+.* at character {len(text.rstrip('A')) - 1}"):
        tb.encode(text)
