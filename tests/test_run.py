"""The command line: what it accepts and refuses, what stands on stdout and what on stderr, and the exit status."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine as engine_module
import flags
import run
import tiny
import tiny_heads
from terminals import Terminal

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["hi", "C:\\new\\table 讲", "é 👋", "- a list\n- of two"]
INSTANT = ("--help", "--version", "--completions bash", "generate --help", "generate --help-all", "chat --help",
           "batch --help", "bench --help", "perplexity --help", "models --help", "tokenize -p hi", "info",
           "info --json", "models")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def abc(tmp_path_factory) -> Path:
    """Says abc and ends; whatever was said before."""
    chain = {ord("a"): ord("b"), ord("b"): ord("c"), ord("c"): tiny.EOS, None: ord("a")}
    return tiny.scripted(tmp_path_factory.mktemp("models") / "abc", chain, eos_ids=(tiny.EOS,))


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """Says abababab..."""
    chain = {ord("a"): ord("b"), None: ord("a")}
    return tiny.scripted(tmp_path_factory.mktemp("models") / "endless", chain)


class Result:
    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Runs a command in this process: call(word, ..., stdin=bytes, terminal=whether stdin is one) -> Result."""
    monkeypatch.setenv("QUIRE_MODELS", str(tmp_path / "no-models"))
    monkeypatch.delenv("QUIRE_MODEL", raising=False)

    def call(*words, stdin: bytes | None = None, terminal: bool = False) -> Result:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="ascii")
        stream.isatty = lambda: terminal or stdin is None
        monkeypatch.setattr(sys, "stdin", stream)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = run.main([str(word) for word in words])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Result(status, *capsys.readouterr())

    return call


