"""chat.py: every turn is what a one-shot rendering of the conversation gives; commands; a pipe."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

import chat
import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import SamplingParams
from screen import Plain
from terminals import speaking
from vocab import load_tokenizer

REFUSES_SYSTEM = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
                  "{{ m.role + ':' + m.content + '|' }}{% endfor %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=400)


@pytest.fixture
def engine(folder):
    return load(folder)


def load(folder, **generation) -> Engine:
    with open_checkpoint(folder) as checkpoint:
        return Engine(load_model(checkpoint, torch.float64), EngineConfig(page_size=8, num_pages=100),
                      load_tokenizer(checkpoint), name="tiny", generation=generation)


def run(engine, monkeypatch, capsys, *lines, system=None, stats=False, **sampling):
    """A conversation through a pipe: exit status, stdout, stderr, and the prompt and answer of every turn."""
    turns = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda ids, *args, **kw: turns.append(submit(ids, *args, **kw)) or turns[-1])
    data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    stdin = io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(sys, "stdin", stdin)
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True} | sampling
    args = Namespace(sampling=sampling, system=system, stats=stats, deadline=None)
    status = chat.main(args, lambda args: engine)
    monkeypatch.setattr(engine, "submit", submit)
    return SimpleNamespace(status=status, turns=turns, **capsys.readouterr()._asdict())


def messages(*texts) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# ---------------------------------------------------------------------------------------------------------------------
# Turns


def test_every_turn_is_the_conversation_rendered_in_one_shot(engine, folder, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "hello", "", "<|im_end|> 讲", '"""', "two", "", "/lines", '"""', "last")
    assert said.status == 0 and len(said.turns) == 4
    texts, alone = [], load(folder)
    for turn, message in zip(said.turns, ["hello", "<|im_end|> 讲", "two\n\n/lines", "last"]):
        texts.append(message)
        assert turn.prompt_ids == engine.tokenizer.chat(messages(*texts))
        [expected] = alone.generate([turn.prompt_ids], SamplingParams(max_tokens=6, ignore_eos=True))
        assert turn.text == expected.text
        texts.append(turn.text)
    assert said.out == "".join(f"{answer}\n\n" for answer in texts[1::2])
    assert all(turn.num_cached > 0 for turn in said.turns[1:]), "turns do not reuse the conversation's cache"


def test_the_system_turn_comes_first(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "/system two", "b", '/system ""', "c", "/system", system="one")
    texts = []
    for turn, system, text in zip(said.turns, ("one", "two", None), "abc"):
        texts.append(text)
        head = [{"role": "system", "content": system}] if system else []
        assert turn.prompt_ids == engine.tokenizer.chat(head + messages(*texts))
        texts.append(turn.text)
    assert said.err.endswith("no system turn\n")


def test_an_empty_system_turn_is_one(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "/system", "a", '/system ""', "b", system="")
    head = [{"role": "system", "content": ""}]
    assert said.turns[0].prompt_ids == engine.tokenizer.chat(head + messages("a"))
    assert said.turns[1].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[0].text, "b"))
    assert said.err.startswith("the system turn is empty\n")


def test_undo_regen_and_clear(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "b", "/undo", "c", "/regen", "/new", "d", "/undo", "/undo", "/r", "e")
    first = said.turns[0].text
    prompts = [("a",), ("a", first, "b"), ("a", first, "c"), ("a", first, "c"), ("d",), ("e",)]
    assert [turn.prompt_ids for turn in said.turns] == [engine.tokenizer.chat(messages(*texts)) for texts in prompts]
    assert "forgotten: b" in said.err and "nothing to undo" in said.err and "no answer yet" in said.err
    assert said.turns[3].text == said.turns[2].text and said.turns[3].num_cached >= said.turns[2].num_prompt - 8


def test_regen_draws_anew_unless_the_seed_is_fixed(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "/regen", "/set seed 5", "/regen", "/regen", temperature=1,
               max_tokens=20)
    texts = [turn.text for turn in said.turns]
    assert len(set(texts)) == 3 and texts[2] == texts[3] and "fixed seed" in said.err
    seeds = [turn.params.seed for turn in said.turns]
    assert seeds[2:] == [5, 5] and re.findall(r"^seed (\d+)$", said.err, re.M) == [str(seed) for seed in seeds[:2]]


def test_a_full_context_fails_the_turn_and_nothing_else(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "x" * 500, "b")
    assert said.status == 1 and said.out.count("\n\n") == 2
    assert said.turns[1].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[0].text, "b"))
    num_tokens = len(engine.tokenizer.chat(messages("a", said.turns[0].text, "x" * 500)))
    assert str(num_tokens) in said.err and "400" in said.err and "--context" in said.err and "/compact" in said.err


def tokens_of(engine, *texts) -> int:
    return len(engine.tokenizer.chat(messages(*texts)))


def test_compact_drops_the_oldest_turns_and_answers_what_had_no_room(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a" * 60, "b" * 60, "c" * 60, "d" * 60, "e" * 60, "/compact", "f")
    first, second, third, last, after = said.turns[0], said.turns[1], said.turns[2], said.turns[-2], said.turns[-1]
    texts = ["a" * 60, first.text, "b" * 60, second.text, "c" * 60, third.text, "d" * 60, said.turns[3].text, "e" * 60]
    assert len(said.turns) == 6 and tokens_of(engine, *texts) >= 400 > tokens_of(engine, *texts[:-2])
    kept = [start for start in (2, 4, 6, 8) if tokens_of(engine, *texts[start:]) <= 200]
    assert last.prompt_ids == engine.tokenizer.chat(messages(*texts[kept[0] :]))
    assert f"oldest {kept[0] // 2} of 5 turns are dropped: {tokens_of(engine, *texts)} tokens before" in said.err
    assert after.prompt_ids == engine.tokenizer.chat(messages(*texts[kept[0] :], last.text, "f"))
    assert said.status == 1, "the turn that found no room did not count as failed"


def test_a_message_without_room_is_forgotten_or_tried_again(engine, monkeypatch, capsys):
    long = "x" * 500
    said = run(engine, monkeypatch, capsys, "a", long, "/undo", "/r", long, "/compact", "/r", "b", "/compact", "c")
    first = said.turns[0].text
    assert "forgotten: x" in said.err and said.err.count("the last message alone takes") == 1
    prompts = [("a",), ("a",), ("a", first, "b"), ("a", first, "b", said.turns[2].text, "c")]
    assert [turn.prompt_ids for turn in said.turns] == [engine.tokenizer.chat(messages(*texts)) for texts in prompts]
    assert "oldest 0 of 2 turns" in said.err


def test_the_use_of_the_context_is_shown(engine, capsys):
    settings = SamplingParams(max_tokens=1)
    talk = chat.Conversation(engine, settings, settings)
    assert chat.context_use(talk) == ""
    talk.messages = messages("a", "b")
    num_tokens = tokens_of(engine, "a", "b")
    assert chat.context_use(talk) == f"context {num_tokens} of 400 tokens ({num_tokens / 400:.0%})"
    talk.messages = messages("a" * 300, "b")
    assert chat.context_use(talk) == f"context {tokens_of(engine, 'a' * 300, 'b') / 400:.0%} full · /compact makes room"
    talk.messages = messages("a" * 390, "b")
    assert tokens_of(engine, "a" * 390, "b") > 400
    assert chat.context_use(talk) == "context 100% full · /compact makes room" and len(chat.context_use(talk)) <= 40
    chat.show_settings(talk, "")
    assert "messages 2, 400 of 400 tokens" in capsys.readouterr().err


def test_one_message_waits_for_room_and_another_is_said_to_be_gone(engine, monkeypatch, capsys, tmp_path):
    gone = "the earlier message that had no room is forgotten\n"
    said = run(engine, monkeypatch, capsys, "a", "x" * 500, "x" * 500, "/regen", f"/save {tmp_path / 'talk'}")
    assert gone not in said.err and f"saved in {tmp_path / 'talk'}, without the message that had no room" in said.err
    said = run(engine, monkeypatch, capsys, "a", "x" * 500, "y" * 500, "/undo")
    assert said.err.count(gone) == 1 and "forgotten: y" in said.err
    said = run(engine, monkeypatch, capsys, "a", "x" * 500, "b", "c", f"/save {tmp_path / 'talk'}")
    assert said.err.count(gone) == 1 and said.err.endswith("talk\n")


def test_a_template_that_wants_a_message_last_does_not_stop_the_talk(engine):
    engine.tokenizer.chat_template = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    talk = chat.Conversation(engine, SamplingParams(), SamplingParams(), messages=messages("a", "b"))
    assert chat.context_use(talk) == ""


def test_an_attached_file_is_part_of_the_message_that_had_no_room(engine, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("y" * 200)
    said = run(engine, monkeypatch, capsys, "a" * 160, f"/read {tmp_path / 'file'}", "sum up", "/compact", "b")
    assert said.turns[1].prompt_ids == engine.tokenizer.chat(messages("y" * 200 + "\n\nsum up"))
    assert said.turns[2].prompt_ids == engine.tokenizer.chat(
        messages("y" * 200 + "\n\nsum up", said.turns[1].text, "b"))


def test_thoughts_of_the_last_answer_are_shown(tmp_path, monkeypatch, capsys):
    engine = load(speaking(tmp_path, ["<think>", "hm, ", "so", "</think>", "yes"]))
    said = run(engine, monkeypatch, capsys, "/think", "a", "/think", "/think open", "/think never", "/show",
               ignore_eos=False)
    assert said.out == "<think>hm, so</think>yes\n\n", "in a pipe the text is as it came"
    assert said.err.startswith("there is no answer yet\nhm, so\nthoughts are shown in full")
    assert "not never" in said.err and "thoughts open" in said.err


def test_a_thought_that_the_template_begins_is_one_too(tmp_path, monkeypatch, capsys):
    engine = load(speaking(tmp_path, ["hm, ", "so", "</think>", "yes"]))
    engine.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    said = run(engine, monkeypatch, capsys, "a", "/think", ignore_eos=False)
    assert (said.out, said.err) == ("hm, so</think>yes\n\n", "hm, so\n")


def test_a_cut_answer_is_said_to_be_cut(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", max_tokens=3)
    assert "cut after max_tokens 3" in said.err and "400 tokens is full" not in said.err
    said = run(engine, monkeypatch, capsys, "a", max_tokens=None)
    assert "400 tokens is full" in said.err and len(said.turns[0].tokens) == 400


def test_statistics_show_the_cached_prefix(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "b", "/stats", stats=True)
    second = said.turns[1]
    line = f"prompt {second.num_prompt} ({second.num_cached} cached) · context {len(second.tokens)}/400"
    assert said.err.count(line) == 2 and "all 2 answers: 12 tokens" in said.err and "\x1b" not in said.err


def test_overflow_fails_the_turn_and_nothing_else(tmp_path, monkeypatch, capsys):
    folder = tiny.tiny_llama(tmp_path)
    tensors = tiny.tiny_tensors(tiny.tiny_config())
    tensors["model.embed_tokens.weight"][ord("!")] = float("nan")
    engine = load(tiny.write_safetensors(folder, tensors=tensors))
    said = run(engine, monkeypatch, capsys, "a", "no!", "b")
    assert said.status == 1 and "non-finite" in said.err
    assert said.turns[2].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[0].text, "b"))


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize("generation, given, expected", [
    ({}, {}, {"temperature": 0.7, "top_p": 0.95, "max_tokens": None}),
    ({"repetition_penalty": 1.1}, {}, {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1}),
    ({"top_k": 20, "do_sample": True, "max_new_tokens": 9}, {}, {"temperature": 1.0, "top_k": 20, "max_tokens": None}),
    ({"temperature": 0.6, "top_p": None}, {"top_p": 0.5}, {"temperature": 0.6, "top_p": 0.5}),
    ({"temperature": 0.6, "do_sample": False}, {}, {"temperature": 0.0}),
    ({}, {"temperature": 0, "max_tokens": 5}, {"temperature": 0.0, "top_p": 0.95, "max_tokens": 5}),
])
def test_default_settings(folder, generation, given, expected):
    assert chat.default_settings(load(folder, **generation), given) == SamplingParams(**{"max_tokens": None} | expected)


@pytest.mark.parametrize("given, expected", [
    ("temperature 0.5", {"temperature": 0.5}), ("temp 1", {"temperature": 1.0}), ("top-k 5", {"top_k": 5}),
    ("stop END of it", {"stop": ("END of it",)}), ('stop ["a", "b"]', {"stop": ("a", "b")}), ("seed 7", {"seed": 7}),
    ("stop_token_ids 1,2", {"stop_token_ids": (1, 2)}), ("logit-bias 5=-2.5", {"logit_bias": ((5, -2.5),)}),
    ("ignore_eos true", {"ignore_eos": True}), ("seed none", {}), ("temperature off", {}),
    ("max_tokens 8", {"max_tokens": 8}), ("include-stop on", {"include_stop": True})])
def test_set(engine, given, expected):
    plain = SamplingParams(max_tokens=None)
    talk = chat.Conversation(engine, plain, plain)
    chat.set_value(talk, given)
    assert talk.settings == SamplingParams(**{"max_tokens": None} | expected)
    chat.set_value(talk, f"{given.split()[0]} default")
    assert talk.settings == plain


@pytest.mark.parametrize("given", [
    "", "temperature", "temperature hot", "temperature -1", "top_p 2", "colour 1", "stop_token_ids x", "logit_bias 5",
    "logit_bias 99999=1", "num_samples 2", "logprobs 1", "max_tokens 0", "temperature nan", "seed 1.5", 'stop "',
    "temperature " + "[" * 100_000, "stop " + "[" * 100_000, r'stop ["a\ud800"]'])
def test_a_value_that_cannot_be_set_changes_nothing(engine, given):
    plain = SamplingParams()
    talk = chat.Conversation(engine, plain, plain)
    with pytest.raises(ValueError) as error:
        chat.set_value(talk, given)
    assert talk.settings is plain and len(str(error.value)) < 500 and str(error.value).encode()


def test_the_two_ways_back(engine):
    talk = chat.Conversation(engine, SamplingParams(), SamplingParams(max_tokens=22, seed=4))
    for word, max_tokens in (("default", 22), ("none", None), ("5", 5), ("off", None)):
        chat.set_value(talk, f"max_tokens {word}")
        assert talk.settings.max_tokens == max_tokens


def test_set_takes_effect(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", "/set max-tokens 2", "b", "/set colour 1", "/show", "c")
    assert [turn.num_output for turn in said.turns] == [6, 2, 2]
    assert "unknown sampling field 'colour'" in said.err and "max_tokens 2\n" in said.err


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def test_save_and_load(engine, monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    said = run(engine, monkeypatch, capsys, "é", "/set stop END", "/set logit_bias 5=1.5", f"/save {file}", "b",
               f"/save {file}", system="be brief")
    first, second = said.turns
    saved = json.loads(file.read_text("utf-8"))
    assert list(saved) == ["model", "system", "settings", "messages"]
    assert (saved["model"], saved["system"], saved["settings"]["stop"]) == ("tiny", "be brief", ["END"])
    assert saved["messages"] == messages("é", first.text, "b", second.text)
    again = run(engine, monkeypatch, capsys, f"/load {file}", "c", "/regen", "/undo", f"/save {tmp_path / 'other'}")
    head = [{"role": "system", "content": "be brief"}]
    assert again.turns[0].prompt_ids == engine.tokenizer.chat(head + messages("é", first.text, "b", second.text, "c"))
    assert again.turns[0].params.stop == ("END",) and again.turns[0].params.logit_bias == ((5, 1.5),)
    assert json.loads((tmp_path / "other").read_text("utf-8")) == saved
    assert sorted(os.listdir(tmp_path)) == ["other", "talk.json"]


def test_what_cannot_be_saved_leaves_everything_as_it_was(engine, monkeypatch, capsys, tmp_path):
    (tmp_path / "talk.part").write_text("precious")
    (tmp_path / "link").symlink_to("talk")
    run(engine, monkeypatch, capsys, f"/save {tmp_path / 'link'}")
    before = (tmp_path / "talk").read_text()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        said = run(engine, monkeypatch, capsys, "a", f"/save {tmp_path / 'talk'}", f"/save {tmp_path / 'new'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert said.status == 0 and said.err.count("File too large") == 2
    assert (tmp_path / "talk").read_text() == before and (tmp_path / "talk.part").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["link", "talk", "talk.part"] and (tmp_path / "link").is_symlink()


def test_a_home_that_nobody_has(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, *(f"/{name} ~nobody-of-this-name/x" for name in ("save", "load", "read")),
               "a")
    assert (said.status, len(said.turns)) == (0, 1)
    assert said.err.count("there is no such user") == 3 == said.err.count("\n") - 1
    assert chat.completions("/read ~nobody-of-this-name/x") == (0, [])


@pytest.mark.parametrize("command", ["save", "load", "read"])
def test_what_no_file_can_be_named_is_said_so(engine, monkeypatch, capsys, command):
    said = run(engine, monkeypatch, capsys, f"/{command} a\0b", "hello")
    assert "holds a NUL" in said.err and said.out


def test_an_error_of_reading_names_the_file(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "/read /proc/self/mem")
    assert "/proc/self/mem" in said.err and "Input/output error" in said.err
    assert chat.completions("/read \0/x") == (0, [])


def test_only_a_conversation_is_loaded_or_replaced(engine, monkeypatch, capsys, tmp_path):
    bad = [("notes", "precious"), ("list", "[]"), ("wizard", '{"messages": [{"role": "wizard", "content": ""}]}'),
           ("settings", '{"messages": [], "settings": {"temperature": -1}}'),
           ("system", '{"messages": [], "system": 1}')]
    lines = ["a"]
    for name, content in bad:
        (tmp_path / name).write_text(content)
        lines += [f"/load {tmp_path / name}", f"/load {tmp_path / 'missing'}"]
    said = run(engine, monkeypatch, capsys, *lines, f"/save {tmp_path / 'notes'}", f"/save {tmp_path}", "b")
    assert said.turns[1].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[0].text, "b"))
    assert (tmp_path / "notes").read_text() == "precious" and said.status == 0
    assert said.err.count("No such file") == 5 and said.err.count("\n") == 2 * 5 + 2 + 2


def test_an_openai_list_of_messages_can_be_loaded(engine, monkeypatch, capsys, tmp_path):
    turns = [{"role": "system", "content": "s"}, *messages("a", "b")]
    (tmp_path / "in").write_text(json.dumps({"messages": turns}))
    said = run(engine, monkeypatch, capsys, f"/load {tmp_path / 'in'}", "c")
    assert said.turns[0].prompt_ids == engine.tokenizer.chat(turns + messages("c"))


def test_read_puts_a_file_before_the_next_message(engine, monkeypatch, capsys, tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff/é\nline\n".encode())
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    read, bad = (f"/read {tmp_path / name}" for name in ("a.txt", "bad.txt"))
    said = run(engine, monkeypatch, capsys, read, "sum up", bad, "b", read)
    contents = ["/é\nline\n\nsum up", said.turns[0].text, "b", said.turns[1].text, "/é\nline"]
    assert said.turns[2].prompt_ids == engine.tokenizer.chat(messages(*contents)), "a file that was read last is lost"
    assert "offset 3;" in said.err


def test_an_unknown_command_says_so_and_goes_on(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "/frobnicate now", "a", "/help", "/exit", "never")
    assert (said.status, len(said.turns)) == (0, 1) and "unknown command /frobnicate" in said.err
    assert all(name in said.err for command in chat.COMMANDS for name in command.names)
    assert said.out == f"{said.turns[0].text}\n\n"


def test_devices_and_huge_files_are_left_alone(engine, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(chat, "MAX_FILE_BYTES", 10)
    (tmp_path / "big").write_text("x" * 11)
    said = run(engine, monkeypatch, capsys, "/save /dev/full", "/read /dev/zero", "/load /dev/zero", "/save", "/load",
               f"/read {tmp_path / 'big'}", f"/save {tmp_path / 'big'}", "hello")
    assert said.status == 0 and len(said.turns) == 1
    assert said.err.count("is not a file") == 5 and said.err.count("11 bytes but at most 10") == 2


def test_bad_input_fails_a_turn_and_goes_on(engine, monkeypatch, capsys):
    said = run(engine, monkeypatch, capsys, "a", b"\xc3\xa9\x96", "b", '"""open', "end")
    assert (said.status, len(said.turns)) == (1, 2)
    assert "offset 4;" in said.err and "ended inside" in said.err


