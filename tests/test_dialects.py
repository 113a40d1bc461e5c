"""dialects.py: what a line may ask for, the shape of its answer, and what is said of a line that cannot be answered."""

import pytest

from batches import CHAT, chat_line, load, read, run, text_line, write
from sampling import SamplingParams


# ---------------------------------------------------------------------------------------------------------------------
# Short lines


def test_several_samples_and_logprobs(engine, folder, tmp_path):
    line = {"prompt": "abc", "raw": True, "num-samples": 3, "temperature": 1, "seed": 7, "logprobs": 2}
    run(engine, write(tmp_path / "in", [line]), tmp_path / "out")
    [answer] = read(tmp_path / "out")
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1, seed=7, logprobs=2, num_samples=3)
    expected = load(folder).generate(["abc"], params)
    assert [sample["token_ids"] for sample in answer["samples"]] == [one.token_ids for one in expected]
    assert [sample["seed"] for sample in answer["samples"]] == [7, 8, 9]
    assert answer["samples"][0].items() <= answer.items() and answer["id"] == 1
    assert answer["logprobs"] == expected[0].logprobs and len(answer["logprobs"][0]["top"]) == 2


def test_messages_and_an_open_assistant_turn(engine, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    lines = [{"messages": turns}, {"messages": turns[:1]}, {"prompt": "a"}]
    run(engine, write(tmp_path / "in", lines), tmp_path / "out", ordered=True, sampling={"logprobs": 0})
    opened, asked, prompted = read(tmp_path / "out")
    head = len(engine.tokenizer.chat([{"role": "user", "content": "a"}]))
    assert [opened["prompt_tokens"], asked["prompt_tokens"], prompted["prompt_tokens"]] == [head + 1, head, head]
    assert asked["token_ids"] == prompted["token_ids"]


@pytest.mark.parametrize("line, complaint", [
    ({}, "either prompt or messages"),
    ({"prompt": "a", "messages": []}, "not both"),
    ({"prompt": ""}, "empty"),
    ({"prompt": "a", "colour": 1}, "unknown sampling field 'colour'"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "max_tokens": 0}, "at least 1"),
    ({"prompt": "a", "top_p": 1.5}, "at most 1"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "99999"),
    ({"prompt": "a", "stop": [""]}, "stop string"),
    ({"prompt": "a", "logit_bias": 5}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ('{"prompt": "a", "max_tokens": 1e999}', "max_tokens"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "-1"),
    ({"prompt": "a", "temp": 1, "temperature": 1}, "second time"),
    ({"prompt": "a", "raw": "yes"}, "true or false"),
    ({"prompt": "a", "num_samples": 10**9}, "split it"),
    ({"prompt": "a", "class": "gold"}, "gold"),
    ({"prompt": "a", "id": 1.5}, "id is 1.5"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "tool_calls"),
    ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "raw"),
    ('{"prompt": "half \\ud83d"}', "\\ud83d is half"),
    ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "not JSON"),
    ("[" * 100_000, "not JSON"),
])
def test_a_short_line_that_cannot_be_answered(engine, tmp_path, line, complaint):
    assert run(engine, write(tmp_path / "in", [{"prompt": "good"}, line]), tmp_path / "out", ordered=True) == 1
    good, bad = read(tmp_path / "out")
    assert good["error"] is None and bad["id"] == 2
    assert complaint in bad["error"]["message"] and "\n" not in bad["error"]["message"]


def test_whole_characters_written_as_surrogate_pairs_are_fine(engine, tmp_path):
    source = write(tmp_path / "in", ['{"prompt": "\\ud83d\\ude00", "raw": true}'])
    assert run(engine, source, tmp_path / "out") == 0
    assert read(tmp_path / "out")[0]["prompt_tokens"] == 4


def test_bytes_that_are_not_utf8_are_named_by_their_place(engine, tmp_path):
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfab\r\ncd\x96\nef")
    assert run(engine, tmp_path / "in.txt", tmp_path / "out", ordered=True) == 1
    first, bad, last = read(tmp_path / "out")
    assert first["error"] is None and last["error"] is None
    assert bad["error"]["line"] == 2 and "0x96 at offset 9" in bad["error"]["message"]


# ---------------------------------------------------------------------------------------------------------------------
# OpenAI's form


def test_chat_lines_have_openais_shape(engine, folder, tmp_path):
    line = chat_line("x", n=2, temperature=1, logprobs=True, top_logprobs=3, model="their-name", user="u", tools=None,
                     stream=False, presence_penalty=0)
    assert run(engine, write(tmp_path / "in", [line]), tmp_path / "out") == 0
    [answer] = read(tmp_path / "out")
    assert answer.keys() == {"id", "custom_id", "response", "error"}
    assert (answer["custom_id"], answer["error"], answer["response"]["status_code"]) == ("x", None, 200)
    body = answer["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "their-name")
    prompt = engine.tokenizer.chat(line["body"]["messages"])
    expected = load(folder).generate([prompt], SamplingParams(max_tokens=4, temperature=1, seed=1, num_samples=2,
                                                              logprobs=3, ignore_eos=True))
    for i, (choice, sample) in enumerate(zip(body["choices"], expected, strict=True)):
        assert choice["index"] == i and choice["finish_reason"] == sample.finish_reason
        assert choice["message"] == {"role": "assistant", "content": sample.text, "refusal": None}
        for entry, ours in zip(choice["logprobs"]["content"], sample.logprobs, strict=True):
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert (entry["token"], entry["logprob"]) == (ours["token"], ours["logprob"])
            assert entry["bytes"] == ([ours["id"]] if ours["id"] < 256 else list(ours["token"].encode()))
            assert [top["logprob"] for top in entry["top_logprobs"]] == [top["logprob"] for top in ours["top"]]
    num_output = sum(len(sample.token_ids) for sample in expected)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_output, "total_tokens": len(prompt) + num_output}
    assert usage.items() <= body["usage"].items()