def start(*words, env: dict | None = None, **options) -> subprocess.Popen:
    """Runs a command as a user does, in a process of its own."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, str(ROOT / "run.py"), *words], env=os.environ | (env or {}), bufsize=0,
                            **options)  # unbuffered: communicate() would miss what a read had taken beyond its bytes


def refused(result: Result, *parts: str, status: int = 2) -> None:
    """One line on stderr that holds all `parts`, nothing on stdout."""
    assert (result.status, result.out) == (status, ""), result.err
    assert result.err.startswith("run.py: error: ") and result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


# ---- Words of the command line ----------------------------------------------------------------------------------


def test_the_first_word_decides_the_command(call, monkeypatch):
    seen = []
    for name, command in run.COMMANDS.items():
        stand_in = run.Command(lambda args: seen.append((args.command, args)) or 0, command.help, command.usage,
                               command.flags, command.groups, command.defaults)
        monkeypatch.setitem(run.COMMANDS, name, stand_in)
    for words, terminal, expected in [
        ([], True, "chat"), ([], False, "generate"), (["-p", "hi"], True, "generate"), (["info"], False, "info"),
        (["some prompt"], True, "generate"), (["informally"], True, "generate"),
        (["-m", "x", "chat"], True, "generate"),
    ]:
        call(*words, terminal=terminal, stdin=b"x")
        assert seen.pop()[0] == expected
    call("batch", "in.jsonl", "-o", "out.jsonl", "--ordered", "--resume", "--temp", "0.5", "--stop", "a", "--stop", "b",
         "--logit-bias", "3=-1", "--logit_bias", "4=2", "--stop-token-ids", "1,2", "--ignore-eos")
    args = seen.pop()[1]
    assert (args.input, args.output, args.ordered, args.resume, args.overwrite) == \
        ("in.jsonl", "out.jsonl", True, True, False)
    assert args.sampling == {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": [(3, -1.0), (4, 2.0)],
                             "stop_token_ids": [1, 2], "ignore_eos": True}
    call("perplexity", "text.txt")
    assert seen.pop()[1].context == 512
    call("chat", "-S", "-be brief-", "-c", "99")
    args = seen.pop()[1]
    assert (args.system, args.context, args.sampling) == ("-be brief-", 99, {})


@pytest.mark.parametrize("words", [
    "-t -1", "--top-p 0", "--top-p 1.01", "--min-p 1", "--min-p -0.1", "-n 0", "-n -1", "-n 1.5", "-n x", "-k -2",
    "--repetition-penalty 0", "--presence-penalty nan", "--frequency-penalty inf", "-t nan", "-s -1", "--logprobs -1",
    "--num-samples 0", "--min-tokens -1", "--min-tokens 9 -n 5", "--logit-bias 5", "--logit-bias 5=nan",
    "--stop-token-ids 1,x", "--page-size 7", "--page-size 512", "--cache-memory 0", "--num-pages 0",
    "--cache-memory 1 --num-pages 5", "--max-step-tokens 0", "--max-requests 0", "-c 0", "--threads 0", "--deadline -1",
    "--dtype int4", "--device tpu", "--kernels fast", "--cache-dtype float8", "--unknown", "extra", "--promp x",
    "--tp 0", "--class fast", "--class :share=1", "--class fast:speed=1", "--class fast:share=x",
    "--class fast:share=2", "--draft eagle", "--draft medusa:", "--draft ngram:5",
    "--draft mtp:x", "--draft-tree 2,2", "--draft-tree 0x3",
    "--draft-tree 8x9", "--draft-tree 4",
])
def test_values_out_of_range_are_bad_usage(call, words):
    refused(call("generate", "-m", "no-such-model", "-p", "hi", *words.split()))


@pytest.mark.parametrize("words", [
    "--tp 2", "--pp 2", "--dp 2",
])
def test_what_is_not_built_says_so(call, words):
    refused(call("generate", "-m", "no-such-model", "-p", "hi", *words.split()), "not built yet")


def test_the_remedy_names_the_command_that_was_called(call):
    refused(call("generate", "-p", "x", "--bogus"), "--bogus; run.py generate --help")
    refused(call("tokenize", "-p", "x", "extra", "more"), "run.py tokenize --help")
    refused(call("batch", "in", "-t", "x"), "run.py batch --help")


def test_limits_of_a_machine(call):
    refused(call("-p", "x", "-m", "no-such-model", "--threads", 100000), "1 to 256")
    refused(call("-p", "x", "-m", "no-such-model", "--num-samples", 10**9), "at most 4096")


def test_what_a_machine_lacks_is_told_with_a_remedy(call, abc, monkeypatch):
    refused(call("-m", abc, "-p", "x", "--num-pages", 10**12), "GB", "free", "--num-pages", status=1)
    for error, words in ((MemoryError(), "--cache-memory"), (ModuleNotFoundError(name="torch"), "make run")):
        def fail(args, error=error):
            raise error

        monkeypatch.setattr(run, "load_engine", fail)
        refused(call("-m", abc, "-p", "x"), words, status=1)


def test_resuming_needs_an_output_file(call, tmp_path):
    for words in (["--resume"], ["--overwrite"], ["--resume", "-o", "-"], ["--resume", "-o", "/dev/stdout"]):
        refused(call("batch", tmp_path / "in", "-m", "no-such-model", *words), "-o OUT")
    refused(call("batch", tmp_path / "in", "-o", tmp_path / "out", "--resume", "--overwrite"), "one of them")


def test_errors_are_one_line_and_debug_shows_more(call, tmp_path):
    refused(call("-m", "no-such-model", "-p", "hi"), "no-such-model", status=1)
    refused(call("info", "-m", tmp_path), str(tmp_path), status=1)
    refused(call("perplexity", "-m", tmp_path), "FILE")
    refused(call("chat", "--num-samples", "2"), "--num-samples")
    refused(call("batch", "x", "--resume", "--overwrite"), "--overwrite")
    refused(call("--draft"), "--draft")
    with pytest.raises(ValueError, match="no-such-model"):
        call("info", "-m", "no-such-model", "--debug")


def test_errors_of_files_have_a_remedy(call, abc, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    (tmp_path / "text.gguf").write_text("hello")
    missing, place = tmp_path / "missing", tmp_path / "no folder" / "out"
    for words, parts in [
        (["-p", "x", "-m", missing], ["no model", "missing"]), (["-f", missing], [": check the path"]),
        (["-f", tmp_path], [": name a file"]), (["batch", missing], ["missing: No such file", ": check the path"]),
        (["batch", tmp_path / "in", "-o", place], ["no folder/out: No such file", ": check the path"]),
        (["-p", "x", "-m", abc, "--trace", place], ["no folder/out: No such file"]),
        (["-p", "x", "-m", tmp_path / "short.gguf"], ["short.gguf", "fetch it again"]),
        (["-p", "x", "-m", tmp_path / "text.gguf"], ["not a model file", "give a .gguf"]),
        (["-p", "x" * 9999, "-m", abc, "--raw"], ["9999 tokens", "4096", "shorten it"]),
    ]:
        refused(call(*words), *parts, status=1)
    refused(call("-f", tmp_path / "in", "-m", abc, "--trace", tmp_path / "in"), "would overwrite")
    assert (tmp_path / "in").read_text() == '{"prompt": "x"}\n'
    if os.path.exists("/dev/full"):
        refused(call("-p", "x", "-m", abc, "--trace", "/dev/full"), "/dev/full: No space left", "free some", status=1)


def test_what_a_trace_is_written_into_is_told_for_every_command(call, abc, tmp_path):
    assert call("-p", "x", "-m", abc, "--trace", tmp_path / "trace").status == 0
    assert json.loads((tmp_path / "trace").read_text().splitlines()[0])["step"] == 1


def test_a_bug_is_named_by_its_type(call, monkeypatch):
    monkeypatch.setattr(run, "open_checkpoint", lambda args: {}["key"])
    refused(call("info"), "KeyError: 'key'", status=1)


@pytest.mark.parametrize("command", ["", *run.COMMANDS])
def test_help_fits_a_screen(call, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    result = call(*command.split(), "--help")
    assert (result.status, result.err) == (0, "")
    assert len(result.out.splitlines()) <= 40 and max(map(len, result.out.splitlines())) <= 80
    if command:
        in_full = call(command, "--help-all").out
        assert max(map(len, in_full.splitlines())) <= 80
        for names, options in run.COMMANDS[command].all_flags:
            if options.get("help") != "==SUPPRESS==":
                assert options.get("metavar", names[0]) in result.out and options["help"][:9] in in_full


def test_version(call):
    assert call("--version").out == f"quire {flags.VERSION}\n"


def test_looking_does_not_import_torch(llama):
    code = "import sys, run\n" \
           f"status = [run.main(words.split()) for words in {INSTANT!r}]\n" \
           "print(status, sorted({'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"QUIRE_MODEL": str(llama)},
                          capture_output=True, text=True, timeout=60)
    assert done.stderr == f"{[0] * len(INSTANT)} []\n"


@pytest.mark.slow
def test_a_pipe_needs_nothing_that_draws(abc):
    code = ("import sys, run; status = run.main(sys.argv[1:]); "
            "print(status, sorted({'rich', 'prompt_toolkit', 'markdown_it'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code, "generate", "-m", str(abc), "-p", "x" * 2000], cwd=ROOT,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("abc\n", "0 []\n")


# ---- Prompts ----------------------------------------------------------------------------------------------------


def ids_of(text: str) -> list[int]:
    """What the byte tokenizer of the tiny models makes of a text."""
    return list(text.encode())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_the_same_by_every_road(call, abc, tmp_path, prompt):
    file = tmp_path / "prompt"
    file.write_bytes(prompt.encode())
    roads = [call("tokenize", "-m", abc, "-p", prompt), call("tokenize", "-m", abc, "-f", file),
             call("tokenize", "-m", abc, "-f", "-", stdin=prompt.encode()),
             call("tokenize", "-m", abc, stdin=prompt.encode()), call("tokenize", "-m", abc, "--", prompt)]
    assert [road.out for road in roads] == [" ".join(map(str, ids_of(prompt))) + "\n"] * 5


def echoed(call, *words, **options) -> str:
    """The prompt as `generate --echo` repeats it before "abc"."""
    result = call("generate", "--echo", *words, **options)
    assert result.status == 0, result.err
    assert result.out.endswith("abc\n")
    return result.out[: -len("abc\n")]


@pytest.mark.parametrize("text, prompt", [
    ("x", "x"), ("x\n", "x"), ("x\n\n", "x\n"), ("x \n", "x "), ("x\r\n", "x"), ("\ufeffx", "x"),
    ("x\u2028", "x\u2028"),
])
def test_one_final_line_end_of_a_file_is_dropped(call, abc, tmp_path, text, prompt):
    (tmp_path / "file").write_bytes(text.encode())
    assert echoed(call, "-m", abc, "-f", tmp_path / "file") == prompt
    assert echoed(call, "-m", abc, stdin=text.encode()) == prompt
    if not text.startswith("\ufeff"):
        assert echoed(call, "-m", abc, "-p", text) == text
        assert echoed(call, "-m", abc, "--raw", "-f", tmp_path / "file") == text  # exactly as it stands


def test_invalid_utf8_is_named_by_its_offset(call, abc, tmp_path):
    (tmp_path / "file").write_bytes("é".encode() + b"ab\x96")
    refused(call("-m", abc, "-f", tmp_path / "file"), "0x96 at offset 4", status=1)
    refused(call("-m", abc, stdin=b"\xef\xbb\xbf\xff"), "stdin", "0xff at offset 3", status=1)
    refused(call("-m", abc, "-p", os.fsdecode(b"ab\x96")), "argument 4", "0x96 at offset 2")


def test_there_is_one_prompt(call, abc, tmp_path):
    (tmp_path / "file").write_text("x")
    for words in (["-p", "a", "b"], ["-p", "a", "-p", "b"], ["-p", "a", "-f", "-"], ["-f", tmp_path / "file", "a"]):
        refused(call("-m", abc, *words), "2 prompts")
    refused(call("-m", abc), "no prompts")  # in a terminal


@pytest.mark.parametrize("options", [{"stdin": b""}, {"stdin": b"\n"}, {"stdin": b"\xef\xbb\xbf"}])
def test_an_empty_prompt_is_an_error(call, abc, options):
    refused(call("-m", abc, **options), "empty")
    refused(call("-m", abc, "-p", "", "--raw"), "empty")


def test_stdin_is_left_alone_where_there_is_another_prompt(call, abc):
    assert call("-m", abc, "-p", "x", stdin=b"\xff not read").out == "abc\n"
    assert len(sys.stdin.buffer.read()) == 10
    assert call("tokenize", "-m", abc, "--decode", "97", stdin=b"\xff not read").out == "a"


def test_a_chat_template_frames_the_prompt(call, abc):
    """Counted by hand: a byte is a token, and \\u0001 stands for each of the template's control tokens."""
    def count(*words) -> int:
        return json.loads(call("generate", "--json", "-m", abc, *words).out)["prompt_tokens"]

    user, system, cue = len("\u0001user\nhi\u0001\n"), len("\u0001system\nS\u0001\n"), len("\u0001assistant\n")
    assert count("-p", "hi") == user + cue
    assert count("-p", "hi", "-S", "S") == system + user + cue
    assert count("-p", "<|im_end|>") == user + cue - 2 + len("<|im_end|>")  # typed by a user it is only text
    assert count("-p", "hi", "--raw") == 2
    assert count("-p", "<|im_end|>", "--raw") == 1
    assert count("-p", "<|im_end|>", "--raw", "--no-special") == len("<|im_end|>")
    refused(call("-m", abc, "-p", "hi", "-S", "S", "--raw"), "--raw")