def test_a_template_that_refuses_the_system_turn(engine, monkeypatch, capsys):
    engine.tokenizer.chat_template = REFUSES_SYSTEM
    said = run(engine, monkeypatch, capsys, "a", "/system s", "b")
    assert said.status == 0 and said.err.count("no system here") == 1
    assert said.turns[1].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[0].text, "b"))
    with pytest.raises(ValueError, match="no system here"):
        run(engine, monkeypatch, capsys, "a", system="s")


def test_a_model_without_a_chat_template_is_refused(engine, monkeypatch, capsys):
    engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        run(engine, monkeypatch, capsys, "a")


def test_completions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "file").touch()
    assert chat.completions("/re") == (-3, ["/reset", "/regen", "/read"])
    assert chat.completions("/set top") == (-3, ["top_k", "top_p"])
    assert chat.completions("/read d") == (-1, ["dir/"]) and chat.completions("/read dir/f") == (-1, ["file"])
    assert chat.completions("/load nowhere/x") == (0, []) and chat.completions("hello /re") == (0, [])


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts


class Person(Plain):
    stoppable = True

    def __init__(self, write):
        super().__init__(statistics=False)
        self.show = lambda prompt_end, fold: contextlib.nullcontext(write)


def stopping_after(engine, num_steps: int):
    """Makes Ctrl-C fall in the middle of a step."""
    step, count = engine.step, 0

    def stopped():
        nonlocal count
        count += 1
        if count == num_steps:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    engine.step = stopped


