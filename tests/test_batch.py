"""batch.py: a file of records gives the same answers as the engine asked one by one, whatever happens on the way."""

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import batch
import tiny
from batches import by_id, chat_line, load, read, records, run, write
from sampling import SamplingParams
from scheduler import DEFAULT_CLASSES

ROOT = Path(__file__).resolve().parent.parent


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
    with pytest.raises(OSError):
        run(engine, source, tmp_path / "no folder" / "out")
    assert out.read_text() == "precious" and engine.stats.steps == 0
    assert run(engine, source, out, overwrite=True) == 0 and len(read(out)) == 1


@pytest.mark.parametrize("name", ["out", "elsewhere/soft", "elsewhere/hard"])
def test_two_runs_do_not_share_an_output(engine, folder, tmp_path, name):
    source, out, step, refusals = write(tmp_path / "in", records(5)), tmp_path / "out", engine.step, []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/soft").symlink_to("../out")
    out.touch()
    (tmp_path / "elsewhere/hard").hardlink_to(out)

    def second():
        for flags in ({"resume": True}, {"overwrite": True}, {"resume": True, "ordered": True}):
            with pytest.raises(ValueError, match="another run writes to"):
                run(load(folder), source, tmp_path / name, **flags)
            refusals.append(flags)
        engine.step = step
        return step()

    engine.step = second
    assert run(engine, source, out, overwrite=True) == 0 and len(refusals) == 3
    assert len(read(out)) == 5 and not list(tmp_path.rglob("*lock*"))


@pytest.mark.parametrize("first, second", [("link", "out"), ("out", "hard")])
def test_a_new_output_is_locked_by_all_its_names(engine, folder, tmp_path, first, second):
    """Those it has when it is made, and one that it gets meanwhile."""
    source, step, refusals = write(tmp_path / "in", records(5)), engine.step, []
    (tmp_path / "link").symlink_to("out")

    def another_run():
        engine.step = step
        (tmp_path / "hard").hardlink_to(tmp_path / "out")
        with pytest.raises(ValueError, match=f"another run writes to .*{second}: wait"):
            run(load(folder), source, tmp_path / second, overwrite=True)
        refusals.append(True)
        return step()

    engine.step = another_run
    assert run(engine, source, tmp_path / first) == 0 and refusals and len(read(tmp_path / "out")) == 5


