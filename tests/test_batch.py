"""batch.py: a file of records gives the same answers as the engine asked one by one, whatever happens on the way."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import batch
import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import SamplingParams
from vocab import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture
def engine(folder):
    return load(folder)


def load(folder, **config) -> Engine:
    with open_checkpoint(folder) as checkpoint:
        return Engine(load_model(checkpoint, torch.float64), EngineConfig(**{"max_requests": 3, "page_size": 8,
                      "num_pages": 200} | config), load_tokenizer(checkpoint), name="tiny")


def run(engine, source, output=None, sampling=(), **flags) -> int:
    flags = dict.fromkeys(("ordered", "resume", "overwrite", "raw"), False) | flags
    args = Namespace(input=str(source), output=output and str(output), deadline=None,
                     sampling={"max_tokens": 6, "ignore_eos": True} | dict(sampling), **flags)
    return batch.main(engine, args)


def write(path: Path, lines) -> Path:
    """A file of lines: JSON unless they are text already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def by_id(path: Path) -> dict:
    """Answers by their id; each once; without what depends on who ran beside them."""
    answers = read(path)
    found = {answer["id"]: answer for answer in answers}
    assert len(found) == len(answers)
    return {id: {key: value for key, value in answer.items() if key not in ("cached_tokens", "preemptions")}
            for id, answer in found.items()}


def records(num: int, rng=random.Random(5)) -> list[dict]:
    """Short lines of very different lengths, some sampled, all sharing a beginning."""
    made = []
    for i in range(num):
        text = "Once upon a time " + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 60)))
        made.append({"id": f"r{i}", "prompt": text, "max_tokens": rng.choice((1, 2, 5, 30)), "seed": i,
                     "temperature": rng.choice((0, 0.9)), "raw": rng.random() < 0.5})
    return made