def test_a_stopped_answer_is_kept_and_closed_properly(engine):
    settings = SamplingParams(max_tokens=None, ignore_eos=True)
    talk, shown = chat.Conversation(engine, settings, settings), []
    screen = Person(shown.append)
    stopping_after(engine, 9)
    chat.handle(talk, "hello", False, screen)
    [request] = talk.requests
    assert (request.finish_reason, request.num_output) == ("cancelled", 9) and not engine.has_work
    assert talk.messages == messages("hello", "".join(shown)) and request.text == "".join(shown)
    talk.settings = SamplingParams(max_tokens=2)
    chat.handle(talk, "and", False, screen)
    assert talk.requests[1].prompt_ids == engine.tokenizer.chat(messages("hello", request.text, "and"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_answer_stopped_before_its_first_word_leaves_no_trace(tmp_path):
    engine = load(tiny.scripted(tmp_path, {None: 300}))  # an id without any text
    settings = SamplingParams(max_tokens=None)
    talk = chat.Conversation(engine, settings, settings)
    screen = Person(str)
    stopping_after(engine, 1)
    with pytest.raises(ValueError, match="before the first word"):
        chat.handle(talk, "hello", False, screen)
    assert talk.messages == [] and not engine.has_work


def test_a_file_whose_reading_was_stopped_goes_with_the_next_message_or_is_dropped(tmp_path, capsys):
    engine = load(tiny.scripted(tmp_path, {None: 300}))
    (tmp_path / "file").write_text("text")
    settings, screen = SamplingParams(max_tokens=None), Person(str)
    talk = chat.Conversation(engine, settings, settings)
    chat.handle(talk, f"/read {tmp_path / 'file'}", False, screen)
    stopping_after(engine, 1)
    with pytest.raises(ValueError, match="before the first word.*what was read goes with the next message"):
        chat.handle(talk, "hello", False, screen)
    assert talk.attached == ["text"]
    chat.handle(talk, "/undo", False, screen)
    assert talk.attached == [] and capsys.readouterr().err.endswith("forgotten: what was read for the next message\n")


def test_a_file_stays_in_front_of_the_next_message_when_another_is_answered(engine, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("text")
    said = run(engine, monkeypatch, capsys, "a", f"/read {tmp_path / 'file'}", "/regen", "b")
    assert said.turns[2].prompt_ids == engine.tokenizer.chat(messages("a", said.turns[1].text, "text\n\nb"))