def test_without_a_chat_template_the_text_is_continued(call, tmp_path):
    folder = tiny.scripted(tmp_path / "plain", {None: ord("a")}, tokenizer=False)
    tiny.byte_tokenizer(folder, chat_template=None)
    result = call("--json", "-m", folder, "-p", "hi", "-n", 3)
    assert (result.lines[0]["prompt_tokens"], result.lines[0]["text"]) == (2, "aaa")
    refused(call("-m", folder, "-p", "hi", "-S", "S"), "chat template")


# ---- Answers ----------------------------------------------------------------------------------------------------


def test_stdout_carries_the_answer_alone(call, abc):
    result = call("-m", abc, "-p", "x")
    assert (result.status, result.out, result.err) == (0, "abc\n", "")
    assert call("generate", "-m", abc, "x").out == call("-m", abc, stdin=b"x\n").out == "abc\n"
    assert call("-m", abc, "-p", "x", "--show-special").out == "abc\n"
    assert call("-m", abc, "-p", "x", "--show-special", "--include-stop").out == "abc<eos>\n"
    assert call("-m", abc, "-p", "x", "--stop", "c").out == "ab\n"
    assert call("-m", abc, "-p", "x", "-n", "2").out == "ab\n"


def test_drafts_change_nothing_but_the_steps(call, tmp_path):
    """A model that repeats itself, with n-grams and with itself as the draft model."""
    loop = tiny.scripted(tmp_path / "loop", {None: 97, 97: 98, 98: 99, 99: 97})
    words = ("--json", "-m", loop, "-p", "x", "--raw", "-n", 40, "--max-requests", 2)
    [plain] = call(*words).lines
    for method, name in (("ngram", "ngram"), (loop, loop.name)):
        for verify in ("coupled", "rejection", "block"):
            [fields] = call(*words, "--draft", method, "--draft-tokens", 3, "--verify", verify).lines
            assert fields["token_ids"] == plain["token_ids"] and fields["text"] == plain["text"]
            draft = fields["draft"]
            assert draft["method"] == name and 0 < draft["accepted"] <= draft["proposed"]
            assert draft["steps"] + draft["accepted"] >= 40 > draft["steps"] and len(draft["by_place"]) == 3
    line = call("-m", loop, "-p", "x", "--raw", "-n", 40, "--draft", "ngram", "--stats").err
    assert "draft " in line and "%" in line


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory):
    """A random model with a layer for multi-token prediction, and the flags that name draft heads for it."""
    where, config = tmp_path_factory.mktemp("heads"), tiny.tiny_config("llama", num_hidden_layers=8)
    tensors = tiny.tiny_tensors(config) | tiny_heads.mtp_tensors(config)
    path = tiny.write_safetensors(where / "model", "llama", tensors=tensors, num_hidden_layers=8,
                                  num_nextn_predict_layers=1)
    tiny.byte_tokenizer(path)
    eagle1, eagle3 = (tiny_heads.write_eagle(where / f"eagle{version}", config, version) for version in (1, 3))
    medusa = tiny_heads.write_medusa(where / "medusa", config)
    return path, ["mtp", f"eagle:{eagle1}", f"eagle:{eagle3}", f"medusa:{medusa}"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])  # torch's operations, native ones
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_heads_change_nothing_but_the_steps(call, with_heads, dtype, temperature):
    """Of random heads hardly a draft stands; more does test_lookahead.py."""
    path, drafts = with_heads
    words = ("--json", "-m", path, "-p", "x", "--raw", "-n", 40, "-t", temperature, "-s", 5, "--dtype", dtype)
    [plain] = call(*words).lines
    for draft in drafts:
        for more in (("--draft-tokens", 2), ("--draft-tokens", 6, "--draft-tree", "3x2")):
            result = call(*words, "--draft", draft, *more)
            [fields] = result.lines
            assert fields["token_ids"] == plain["token_ids"], draft
            assert fields["draft"]["method"] == draft.partition(":")[0] and fields["draft"]["proposed"] > 0