def chat_line(custom_id="a", **body) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def text_line(custom_id="a", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": {"prompt": "hi", "seed": 1} | body}


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_a_batch_is_its_records_one_by_one(engine, folder, tmp_path):
    lines = records(24)
    out = tmp_path / "out.jsonl"
    assert run(engine, write(tmp_path / "in.jsonl", lines), out) == 0
    answers, alone = by_id(out), load(folder, max_requests=1)
    assert not engine.has_work
    for line in lines:
        params = SamplingParams(max_tokens=line["max_tokens"], seed=line["seed"], temperature=line["temperature"],
                                ignore_eos=True)
        tokenizer = alone.tokenizer
        prompt = (tokenizer.encode(line["prompt"]) if line["raw"]
                  else tokenizer.chat([{"role": "user", "content": line["prompt"]}]))
        [expected] = alone.generate([prompt], params)
        answer = answers[line["id"]]
        assert (answer["text"], answer["token_ids"]) == (expected.text, expected.token_ids)
        assert (answer["finish_reason"], answer["seed"]) == (expected.finish_reason, line["seed"])
        assert (answer["prompt_tokens"], answer["completion_tokens"]) == (len(prompt), len(expected.token_ids))


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


def test_text_lines_are_literal_prompts(engine, tmp_path):
    lines = ["\ufeffC:\\new\\table 讲", "", "  ", '{"prompt": "not json here"}', "x\u2028y\r"]
    source = write(tmp_path / "in.TXT", lines)
    run(engine, source, tmp_path / "text", ordered=True, raw=True)
    prompts = ["C:\\new\\table 讲", '{"prompt": "not json here"}', "x\u2028y"]
    lines = [{"prompt": prompt, "raw": True} for prompt in prompts]
    run(engine, write(tmp_path / "in.jsonl", lines), tmp_path / "json", ordered=True)
    texts, jsons = read(tmp_path / "text"), read(tmp_path / "json")
    assert [answer["id"] for answer in texts] == [1, 4, 5]
    assert [answer["token_ids"] for answer in texts] == [answer["token_ids"] for answer in jsons]
    assert [answer["prompt_tokens"] for answer in texts] == [len(prompt.encode()) for prompt in prompts]


def test_an_answer_is_utf8_on_one_line(tmp_path):
    scripted = tiny.scripted(tmp_path / "model", list("é\n\u2028".encode()), context=64)
    run(load(scripted), write(tmp_path / "in", [{"prompt": "x", "raw": True}]), tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    assert data.count(b"\n") == 1 and json.loads(data)["text"] == "é\n\u2028" and "é".encode() in data


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be answered


def test_one_bad_line_does_not_lose_the_others(engine, tmp_path):
    good = {"prompt": "good"}
    lines = [good, "", "{bad", "[1,2]", "null", {"prompt": 5}, {"prompt": "x" * 300, "id": "long"}, good]
    assert run(engine, write(tmp_path / "in", lines), tmp_path / "out", ordered=True) == 1
    answers = read(tmp_path / "out")
    assert [answer["id"] for answer in answers] == [1, 3, 4, 5, 6, "long", 8]
    assert [answer["error"] and answer["error"]["line"] for answer in answers] == [None, 3, 4, 5, 6, 7, None]
    assert answers[0]["token_ids"] == answers[-1]["token_ids"]
    message = answers[-2]["error"]["message"]
    assert "319" in message and "256" in message


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
    assert bad["error"]["line"] == 2 and "byte 9 " in bad["error"]["message"] and "0x96" in bad["error"]["message"]


def test_overflow_fails_one_record_alone(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "model")
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    tensors["model.embed_tokens.weight"][ord("!")] = float("nan")
    tiny.write_safetensors(folder, tensors=tensors)
    source = write(tmp_path / "in", [{"prompt": "good"}, {"prompt": "bad!", "num_samples": 2}, {"prompt": "fine"}])
    assert run(load(folder), source, tmp_path / "out", ordered=True) == 1
    good, bad, fine = read(tmp_path / "out")
    assert good["error"] is None and fine["error"] is None
    assert "non-finite logits" in bad["error"]["message"]


def test_a_template_that_refuses_fails_one_record_alone(engine, tmp_path):
    engine.tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system "
                                      "here') }}{% endif %}{{ m.content }}{% endfor %}")
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    lines = [{"messages": [user]}, {"messages": [system, user]}, {"messages": [user]}]
    assert run(engine, write(tmp_path / "in", lines), tmp_path / "out", ordered=True) == 1
    first, bad, last = read(tmp_path / "out")
    assert first["token_ids"] == last["token_ids"] and "no system here" in bad["error"]["message"]


def test_equal_ids_are_refused_before_anything_runs(engine, tmp_path):
    lines = [{"prompt": "x", "id": "a"}, "", {"prompt": "x", "id": "b"}, {"prompt": "x", "id": "a"}]
    with pytest.raises(ValueError, match='lines 1 and 4 both have the id "a"'):
        run(engine, write(tmp_path / "in", lines), tmp_path / "out")
    lines = [{"prompt": "x"}, {"prompt": "x", "id": 1}]
    with pytest.raises(ValueError, match="lines 1 and 2 both have the id 1"):
        run(engine, write(tmp_path / "in", lines), tmp_path / "out")
    assert not (tmp_path / "out").exists() and engine.stats.steps == 0
    lines = [{"prompt": "x", "id": "1"}, {"prompt": "x", "id": 1}]
    assert run(engine, write(tmp_path / "in", lines), tmp_path / "out") == 0


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
    assert ids["choices"] == text["choices"] and ids["usage"]["completion_tokens"] == 16  # OpenAI's default
    logprobs = ids["choices"][0]["logprobs"]
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


# ---------------------------------------------------------------------------------------------------------------------
# The files


def test_ordered_is_the_same_in_order(engine, tmp_path, capfdbinary):
    lines = records(30)
    source = write(tmp_path / "in", lines)
    run(engine, source, tmp_path / "unordered")
    run(engine, source, tmp_path / "ordered", ordered=True)
    run(engine, source, ordered=True)
    piped = tmp_path / "piped"
    piped.write_bytes(capfdbinary.readouterr().out)
    wanted = [line["id"] for line in lines]
    assert [answer["id"] for answer in read(tmp_path / "unordered")] != wanted, "nothing here is out of order"
    for path in (tmp_path / "ordered", piped):
        assert [answer["id"] for answer in read(path)] == wanted
        assert by_id(path) == by_id(tmp_path / "unordered")


def test_ordered_into_a_pipe_holds_back_a_bounded_number(engine, tmp_path, monkeypatch):
    """Everything waits for the first record; what waits must not grow with the file."""
    num_held = []
    emit = batch.Output._emit
    monkeypatch.setattr(batch.Output, "_emit",
                        lambda self, answer: (num_held.append(len(self.held)), emit(self, answer)))
    lines = [{"prompt": "x", "max_tokens": 150}] + [{"prompt": "x", "max_tokens": 1}] * 400
    run(engine, write(tmp_path / "in", lines), ordered=True)
    assert len(num_held) == 401 and 20 < max(num_held) <= (batch.HELD_BACK + batch.FED_AHEAD) * 3


def test_the_engine_is_fed_no_more_than_keeps_it_busy(engine, tmp_path):
    num_waiting = []
    step = engine.step
    engine.step = lambda: (num_waiting.append(len(engine.writers)), step())[1]
    run(engine, write(tmp_path / "in", records(40)), tmp_path / "out")
    assert max(num_waiting) == batch.FED_AHEAD * 3


def test_memory_does_not_grow_with_the_input(engine, tmp_path):
    """A million lines may take 200 MB: 200 bytes a line. These lines have 2,000 each."""
    num_lines = 2000
    source = write(tmp_path / "in", [{"prompt": 5, "id": f"{i:0>1950}"} for i in range(num_lines)])
    tracemalloc.start()
    run(engine, source, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(read(tmp_path / "out")) == num_lines and peak < 200 * num_lines + 2**19


def test_answers_are_on_disk_as_they_finish(engine, tmp_path):
    """Before every step the file holds whole lines, one for each record that has ended."""
    out, step, counts = tmp_path / "out", engine.step, []

    def watched():
        data = out.read_bytes()
        assert data.count(b"\n") == sum(counts) and not data.rpartition(b"\n")[2]
        outputs = step()
        counts.append(sum(output.finished for output in outputs))
        return outputs

    engine.step = watched
    run(engine, write(tmp_path / "in", records(20)), out)
    assert sum(counts) == 20 and sum(count > 0 for count in counts) > 5


def test_stdin_may_be_the_input(engine, tmp_path, monkeypatch):
    source = write(tmp_path / "in", records(5))
    run(engine, source, tmp_path / "a")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(source.read_bytes())))
    run(engine, "-", tmp_path / "b")
    assert by_id(tmp_path / "a") == by_id(tmp_path / "b")