def test_stdout_has_a_name(engine, tmp_path, capfdbinary):
    source = write(tmp_path / "in", records(3))
    for name in ("-", "/dev/stdout"):
        assert run(engine, source, name) == 0
        assert len(capfdbinary.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("width, num_facts", [(1, 1), (12, 1), (20, 1), (30, 2), (40, 3), (60, 4), (80, 4), (200, 4)])
def test_the_progress_of_a_run_fits(width, num_facts):
    tally = batch.Tally(time.perf_counter() - 100, records=123, tokens=45678, prompt_tokens=100, cached_tokens=50)
    line = batch.progress_line(tally, 1234, width).plain
    facts = line.strip("━─ ").split(" · ")
    assert facts[0] == "123/1234", "how many are done is cut"
    assert len(line) <= max(width, 8) and len(facts) == num_facts
    assert batch.progress_line(batch.Tally(), 7, 80).plain.endswith("─ 0/7 · 0.0 tok/s · hit rate 0%")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(engine, tmp_path):
    with pytest.raises(OSError, match="space.*/dev/full"):
        run(engine, write(tmp_path / "in", [{"prompt": "a"}]), "/dev/full")


def test_what_a_disk_has_no_room_for_is_done_when_it_has(engine, folder, tmp_path):
    """The limit on a file's size takes a part of a line and refuses the rest, as a full disk does."""
    source, out = write(tmp_path / "in", records(9)), tmp_path / "out"
    run(engine, source, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large: .*out"):
            run(engine, source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.stat().st_size == 1000 and 0 < len(read(out)) < 9
    assert run(load(folder), source, out, resume=True) == 0
    assert by_id(out) == by_id(tmp_path / "whole")


def test_a_class_with_a_short_line_is_fed_as_it_has_room(folder, tmp_path):
    classes = tuple(replace(cls, max_waiting=2) for cls in DEFAULT_CLASSES)
    source = write(tmp_path / "in", records(12))
    assert run(load(folder, classes=classes), source, tmp_path / "out", ordered=True) == 0
    assert run(load(folder), source, tmp_path / "other", ordered=True) == 0
    assert by_id(tmp_path / "out") == by_id(tmp_path / "other")


def test_answers_that_a_deadline_cut_are_done_again(engine, tmp_path):
    source, out = write(tmp_path / "in", records(4)), tmp_path / "out"
    assert run(engine, source, out, deadline=1e-9) == 0
    assert {answer["finish_reason"] for answer in read(out)} == {"cancelled"}
    assert run(engine, source, out, resume=True) == 0
    assert sorted(by_id(out)) == ["r0", "r1", "r2", "r3"] and len(read(out)) == 4
    assert {answer["finish_reason"] for answer in read(out)} == {"length"}


def test_the_summary_counts(engine, tmp_path, capsys):
    lines = [{"prompt": "a" * 40, "raw": True, "num_samples": 2, "max_tokens": 3}, {"prompt": "b", "raw": True}, "{"]
    run(engine, write(tmp_path / "in", lines), tmp_path / "out", stats=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "\x1b" not in captured.err
    assert captured.err.startswith("3 requests · 1 failed · 12 tokens · ") and "0 preemptions" in captured.err
    assert " steps · " in captured.err and "pages: 5 cached, 91 free · 0 evictions" in captured.err


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
    assert 0 < len(read(out)) == num_finished < 20 and not engine.has_work
    if flags:
        order = [line["id"] for line in lines]
        assert [answer["id"] for answer in read(out)] == sorted((a["id"] for a in read(out)), key=order.index)
    engine.step = step
    run(engine, source, out, resume=True, **flags)
    run(load(folder), source, tmp_path / "whole")
    assert by_id(out) == by_id(tmp_path / "whole")


NUM_KILLS = int(os.environ.get("NUM_KILLS", "5"))  # `make soak` asks for more


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(folder, tmp_path):
    """Interrupted and killed while it starts, answers, writes or puts in order, and then left alone: what an
    uninterrupted run gives, each answer once."""
    rng, env = random.Random(), os.environ | {"OMP_NUM_THREADS": "1"}
    source, out = write(tmp_path / "in", records(20 * NUM_KILLS)), tmp_path / "out"
    run(load(folder), source, tmp_path / "whole", sampling={"max_tokens": 512})
    bytes_a_run = (tmp_path / "whole").stat().st_size // (NUM_KILLS + 2)
    command = [sys.executable, str(ROOT / "run.py"), "batch", str(source), "-o", str(out), "-m", str(folder), "--dtype",
               "float64", "--ignore-eos", "--max-requests", "3", "--page-size", "8", "--resume"]
    for number, status in [(signal.SIGINT, 130)] + [(signal.SIGKILL, -signal.SIGKILL)] * NUM_KILLS:
        ordered = ["--ordered"] * (rng.random() < 0.5)
        process = subprocess.Popen(command + ordered, stderr=subprocess.PIPE, text=True, env=env)
        wanted = (out.stat().st_size if out.exists() else 0) + rng.randrange(1, bytes_a_run)
        deadline_s = time.monotonic() + (60 if status == 130 or rng.random() < 0.7 else 4 * rng.random())
        while process.poll() is None and time.monotonic() < deadline_s:
            if out.exists() and out.stat().st_size > wanted:
                break
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "Traceback" not in errors
    assert 0 < len(read(out)) < 20 * NUM_KILLS, "nothing was left to resume"
    done = subprocess.run([*command, "--ordered"], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert by_id(out) == by_id(tmp_path / "whole")
    assert [answer["id"] for answer in read(out)] == [f"r{i}" for i in range(20 * NUM_KILLS)]
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"], "something is left over"


def killed_at(monkeypatch, engine, source, out, name: str) -> None:
    """A run that ends where it first calls os.`name`, as if it was killed: nothing is tidied up."""
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run(engine, source, out, resume=True, ordered=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_killed_while_the_output_is_put_in_order(engine, tmp_path, monkeypatch):
    source, out = write(tmp_path / "in", records(12)), tmp_path / "out"
    run(engine, source, tmp_path / "whole")
    out.write_bytes((tmp_path / "whole").read_bytes())
    for name in ("fsync", "replace"):
        killed_at(monkeypatch, engine, source, out, name)
        assert by_id(out) == by_id(tmp_path / "whole") and len(list(tmp_path.iterdir())) > 3
    assert run(engine, source, out, resume=True, ordered=True) == 0
    assert [answer["id"] for answer in read(out)] == [f"r{i}" for i in range(12)]
    assert by_id(out) == by_id(tmp_path / "whole") and sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]