def test_chances_of_drafts_are_reported_beside_what_stood(call, tmp_path):
    """An n-gram's token stands with the model's own chance of it: 0.8 or 1 here."""
    loop = tiny.scripted(tmp_path / "loop", {None: 97, 97: {98: 0.8, 99: 0.2}, 98: 99, 99: 97})
    [fields] = call("--json", "-m", loop, "-p", "x", "--raw", "-n", 400, "-t", 1, "-s", 1, "--draft", "ngram",
                    "--draft-tokens", 3, "--draft-chances").lines
    draft = fields["draft"]
    expected = draft["expected"]
    assert 0.8 < expected["acceptance"] < 1 and abs(expected["acceptance"] - draft["acceptance"]) < 0.1
    assert abs(expected["tokens_per_step"] - draft["tokens_per_step"]) < 0.4


@pytest.mark.parametrize("words, expected", [
    ("--draft mtp", "no layers for multi-token prediction"), ("--draft eagle:none", "no such folder"),
    ("--draft medusa:none", "no such folder"), ("--draft ngram --draft-tree 2x2", "--draft-tree needs --draft mtp"),
    ("--draft mtp --draft-tree 2x2 --draft-tokens 64", "at most 63"), ("--verify block", "need --draft"),
    ("--draft-chances", "need --draft")])
def test_drafts_that_cannot_be_are_refused(call, abc, words, expected):
    result = call("-m", abc, "-p", "x", *words.split())
    assert result.status != 0 and expected in result.err and result.out == "" and "Traceback" not in result.err


@pytest.mark.parametrize("vocab", [300, 384])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_draft_model_may_have_more_or_fewer_logits_without_tokens(call, tmp_path, vocab, verify):
    """Its likeliest tokens may be those that stand for nothing: no answer has them."""
    steps = {97: {98: 0.6, 99: 0.4}, 98: 99, 99: 97, None: 97}
    loop = tiny.scripted(tmp_path / "loop", steps)
    other = tiny.scripted(tmp_path / "other", steps | {98: {vocab - 1: 0.9, 99: 0.1}}, vocab=vocab)
    words = ("--json", "-m", loop, "-p", "x", "--raw", "-n", 60, "-t", 1, "-s", 3)
    [plain] = call(*words).lines
    [fields] = call(*words, "--draft", other, "--verify", verify).lines
    assert max(fields["token_ids"]) < 100 and fields["draft"]["accepted"] > 0
    assert fields["token_ids"] == plain["token_ids"] or verify == "rejection"