def test_nothing_to_do(engine, tmp_path):
    for content in (b"", b"\xef\xbb\xbf", b"\n \r\n"):
        (tmp_path / "in").write_bytes(content)
        assert run(engine, tmp_path / "in", tmp_path / "out", overwrite=True) == 0
        assert (tmp_path / "out").read_bytes() == b""


def test_an_existing_output_is_not_harmed(engine, tmp_path):
    source, out = write(tmp_path / "in", [{"prompt": "a"}]), tmp_path / "out"
    out.write_text("precious")
    for flags in ({}, {"resume": True}):
        with pytest.raises(ValueError, match="--overwrite"):
            run(engine, source, out, **flags)
    with pytest.raises(ValueError, match="the input too"):
        run(engine, source, source, overwrite=True)
    with pytest.raises(ValueError, match="-o OUT"):
        run(engine, source, resume=True)
    with pytest.raises(OSError):
        run(engine, source, tmp_path / "no folder" / "out")
    assert out.read_text() == "precious" and engine.stats.steps == 0
    assert run(engine, source, out, overwrite=True) == 0 and len(read(out)) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(engine, tmp_path):
    with pytest.raises(OSError, match="space"):
        run(engine, write(tmp_path / "in", [{"prompt": "a"}]), "/dev/full")


def test_the_summary_counts(engine, tmp_path, capsys):
    lines = [{"prompt": "a" * 40, "raw": True, "num_samples": 2, "max_tokens": 3}, {"prompt": "b", "raw": True}, "{"]
    run(engine, write(tmp_path / "in", lines), tmp_path / "out")
    captured = capsys.readouterr()
    assert captured.out == "" and "\x1b" not in captured.err
    assert captured.err.startswith("3 requests · 1 failed · 12 tokens · ") and "0 preemptions" in captured.err


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted and resumed


def test_resume_does_what_is_missing_or_failed(engine, tmp_path):
    lines = records(12)
    source, whole, out = write(tmp_path / "in", lines), tmp_path / "whole", tmp_path / "out"
    run(engine, source, whole, ordered=True)
    answers = whole.read_bytes().splitlines(keepends=True)
    failed = json.dumps({"id": "r5", "error": {"line": 6, "message": "?"}}).encode() + b"\n"
    out.write_bytes(b"".join([*answers[7:10], failed, answers[0], answers[3][:-9]]))
    out.chmod(0o640)
    submitted = engine.num_submitted
    assert run(engine, source, out, resume=True) == 0
    assert engine.num_submitted - submitted == 12 - 4
    assert by_id(out) == by_id(whole) and out.stat().st_mode & 0o777 == 0o640
    assert out.read_bytes().startswith(b"".join(answers[7:10]))
    assert run(engine, source, out, resume=True, ordered=True) == 0
    assert by_id(out) == by_id(whole) and [answer["id"] for answer in read(out)] == [line["id"] for line in lines]
    assert engine.num_submitted - submitted == 12 - 4 and sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]