def test_text_lines_have_openais_shape(engine, folder, tmp_path):
    lines = [text_line("several", prompt=["ab", "cde"], n=2, temperature=1, max_tokens=3, echo=True),
             text_line("ids", prompt=[104, 105], logprobs=2), text_line("text", logprobs=2),
             text_line("lists", prompt=[[104, 105], [33]], echo=True, max_tokens=1)]
    source = write(tmp_path / "in", lines)
    assert run(engine, source, tmp_path / "out", ordered=True, sampling={"max_tokens": None}) == 0
    several, ids, text, lists = [answer["response"]["body"] for answer in read(tmp_path / "out")]
    expected = load(folder).generate(["ab", "cde"], SamplingParams(max_tokens=3, temperature=1, seed=1, num_samples=2,
                                                                   ignore_eos=True))
    assert several["object"] == "text_completion"
    assert [choice["text"] for choice in several["choices"]] == [
        prompt + sample.text for prompt, sample in zip(["ab", "ab", "cde", "cde"], expected)]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 5 and several["usage"]["completion_tokens"] == 12
    assert ids["choices"][0]["text"] == text["choices"][0]["text"]
    assert ids["usage"]["completion_tokens"] == 16  # OpenAI's default
    logprobs, others = (body["choices"][0]["logprobs"] for body in (ids, text))
    assert logprobs["tokens"] == others["tokens"] and logprobs["text_offset"] == others["text_offset"]
    assert logprobs["token_logprobs"] == pytest.approx(others["token_logprobs"], rel=1e-12)  # not to the last bit
    assert {len(column) for column in logprobs.values()} == {16}
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert top[token] == logprob and len(top) <= 3
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert lists["choices"][0]["text"].startswith("hi") and lists["choices"][1]["text"].startswith("!")


def test_openais_defaults(engine, tmp_path):
    """Temperature 1; a chat goes on to the context's end."""
    lines = [chat_line("a", max_tokens=None), chat_line("b", max_tokens=None, temperature=0),
             chat_line("c", max_completion_tokens=5, max_tokens=None)]
    run(engine, write(tmp_path / "in", lines), tmp_path / "out", ordered=True, sampling={"max_tokens": None})
    bodies = [answer["response"]["body"] for answer in read(tmp_path / "out")]
    assert [body["usage"]["total_tokens"] for body in bodies[:2]] == [256, 256]
    assert bodies[0]["choices"][0]["message"] != bodies[1]["choices"][0]["message"]
    assert bodies[2]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("line, complaint", [
    ('{"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "a", "model": NaN}}', "model is NaN"),
    (chat_line("b", stream=True), "stream"),
    (chat_line("b", tools=[{"type": "function"}]), "tools"),
    (chat_line("b", response_format={"type": "json_object"}), "response_format"),
    (chat_line("b", max_tokens=0), "at least 1"),
    (chat_line("b", max_completion_tokens=3), "second time"),
    ({"custom_id": "b", "url": CHAT, "body": {"max_completion_tokens": 3, "max_tokens": 3}}, "second time"),
    (text_line("b", num_samples=2, n=2), "second time"),
    (chat_line("b", logprobs=3), "true or false"),
    (chat_line("b", top_logprobs=3), "needs logprobs"),
    (chat_line("b", prompt="x"), "prompt"),
    (chat_line("b", messages=None), "messages is null"),
    (chat_line("b", colour="red"), "colour"),
    (chat_line("b", n=0), "at least 1"),
    (text_line("b", suffix="x"), "suffix"),
    (text_line("b", best_of=2), "best_of"),
    (text_line("b", echo=True, logprobs=1), "echo with logprobs"),
    (text_line("b", echo="x"), "true or false"),
    (text_line("b", messages=[]), "messages"),
    (text_line("b", prompt=[]), "none empty"),
    (text_line("b", prompt=[1, "a"]), "none empty"),
    (text_line("b", prompt=["a", ""]), "none empty"),
    (text_line("b", prompt=[["a"]]), "none empty"),
    (text_line("b", prompt=[5, 99999]), "99999"),
    ({"custom_id": "b", "url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
    ({"custom_id": "b", "url": [CHAT], "body": {}}, "url"),
    ({"custom_id": "b", "url": CHAT}, "body"),
    ({"custom_id": "b", "url": CHAT, "method": "GET", "body": {}}, "GET"),
    ({"custom_id": "b", "prompt": "short"}, "prompt"),
])
def test_an_openai_line_that_cannot_be_answered(engine, tmp_path, line, complaint):
    assert run(engine, write(tmp_path / "in", [chat_line("a"), line]), tmp_path / "out", ordered=True) == 1
    good, bad = read(tmp_path / "out")
    assert good["error"] is None and bad["custom_id"] == "b"
    assert bad["response"]["status_code"] == 400 and bad["response"]["request_id"]
    error = bad["response"]["body"]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert complaint in error["message"] and "line 2" in error["message"]
    assert bad["error"]["message"] == error["message"]


def test_openai_lines_without_an_id(engine, tmp_path):
    lines = ["{bad", chat_line("a"), "{bad", {"url": CHAT}, chat_line("a b")]
    assert run(engine, write(tmp_path / "in", lines), tmp_path / "out", ordered=True) == 1
    assert [answer["custom_id"] for answer in read(tmp_path / "out")] == [None, "a", None, None, "a b"]
    with pytest.raises(ValueError, match="--raw"):
        run(engine, tmp_path / "in", tmp_path / "other", raw=True)
