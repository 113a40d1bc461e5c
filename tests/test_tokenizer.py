"""tokenizer.py against Python's UTF-8 decoder and transformers' rendering of chat templates."""


import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokens import (BYTES, NORMAL, UNUSED, byte_ids, byte_level, byte_metadata, from_gguf,
                    from_path, spm_metadata, streamed, tokenizer_json, write)

# Decoding and streaming --------------------------------------------------------------------------------------------

def test_invalid_bytes_do_not_stop_the_stream(tb):
    data = bytes.fromhex("E4BDA0 F09F41FFC3")
    stream = tb.stream()
    pushed = [stream.push(token_id) for token_id in byte_ids(data)]
    assert pushed == ["", "", "你", "", "", "\ufffdA", "\ufffd", ""]
    assert stream.finish() == "\ufffd"
    assert tb.decode(byte_ids(data)) == "你\ufffdA\ufffd\ufffd" == data.decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["A 世a😀 b", "e\u0301x", "☺\ufe0f!", " ...", "': 's", "    .", " , n't do not ."])
def test_no_character_is_sent_twice_or_lost(tb, text):
    stream, sent = tb.stream(), ""
    for token_id in byte_ids(text.encode()):
        sent += stream.push(token_id)
        assert text.startswith(sent)
    assert sent + stream.finish() == text == tb.decode(byte_ids(text.encode()))


BYTE_RUNS = st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(lambda text: text.encode())), max_size=8)


@given(BYTE_RUNS, st.randoms(use_true_random=False))
def test_any_bytes_in_any_tokens_stream_to_the_whole_decode(runs, rng):
    data = b"".join(runs)
    cuts = sorted(rng.sample(range(len(data) + 1), rng.randint(0, min(5, len(data)))))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    merged = sorted({"".join(BYTES[byte] for byte in token) for token in tokens if len(token) > 1})
    ours = from_gguf(byte_metadata(merged=merged))
    ids = [([*BYTES, *merged]).index("".join(BYTES[byte] for byte in token)) for token in tokens if token]
    whole, stream, sent = data.decode("utf-8", "replace"), ours.stream(), ""
    for token_id in ids:
        sent += stream.push(token_id)
        assert whole.startswith(sent)
    assert sent + stream.finish() == whole == ours.decode(ids)


def test_sentencepiece_drops_one_blank_at_the_start_of_a_sequence_only(spm):
    tokens = ["▁", "▁leading", "▁x", "▁a", "▁time", "▁upon", "▁Once"]
    extra = [(token, NORMAL) for token in tokens if token not in {piece[0] for piece in spm.pieces}]
    ours = from_gguf(spm_metadata(spm, extra))
    names = spm_metadata(spm, extra)["tokenizer.ggml.tokens"]
    ids = {token: names.index(token) for token in tokens}
    assert ours.decode([ids["▁"], ids["▁leading"], ids["▁x"]]) == " leading x"
    assert streamed(ours, [ids["▁"], ids["▁leading"], ids["▁x"]]) == " leading x"
    assert ours.decode([1, ids["▁Once"], ids["▁upon"]]) == "Once upon"
    prompt = [1, ids["▁Once"], ids["▁upon"]]
    assert streamed(ours, [ids["▁a"], ids["▁time"]], prompt) == " a time"
    assert ours.decode([*prompt, ids["▁a"], ids["▁time"]]) == "Once upon a time"
    assert streamed(ours, [ids["▁a"]], [1]) == "a"  # nothing visible stands before
    assert ours.piece(ids["▁a"]) == " a"


def test_byte_level_keeps_a_leading_blank():
    ours = from_gguf(byte_metadata(merged=["Ġleading"]))
    assert ours.decode([256]) == streamed(ours, [256]) == streamed(ours, [256], [65]) == " leading"


def test_control_tokens_show_only_when_asked():
    ours = from_gguf(byte_metadata())
    ids = ours.encode("<s>a<|im_end|>b</s>")
    assert ids == [256, 97, 259, 98, 257]
    assert ours.decode(ids) == streamed(ours, ids) == "ab"
    assert ours.decode(ids, show_special=True) == streamed(ours, ids, show_special=True) == "<s>a<|im_end|>b</s>"
    assert ours.piece(259) == "<|im_end|>"
    assert ours.encode("<s>a", special=False) == byte_ids(b"<s>a")


def test_a_hybrid_tokenizer_shows_no_marks(tmp_path):
    vocab = {token: token_id for token_id, token in enumerate([*BYTES, "Hello", "Ġworld", "▁there"])}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    file = tokenizer_json(vocab, pre_tokenizer=byte_level(), decoder=decoder)
    ours = from_path(write(tmp_path / "hybrid", tokenizer_json=file))
    assert ours.decode([256, 257]) == streamed(ours, [256, 257]) == "Hello world"
    assert [ours.piece(token_id) for token_id in (256, 257, 258)] == ["Hello", " world", " there"]


def test_ids_of_the_padded_vocabulary_decode_to_nothing():
    ours = from_gguf(byte_metadata(), vocab=320)
    assert ours.vocab_size == 320
    assert ours.decode([97, 310, 319, 98]) == streamed(ours, [97, 310, 319, 98]) == "ab"
    assert ours.piece(310) == ""
    for token_id in (320, -1):
        with pytest.raises(ValueError, match=f"{token_id} .*0 to 319"):
            ours.decode([token_id])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            ours.stream().push(token_id)


def test_unused_tokens_decode_to_nothing():
    metadata = byte_metadata(merged=["[PAD1]"])
    metadata["tokenizer.ggml.token_type"][256] = UNUSED
    assert from_gguf(metadata).decode([97, 256, 98]) == "ab"