def test_a_draft_models_cache_is_part_of_the_memory(tmp_path, monkeypatch):
    """Drafting for itself, it has half of the pages that it has alone."""
    path = tiny.tiny_llama(tmp_path / "model")
    pages, made = [], engine_module.Engine

    def watched(*args, **options):
        pages.append(made(*args, **options))
        return pages[-1]

    monkeypatch.setattr(engine_module, "Engine", watched)
    for more in ((), ("--draft", str(path))):
        assert run.main(["generate", "-m", str(path), "-p", "x", "-n", "20", "--cache-memory", "0.001", *more,
                         "--max-requests", "2"]) == 0
    alone, drafted = (engine.cache.num_pages for engine in pages)
    assert alone > 50 and alone // 2 - 1 <= drafted <= alone // 2


def test_a_draft_model_of_other_tokens_is_refused(call, abc, tmp_path):
    other = tiny.tiny_llama(tmp_path / "other")
    tiny.byte_tokenizer(other, specials=("<eos>", "<|im_start|>", "<|other|>"))
    for draft, words in ((other, "both must have the same tokens"), (tmp_path / "none", "none")):
        result = call("-m", abc, "-p", "x", "--draft", draft)
        assert result.status != 0 and words in result.err and result.out == ""


def test_json_has_the_promised_fields(call, abc):
    result = call("--json", "-m", abc, "-p", "x", "--raw", "--logprobs", "2")
    [fields] = result.lines
    timings, logprobs = fields.pop("timings"), fields.pop("logprobs")
    assert isinstance(fields.pop("seed"), int)
    assert fields == {"text": "abc", "token_ids": [97, 98, 99, tiny.EOS], "finish_reason": "stop", "prompt_tokens": 1,
                      "cached_tokens": 0, "completion_tokens": 4, "preemptions": 0, "sample": 0, "model": abc.name,
                      "draft": None}
    assert set(timings) == {"load_s", "prefill_s", "ttft_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert all(value > 0 for value in timings.values())
    assert [entry["id"] for entry in logprobs] == [97, 98, 99, tiny.EOS]
    assert all(len(entry["top"]) == 2 and entry["token"] == entry["top"][0]["token"] for entry in logprobs)
    [fields] = call("--json", "-m", abc, "-p", "x", "--raw", "--echo", "-n", 2).lines
    assert (fields["text"], fields["finish_reason"], fields["logprobs"]) == ("xab", "length", None)


def test_the_command_line_answers_as_the_engine_does(call, llama):
    """The same prompt and parameters through Engine's Python API."""
    import torch

    from checkpoint import open_checkpoint
    from engine import Engine, EngineConfig
    from model import load_model
    from sampling import SamplingParams
    from vocab import load_tokenizer

    checkpoint = open_checkpoint(llama)
    tokenizer = load_tokenizer(checkpoint)
    engine = Engine(load_model(checkpoint, torch.float64), EngineConfig(page_size=8), tokenizer)
    params = SamplingParams(max_tokens=12, temperature=1.5, top_k=50, seed=3, repetition_penalty=1.2)
    [expected] = engine.generate([tokenizer.chat([{"role": "user", "content": "hello"}])], params)
    result = call("-m", llama, "-p", "hello", "--json", "--dtype", "float64", "--page-size", 16, "-n", 12, "-t", 1.5,
                  "-k", 50, "-s", 3, "--repeat-penalty", 1.2, "--max-step-tokens", 7)
    assert result.lines[0]["token_ids"] == expected.token_ids


def test_samples_are_those_of_their_seeds(call, llama):
    def sample(*words) -> list[Result]:
        return call("-m", llama, "-p", "hi", "-n", 8, "-t", 1, "--dtype", "float64", *words)

    together = sample("--num-samples", 3, "-s", 5, "--json").lines
    alone = [sample("-s", seed, "--json").lines[0] for seed in (5, 6, 7)]
    assert [line["token_ids"] for line in together] == [line["token_ids"] for line in alone]
    assert [(line["sample"], line["seed"]) for line in together] == [(0, 5), (1, 6), (2, 7)]
    assert sample("--num-samples", 3, "-s", 5).out == "\n---\n".join(line["text"] for line in alone) + "\n"
    assert sample("--num-samples", 2, "-s", 5, "--echo").out == \
        "hi" + "\n---\nhi".join(line["text"] for line in alone[:2]) + "\n"


def test_the_first_sample_streams_and_the_others_wait(capsys):
    requests = [SimpleNamespace(text="", finish_reason=None) for _ in range(3)]
    writer = run.SampleWriter(requests, "")
    seen = []
    for texts, ended in [("a b", ""), ("aa bb c", ""), ("aa bbb c", "1"), ("aaa bbb cc", "0 1"),
                         ("aaa bbb ccc", "0 1 2")]:
        outputs = []
        for request, text in zip(requests, texts.split()):
            outputs.append(SimpleNamespace(request=request, text=text.removeprefix(request.text)))
            request.text = text
        for i in ended.split():
            requests[int(i)].finish_reason = "stop"
        writer.write(outputs)
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "a", "", "a\n---\nbbb\n---\ncc", "c\n"]


def test_a_random_seed_is_reported(call, llama):
    words = ("-m", llama, "-p", "hi", "-n", 8, "-t", 1)
    first = call(*words)
    seed = re.fullmatch(r"seed (\d+)\n", first.err)[1]
    assert call(*words, "-s", seed).out == first.out
    assert call(*words, "-s", seed).err == ""
    assert call("-m", llama, "-p", "hi", "-n", 2).err == ""  # greedy: a seed has no effect