def test_resume_into_nothing_is_a_first_run(engine, tmp_path):
    assert run(engine, write(tmp_path / "in", records(3)), tmp_path / "out", resume=True) == 0
    assert len(read(tmp_path / "out")) == 3


@pytest.mark.parametrize("dialect", ["short", "openai"])
def test_resume_refuses_another_input(engine, tmp_path, dialect):
    lines = [{"prompt": "a"}, {"prompt": "b"}] if dialect == "short" else [chat_line("x"), chat_line("y")]
    source, out = tmp_path / "in", tmp_path / "out"
    run(engine, write(source, lines), out)
    before = out.read_bytes()
    for changed in ([{"prompt": "a"}, {"prompt": "c"}], [{"prompt": "b"}, {"prompt": "a"}], lines[:1], []):
        with pytest.raises(ValueError, match="input it was made from"):
            run(engine, write(source, changed), out, resume=True)
    assert out.read_bytes() == before
    more = {"prompt": "c"} if dialect == "short" else chat_line("z")
    assert run(engine, write(source, [*lines, more]), out, resume=True) == 0
    assert len(read(out)) == 3 and out.read_bytes().startswith(before)


def test_answers_of_another_program_are_known_by_their_id(engine, tmp_path):
    write(tmp_path / "out", [{"id": "r1", "text": "theirs", "error": None}])
    assert run(engine, write(tmp_path / "in", records(3)), tmp_path / "out", resume=True, ordered=True) == 0
    assert [answer["id"] for answer in read(tmp_path / "out")] == ["r0", "r1", "r2"]
    assert read(tmp_path / "out")[1]["text"] == "theirs"


@pytest.mark.parametrize("kind, flags", [(signal.SIGINT, {}), (signal.SIGINT, {"ordered": True}), (signal.SIGTERM, {})])
def test_an_interrupt_loses_nothing_finished(engine, folder, tmp_path, kind, flags):
    """It comes in the middle of a step, takes effect after it, and leaves the engine whole."""
    lines = records(20)
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    step, num_finished, num_steps = engine.step, 0, 0

    def interrupted():
        nonlocal num_finished, num_steps
        num_steps += 1
        if num_steps == 25:
            os.kill(os.getpid(), kind)
        outputs = step()
        num_finished += sum(output.finished for output in outputs)
        return outputs

    engine.step = interrupted
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(engine, source, out, **flags)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(read(out)) == num_finished > 3 and not engine.has_work
    if flags:
        order = [line["id"] for line in lines]
        assert [answer["id"] for answer in read(out)] == sorted((a["id"] for a in read(out)), key=order.index)
    engine.step = step
    run(engine, source, out, resume=True, **flags)
    run(load(folder), source, tmp_path / "whole")
    assert by_id(out) == by_id(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(folder, tmp_path):
    """Terminated, three times killed, then left alone: what an uninterrupted run gives."""
    source, out = write(tmp_path / "in", records(100)), tmp_path / "out"
    run(load(folder), source, tmp_path / "whole", sampling={"max_tokens": 512})
    command = [sys.executable, str(ROOT / "run.py"), "batch", str(source), "-o", str(out), "-m", str(folder), "--dtype",
               "float64", "--ignore-eos", "--max-requests", "3", "--page-size", "8", "--resume"]
    rng, env = random.Random(), os.environ | {"OMP_NUM_THREADS": "1"}
    for kind, status in [(signal.SIGTERM, 143)] + [(signal.SIGKILL, -signal.SIGKILL)] * 3:
        size = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        deadline_s = time.monotonic() + 60
        wanted = size + rng.randrange(1, 5000)
        while process.poll() is None and time.monotonic() < deadline_s:
            if out.exists() and out.stat().st_size > wanted:
                break
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        process.send_signal(kind)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "Traceback" not in errors
    assert 0 < len(read(out)) < 100, "nothing was left to resume"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert by_id(out) == by_id(tmp_path / "whole")