def test_statistics(call, endless):
    line = r"24 tokens · [\d.]+ tok/s · prompt 3 · (seed 7 · )?[\d.]+ GB · cut at its longest\n"
    greedy = call("-m", endless, "-p", "abc", "--raw", "-n", 24, "--stats").err
    sampled = call("-m", endless, "-p", "abc", "--raw", "-n", 24, "--stats", "-t", 1, "-s", 7).err
    assert re.fullmatch(line, greedy) and "seed" not in greedy
    assert re.fullmatch(line, sampled) and "seed 7" in sampled
    assert re.match(r"1 token · prompt 3 · ", call("-m", endless, "-p", "abc", "--raw", "-n", 1, "--stats").err)


def test_limits_are_told_with_the_value(call, abc):
    refused(call("-m", abc, "-p", "x", "-c", 5000), "5000", "4096")
    refused(call("-m", abc, "-p", "x" * 30, "--raw", "-c", 20), "30 tokens", "20", status=1)
    refused(call("-m", abc, "-p", "x" * 30, "--raw", "--num-pages", 2, "--page-size", 8), "30 tokens", "16", status=1)
    refused(call("-m", abc, "-p", "x", "--logit-bias", "320=1"), "320", "319")
    refused(call("-m", abc, "-p", "x", "--stop-token-ids", "1,400"), "400", "319")
    refused(call("chat", "-m", abc, "--stop-token-ids", "400", stdin=b"x"), "400", "319")
    assert call("-m", abc, "-p", "x", "--top-k", 10**6, "-n", 1).status == 0


def test_a_deadline_is_told(call, endless):
    result = call("-m", endless, "-p", "x", "-n", 4000, "--deadline", 0.2)
    assert result.status == 0 and re.fullmatch("(ab)*a?\n", result.out)
    assert result.err == "run.py: warning: cancelled after --deadline 0.2 s\n"


def test_numbers_that_are_not_finite_are_an_error(call, tmp_path):
    tensors = tiny.tiny_tensors(tiny.tiny_config("llama"))
    tensors["model.norm.weight"][:] = float("nan")
    folder = tiny.byte_tokenizer(tiny.write_safetensors(tmp_path / "nan", "llama", tensors=tensors))
    result = call("-m", folder, "-p", "x", "--json")
    assert (result.status, result.lines[0]["finish_reason"]) == (1, "error")
    assert "non-finite" in result.err and result.err.count("\n") == 1


def test_what_the_vocabulary_cannot_spell_is_warned_of(call, abc, monkeypatch):
    from tokenizer import Tokenizer

    def lossy(tokenizer, text, **options):
        tokenizer.notes.append("something was lost")
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", lossy)
    for words in (["generate", "--raw"], ["tokenize"]):
        assert call(*words, "-m", abc, "-p", "x").err == "run.py: warning: something was lost\n"


# ---- Interrupts and pipes ---------------------------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(signal, step): the engine's `step`th step gets the signal in its midst."""
    from replay import Replay

    def interrupt(number: int, step: int) -> None:
        forward, calls = Replay.forward, []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == step:
                os.kill(os.getpid(), number)
            return forward(*args)

        monkeypatch.setattr(Replay, "forward", interrupted)

    return interrupt


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_writes_what_is_finished(call, endless, interrupt, number, status):
    interrupt(number, 6)
    result = call("-m", endless, "-p", "x", "--num-samples", 2)
    assert (result.status, result.out, result.err) == (status, "ababab\n---\nababab\n", "")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_answer_is_an_object_too(call, endless, interrupt, number, status):
    interrupt(number, 6)
    result = call("-m", endless, "-p", "x", "--json")
    [fields] = result.lines
    assert (result.status, fields["finish_reason"], fields["text"]) == (status, "cancelled", "ababab")
    assert fields["completion_tokens"] == len(fields["token_ids"]) == 6


def test_an_interrupt_before_there_is_anything(call, abc, monkeypatch):
    def interrupted(args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(run, "load_engine", interrupted)
    result = call("-m", abc, "-p", "x", "--json")
    assert (result.status, result.out, result.err) == (130, "", "")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(endless):
    with start("-m", str(endless), "-p", "x", "-n", "4000") as process:
        assert process.stdout.read(1) == b"a"
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_from_outside(endless, number, status):
    """Though the shell that started it told it to ignore Ctrl-C, as scripts do to what runs in the background."""
    words = ("-m", str(endless), "-p", "x", "-n", "4000")
    with start(*words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:
        assert process.stdout.read(1) == b"a"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (status, b"")
        assert re.fullmatch(rb"(ba)*b?\n", out)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_that_cannot_be_written(unbuffered):
    read, write = os.pipe()
    os.close(read)
    with start("generate", "--help", stdout=write, env={"PYTHONUNBUFFERED": unbuffered}) as process:
        os.close(write)
        assert (process.wait(30), process.stderr.read()) == (141, b"")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            process = start("--help", stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
        err = process.communicate(timeout=30)[1]
        assert process.returncode == 1 and err.startswith(b"run.py: error: stdout: No space") and b"free some" in err
        assert err.count(b"\n") == 1


@pytest.mark.parametrize("env", [
    {"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"},
])
def test_text_is_utf8_whatever_the_locale(abc, tmp_path, env):
    text = "é 👋 讲"
    (tmp_path / "file").write_bytes(text.encode())
    words = ("tokenize", "-m", str(abc))
    roads = [start(*words, "-p", text, env=env), start(*words, "-f", str(tmp_path / "file"), env=env),
             start(*words, env=env, stdin=(tmp_path / "file").open("rb"))]
    decoding = start(*words, "--decode", " ".join(map(str, ids_of(text))), env=env)
    ids = " ".join(map(str, ids_of(text))).encode()
    assert [road.communicate(timeout=30) for road in roads] == [(ids + b"\n", b"")] * 3
    assert decoding.communicate(timeout=30) == (text.encode(), b"")


@pytest.mark.slow
def test_pipes(abc, tmp_path):
    """As people connect them in a shell: | head -1, > file, 2>/dev/null, in the locale C, without a stdin."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"é {i}", "n": None}) + "\n" for i in range(300)))
    (tmp_path / "talk").write_text("é\n讲\n")
    run_py = f"{sys.executable} {ROOT / 'run.py'}"
    script = f"""
        export LC_ALL=C OMP_NUM_THREADS=1
        {run_py} batch in.jsonl -m {abc} 2>errors | head -1 >first; echo ${{PIPESTATUS[0]}} >status
        {run_py} generate -m {abc} -p x </dev/null >answer 2>/dev/null
        {run_py} chat -m {abc} <talk >said 2>&1
        {run_py} generate -m {abc} -p x -n 3 2>&1 | cat >both"""
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, timeout=120)
    names = ("errors", "first", "status", "answer", "said", "both")
    files = {name: (tmp_path / name).read_text("utf-8") for name in names}
    assert (files["errors"], files["status"]) == ("", "141\n") and json.loads(files["first"])["text"] == "abc"
    assert files["answer"] == files["both"] == "abc\n"
    assert re.fullmatch(r"abc\n\n(seed \d+\n)abc\n\n(seed \d+\n)", files["said"])


@pytest.mark.slow
@pytest.mark.parametrize("env, plain", [({"TERM": "dumb"}, True), ({"NO_COLOR": "1"}, True), ({}, False)])
def test_escape_sequences_are_for_terminals_that_know_them(abc, env, plain):
    terminal = Terminal("-m", abc, "-p", "x", **env)
    assert terminal.end() == 0
    written = terminal.child.before
    assert "abc" in written and "4 tokens" in written and ("\x1b" not in written) == plain


@pytest.mark.slow
def test_nothing_of_stderr_lands_on_stdout(abc):
    command = f"{sys.executable} {ROOT / 'run.py'} -m {abc} -p x -n 3 -t 1 --stats 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1


def test_standard_streams_may_be_closed(abc):
    command = f"{sys.executable} {ROOT / 'run.py'} tokenize -m {abc} -p hi"
    for redirect, out in (("<&-", b"104 105\n"), ("2>&-", b"104 105\n"), (">&-", b"")):
        done = subprocess.run(f"{command} {redirect}", shell=True, capture_output=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, out, b"")


# ---- Looking ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory) -> Path:
    """A model whose tokenizer, sentencepiece's, adds BOS = 1 and a blank."""
    folder = tiny.write_safetensors(tmp_path_factory.mktemp("models") / "with-bos", "llama", vocab_size=400)
    tiny.sentencepiece_model(folder)
    return folder


@pytest.fixture(scope="module")
def sentencepiece(with_bos):
    from checkpoint import open_checkpoint
    from vocab import load_tokenizer

    return load_tokenizer(open_checkpoint(with_bos))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_is_the_inverse_of_tokenize(sentencepiece, text):
    ids = sentencepiece.encode(text)
    assert ids[0] == sentencepiece.bos_id
    assert run.decode(sentencepiece, ids) == text


def test_tokenize(call, abc, with_bos):
    assert call("tokenize", "-m", abc, "-p", "a<|im_end|>é").out == "97 258 195 169\n"
    assert call("tokenize", "-m", abc, "-p", "a<eos>", "--no-special").out == "97 60 101 111 115 62\n"
    assert call("tokenize", "-m", abc, "-p", 'a"<eos>', "--show").out == '97\t"a"\n34\t"\\""\n256\t"<eos>"\n'
    assert call("tokenize", "-m", abc, "-p", "a\n").out == call("tokenize", "-m", abc, stdin=b"a\n").out == "97 10\n"
    assert call("tokenize", "-m", abc, "-p", "").out == "\n"
    with_it, without = (call("tokenize", "-m", with_bos, "-p", "once", *more).out for more in ([], ["--no-bos"]))
    assert with_it == "1 " + without


def test_decode(call, abc, with_bos):
    assert call("tokenize", "-m", abc, "--decode", "97 258,10").out == "a<|im_end|>\n"
    assert call("tokenize", "-m", abc, "--decode", "").out == ""
    ids = call("tokenize", "-m", with_bos, "-p", " once ").out
    assert call("tokenize", "-m", with_bos, "--decode", ids).out == " once "
    refused(call("tokenize", "-m", abc, "--decode", "1 x"), "'1 x'")
    refused(call("tokenize", "-m", abc, "--decode", "320"), "320", "319")
    refused(call("tokenize", "-m", abc, "--decode", "-1"), "-1", "319")
    refused(call("tokenize", "-m", abc, "--decode", "1", "-p", "a"), "--decode")


def test_info_of_a_folder(call, llama):
    """Counted by hand from the config: vocabulary 320, hidden 64, 2 layers, 4 heads of 16 over 2, ffn 96."""
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3 + 64 * 2
    [fields] = call("info", "-m", llama, "--json").lines
    expected = {"architecture": "llama", "parameters": 2 * 320 * 64 + 2 * layer + 64, "layers": 2, "hidden": 64,
                "vocab": 320, "context": 512, "formats": {"f32": 1.0}, "cache_bytes_per_token": 2 * 2 * 2 * 16 * 4,
                "chat_template": True, "eos_ids": [256], "same_tokens": "bit for bit", "dtype": "float32"}
    assert {name: fields[name] for name in expected} == expected
    assert isinstance(fields["tokenizer"], str)
    [fields] = call("info", "-m", llama, "--json", "--dtype", "float64", "--cache-dtype", "bfloat16").lines
    assert (fields["cache_bytes_per_token"], fields["same_tokens"]) == (2 * 2 * 2 * 16 * 2, "yes")
    [fields] = call("info", "-m", llama, "--json", "--cache-dtype", "int8").lines
    assert (fields["cache_dtype"], fields["cache_bytes_per_token"]) == ("int8", 2 * 2 * 2 * (16 + 4))


def test_info_of_a_quantized_file(call, tmp_path):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", "qwen2", quant="q8_0")
    [fields] = call("info", "-m", path, "--json").lines
    assert (fields["architecture"], fields["dtype"], fields["same_tokens"]) == ("qwen2", "quantized", "bit for bit")
    [fields] = call("info", "-m", path, "--json", "--kernels", "torch").lines
    assert (fields["dtype"], fields["same_tokens"]) == ("bfloat16", "not promised")
    assert sum(fields["formats"].values()) == pytest.approx(1) and fields["formats"]["q8_0"] > 0.9
    shown = call("info", "-m", path)
    assert shown.err == "" and re.search(r"^formats +q8_0 9\d\.\d%; f32 \d\.\d%$", shown.out, re.MULTILINE)
    assert re.search(r"^layer kinds +full attention, dense feed-forward 2$", shown.out, re.MULTILINE)


def test_info_without_a_tokenizer(call, tmp_path):
    path = tiny.write_llama2c(tmp_path / "tiny.bin")
    result = call("info", "-m", path, "--json")
    assert (result.status, result.lines[0]["tokenizer"], result.lines[0]["chat_template"]) == (0, None, False)
    assert "--tokenizer" in result.err
    refused(call("-m", path, "-p", "x"), "--tokenizer", status=1)


def test_models_are_listed_and_found_by_name(call, monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_MODELS", str(tmp_path))
    assert call("models").out == ""
    tiny.write_gguf(tmp_path / "tiny.gguf")
    nbytes = (tmp_path / "tiny.gguf").stat().st_size
    assert call("models").out == f"tiny.gguf\tgguf\t{nbytes / 1e6:.1f} MB\n"
    [by_name] = call("info", "--json", "-m", "tiny.gguf").lines
    monkeypatch.setenv("QUIRE_MODEL", "tiny.gguf")
    [by_default] = call("info", "--json").lines
    assert by_name == by_default and by_name["model"] == "tiny.gguf"
    refused(call("info", "-m", ""), status=1)


def test_a_missing_default_model_is_fetched(call, monkeypatch, tmp_path):
    import hub

    def fetch(folder, progress):
        for what, done in [("downloading it", 0), ("downloading it", 5), ("verifying it", 10)]:
            progress(what, done, 10)
        return tiny.write_gguf(Path(folder) / "default.gguf")

    monkeypatch.setattr(hub, "fetch_default", fetch)
    monkeypatch.setenv("QUIRE_MODELS", str(tmp_path))
    result = call("tokenize", "-p", "a")
    assert (result.status, result.out, result.err) == (0, "97\n", "downloading it\nverifying it\n")
    assert call("models", "--fetch", "default").status == 0


def test_perplexity(call, llama, tmp_path):
    (tmp_path / "ids").write_text(json.dumps([i % 256 for i in range(100)]))
    words = ("perplexity", "-m", llama, "--ids", tmp_path / "ids", "-c", 32)
    shown, [fields] = call(*words).out, call(*words, "--json").lines
    assert shown == f"{fields['ppl']:.4f} ± {fields['stderr']:.4f}\n"
    assert (fields["windows"], fields["scored"], fields["context"]) == (3, 3 * 15, 32)


# ---- The machine ------------------------------------------------------------------------------------------------


@pytest.mark.models
@pytest.mark.slow
def test_looking_is_instant(smollm2, qwen_05b):
    """Fastest of three, in seconds of CPU: 0.4 promised, 0.8 on a vocabulary of 151,643; busy machines get double."""
    for limit_s, words in ((0.8, "--help"), (0.8, f"tokenize -m {smollm2} -p hi"), (0.8, f"info -m {smollm2}"),
                           (1.6, f"tokenize -m {qwen_05b} -p hi"), (1.6, f"info -m {qwen_05b}")):
        seconds = []
        for _ in range(3):
            process = start(*words.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, words
            seconds.append(usage.ru_utime + usage.ru_stime)
        assert min(seconds) < limit_s, words


# ---- README.md --------------------------------------------------------------------------------------------------


README = (ROOT / "README.md").read_text("utf-8")


def test_the_readmes_commands_are_understood():
    commands = re.findall(r"^(?:.*\| *)?\.venv/bin/python run\.py\b(.*)$", README, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        words = run.with_command(shlex.split(command, comments=True))
        assert run.make_parser(run.COMMANDS).parse_args(list(run.normalized(words))).run


@pytest.mark.models
@pytest.mark.slow
def test_the_readmes_python_runs(smollm2):
    [program] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout) > 20
