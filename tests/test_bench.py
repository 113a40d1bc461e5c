"""bench.py: perplexity against probabilities that are known, the windows rule, and that no failure looks like speed."""

import json
import math
import random
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench
import limits
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from peer import Run
from tiny import scripted, tiny_llama
from vocab import load_tokenizer

VOCAB = 320
TEXT = "The quick brown fox jumps over the lazy dog; then it naps. " * 3


def transition() -> torch.Tensor:
    """A random row-stochastic V x V matrix, rows: the last token."""
    weights = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.01
    return weights / weights.sum(1, keepdim=True)


def load(folder, dtype=torch.float64, **config) -> Engine:
    with open_checkpoint(folder) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        return Engine(load_model(checkpoint, dtype), EngineConfig(num_pages=64, **config), tokenizer, name=folder.name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return load(scripted(tmp_path_factory.mktemp("scripted"), transition()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Engine:
    return load(tiny_llama(tmp_path_factory.mktemp("llama")), torch.float32)


def random_ids(count: int) -> list[int]:
    return random.Random(count).choices(range(VOCAB), k=count)


def expected(ids: list[int], context: int) -> tuple[float, float, int]:
    """Perplexity, its error and the count, from the matrix itself and the rule in words: of each whole window the ids
    from context / 2 + 1 on, each after the id before it."""
    table = transition().log().tolist()
    losses = [-table[ids[i - 1]][ids[i]] for i in range(len(ids) // context * context)
              if i % context > context // 2]
    mean = math.fsum(losses) / len(losses)
    deviation = math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)
    return math.exp(mean), math.exp(mean) * math.sqrt(deviation / (len(losses) - 1)), len(losses)


@pytest.mark.parametrize("count, context", [(64, 64), (200, 64), (191, 64), (330, 33), (1100, 512), (50, 5)])
def test_perplexity_of_known_probabilities(engine, count, context):
    ids = random_ids(count)
    result = bench.perplexity(engine, ids, context)
    ppl, stderr, scored = expected(ids, context)
    assert (result.tokens, result.windows, result.scored) == (count, count // context, scored)
    assert result.ppl == pytest.approx(ppl, rel=1e-5)      # the head's weights are float32
    assert result.stderr == pytest.approx(stderr, rel=1e-4)


def test_perplexity_of_a_uniform_model_is_its_vocabulary(tmp_path):
    uniform = torch.full((VOCAB, VOCAB), 1 / VOCAB)
    result = bench.perplexity(load(scripted(tmp_path, uniform)), random_ids(128), 32)
    assert result.ppl == pytest.approx(VOCAB, rel=1e-6)
    assert result.stderr < 1e-4


def test_perplexity_does_not_depend_on_chunks_or_on_what_ran_before(llama, tmp_path):
    whole = bench.perplexity(llama, random_ids(300), 100)
    llama.generate([random_ids(100)], bench.SamplingParams(max_tokens=3))
    assert bench.perplexity(llama, random_ids(300), 100) == whole
    chunked = load(tiny_llama(tmp_path), torch.float64, max_step_tokens=7)
    assert bench.perplexity(chunked, random_ids(300), 100).ppl == pytest.approx(whole.ppl, rel=1e-5)


def test_bos_replaces_the_first_id_of_each_window(engine, monkeypatch):
    ids = random_ids(20)
    seen = []
    monkeypatch.setattr(engine, "tokenizer", SimpleNamespace(add_bos=True, bos_id=7))
    monkeypatch.setattr(engine, "logits", lambda window, first: seen.append((window, first)) or torch.zeros(3, VOCAB))
    bench.perplexity(engine, ids, 8)
    assert seen == [([7] + ids[1:7], 4), ([7] + ids[9:15], 4)]


@pytest.mark.parametrize("ids, context, numbers", [
    (range(10), 64, ("10", "64")), (range(10), 3, ("3", "4")), ([5] * 63 + [VOCAB], 64, ("320", "319")),
    ([1] * 5000, 4097, ("4096",)),
])
def test_perplexity_refuses_with_numbers(engine, ids, context, numbers):
    with pytest.raises(ValueError) as error:
        bench.perplexity(engine, list(ids), context)
    assert all(number in str(error.value) for number in numbers)


def perplexity_args(**given):
    return SimpleNamespace(**({"file": None, "ids": None, "context": None, "json": False} | given))


def test_perplexity_command(engine, tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    (tmp_path / "ids.json").write_text(json.dumps(list(TEXT.encode())))
    ppl, stderr, scored = expected(list(TEXT.encode()), 64)
    assert bench.perplexity_main(engine, perplexity_args(file=str(tmp_path / "text.txt"), context=64)) == 0
    assert capsys.readouterr().out == f"{ppl:.4f} ± {stderr:.4f}\n"
    assert bench.perplexity_main(engine, perplexity_args(ids=str(tmp_path / "ids.json"), context=64, json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"ppl", "stderr", "tokens", "windows", "scored", "context", "model"}
    assert (document["tokens"], document["windows"], document["scored"], document["context"]) == (177, 2, scored, 64)


@pytest.mark.parametrize("data, message", [(b'{"a": 1}', "list"), (b"[1, true]", "list"), (b"[1, 2", "list"),
                                           (b"[1,\xff]", "offset 3")])
def test_ids_that_are_none(engine, tmp_path, data, message):
    (tmp_path / "ids.json").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        bench.perplexity_main(engine, perplexity_args(ids=str(tmp_path / "ids.json")))


# ---- bench -----------------------------------------------------------------------------------------------------------

RESULT_FIELDS = {"name", "engine", "threads", "batch", "prompt_tokens", "generated_tokens", "tokens_per_s", "stdev",
                 "repeats", "failed", "bytes_per_token", "flops_per_token", "limit_fraction"}
FAST_LIMITS = {"memory_gb_per_s": 10.0, "memory_gb_per_s_at_model_size": 20.0, "matmul_gflops": 100.0}


def bench_args(*names, peer=(), json=False, scale=1.0, svg=None):
    return SimpleNamespace(names=list(names), peer=list(peer), json=json, scale=scale, svg=svg, watch=False,
                           model="model", tokenizer=None, dtype="auto", kernels=None)


def test_document(llama, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "GIB", 2**24)
    monkeypatch.setattr(limits, "MATMUL_WIDTH", {"cpu": 64})
    monkeypatch.setattr(bench, "WORKLOADS", (bench.Workload("prefill", 64, 1, bench.prefill_interval),
                                             bench.Workload("decode", 16, 8, bench.decode_interval)))
    svg = tmp_path / "roofline.svg"
    assert bench.main(bench_args("prefill", "decode", json=True, svg=str(svg)), lambda args: llama) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert set(document) == {"machine", "limits", "model", "results"}
    assert set(document["limits"]) == {"memory_gb_per_s", "memory_gb_per_s_at_model_size", "matmul_gflops"}
    assert all(value > 0 for value in document["limits"].values())
    assert [result["name"] for result in document["results"]] == ["prefill", "decode"]
    for result in document["results"]:
        assert set(result) == RESULT_FIELDS and result["engine"] == "quire"
        assert result["repeats"] == bench.REPEATS and result["failed"] == 0
        assert result["tokens_per_s"] > 0 and result["stdev"] >= 0 and 0 < result["limit_fraction"]
    assert any(line.startswith("decode") for line in lines[:-1])
    assert any(line.startswith("A prefill ") and "B decode " in line for line in lines)
    assert svg.read_text().startswith("<svg") and "B decode" in svg.read_text()


@pytest.mark.parametrize("args, words", [
    (bench_args("speed"), "unknown workload 'speed': there is prefill, decode"),
    (bench_args(peer=["ollama"]), "unknown peer 'ollama': there is llama.cpp, transformers, openvino"),
])
def test_names_are_checked_before_anything_is_loaded(args, words, capsys):
    assert bench.main(args, lambda args: pytest.fail("a model was loaded")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


def test_a_workload_that_cannot_run_is_reported_as_failed(llama, capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine_limits", lambda model: FAST_LIMITS)
    monkeypatch.setattr(bench, "WORKLOADS", (bench.Workload("prefill", 600, 1, bench.prefill_interval),
                                             bench.Workload("decode", 510, 8, bench.decode_interval),
                                             bench.Workload("short", 16, 1, bench.decode_interval)))
    assert bench.main(bench_args("prefill", "decode", "short", json=True), lambda args: llama) == 1
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert all(result["tokens_per_s"] is result["limit_fraction"] is None for result in results)
    assert all(result["failed"] == bench.REPEATS + 1 and result["repeats"] == 0 for result in results)
    assert all(words in result["error"] for words, result in zip(("600", "after 2 of 8", "nothing to time"), results))
    assert sum("failed: " in line for line in lines[:-1]) == 3


def test_some_failed_runs_are_counted_and_left_out(llama, monkeypatch):
    runs = outcomes((10, 1.0), (10, 1.0), "broke", (10, 2.0), (10, 5.0), "broke again")
    monkeypatch.setattr(bench, "run_once", lambda *_: runs())
    [result] = bench.measure(llama, DECODE, FAST_LIMITS)
    assert (result["tokens_per_s"], result["repeats"], result["failed"], result["error"]) == (5.0, 3, 2, "broke")


# ---- Beside others ----------------------------------------------------------------------------------------------


DECODE = bench.Workload("decode", 16, 8, bench.decode_interval)


def outcomes(*each):
    """A function that gives one after the other: of (tokens, seconds) a run that decodes so, of text an error."""
    each = iter(each)

    def run(*_):
        outcome = next(each)
        if isinstance(outcome, str):
            raise ValueError(outcome)
        tokens, seconds = outcome
        return Run(16, tokens + 1, tokens, 1.0, 1.0 + seconds)

    return run


class FakePeer:
    """A Peer whose runs are given, and who writes down when it was its turn."""

    def __init__(self, name: str, run, turns: list):
        self.name, self.outcome, self.turns = name, run, turns

    def run(self, prompts, generate, threads):
        self.turns.append((self.name, prompts))
        return self.outcome()

    def close(self):
        self.turns.append((self.name, "closed"))


def test_pairs_of_turns_are_compared(llama, monkeypatch):
    """What disturbs one pair alone has no say: medians of the rates would tell 1.5, of the pairs 3."""
    turns, run_once = [], outcomes((9, 9), (60, 1), (30, 1), (15, 1), (30, 1), (30, 1))
    monkeypatch.setattr(bench, "run_once", lambda engine, workload, repeat: turns.append(
        ("quire", [ids for ids, _ in bench.work(workload, engine.vocab, repeat)])) or run_once())
    slow = FakePeer("slow", outcomes((99, 1), (20, 1), (10, 1), (20, 1), (20, 1), (10, 1)), turns)
    fails = FakePeer("fails", outcomes((10, 1), "broke", (10, 1), "broke", "broke", "broke"), turns)
    rows = {row["engine"]: row for row in bench.measure(llama, DECODE, FAST_LIMITS, [slow, fails])}
    assert [name for name, _ in turns] == ["quire", "slow", "fails"] * (bench.REPEATS + 1)
    for i in range(0, len(turns), 3):  # the same ids, new ones in each repeat
        assert turns[i][1] == turns[i + 1][1] == turns[i + 2][1]
    assert len({str(prompts) for _, prompts in turns}) == bench.REPEATS + 1
    assert set(rows["quire"]) == RESULT_FIELDS and set(rows["slow"]) == RESULT_FIELDS | {"quire_ratio"}
    assert set(rows["fails"]) == RESULT_FIELDS | {"quire_ratio", "error"}
    assert rows["quire"]["tokens_per_s"] == 30 and rows["slow"]["tokens_per_s"] == 20
    assert rows["slow"]["quire_ratio"] == 3  # of 3, 3, 0.75, 1.5, 3
    assert rows["fails"]["quire_ratio"] == 3 and (rows["fails"]["repeats"], rows["fails"]["failed"]) == (1, 4)
    for row in rows.values():
        assert (row["bytes_per_token"], row["prompt_tokens"], row["generated_tokens"]) == (
            rows["quire"]["bytes_per_token"], 16, 8)


def test_a_peer_that_fails_is_never_slow(llama, capsys, monkeypatch):
    turns = []
    monkeypatch.setattr(bench, "machine_limits", lambda model: FAST_LIMITS)
    monkeypatch.setattr(bench, "WORKLOADS", (DECODE, replace(DECODE, name="mixed", spread=2)))
    monkeypatch.setattr(bench, "Peer", lambda name, model: FakePeer(
        f"{name} of {model}", outcomes(*["no such format"] * 6), turns))
    assert bench.main(bench_args("decode", "mixed", json=True, peer=["openvino"] * 2), lambda args: llama) == 1
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert [(row["name"], row["engine"]) for row in results] == [
        ("decode", "quire"), ("decode", "openvino of model"), ("mixed", "quire")]  # whose lengths peers do not run
    failed = results[1]
    assert failed["tokens_per_s"] is failed["limit_fraction"] is failed["stdev"] is None
    assert failed["error"] == "no such format" and failed["repeats"] == 0 and "quire_ratio" not in failed
    assert any("openvino" in line and "failed: no such format" in below for line, below in zip(lines, lines[1:]))
    assert all(len(line) <= 80 for line in lines[:-1])
    assert turns[-1] == ("openvino of model", "closed") and len(turns) == bench.REPEATS + 2


def test_startup(capsys, monkeypatch):
    monkeypatch.setattr(bench, "seconds_to_output", lambda command: 2.0 if "run.py" in str(command) else 1.0)
    monkeypatch.setattr(bench, "peer_startup", lambda name, model, vocab: {"llama.cpp": 0.5}[name])
    rows = bench.measure_startup(bench_args(), VOCAB, ["llama.cpp"])
    assert [(row["engine"], row["variant"], row["seconds"]) for row in rows] == [
        ("quire", "first token", 2.0), ("quire", "import torch", 1.0), ("llama.cpp", "first token", 0.5)]
    assert rows[2]["quire_ratio"] == 4 and rows[2]["tokens_per_s"] is None and rows[2]["repeats"] == bench.REPEATS
    assert "quire takes 4.00 x as much" in bench.table_row(rows[2]) and "2.00 s" in bench.table_row(rows[0])


def test_seconds_to_the_first_output():
    waits = "import sys, time; print(1, flush=True); time.sleep(0.5); sys.exit({})"
    start_s = time.perf_counter()
    seconds = bench.seconds_to_output([sys.executable, "-c", waits.format(0)])
    assert 0 < seconds < time.perf_counter() - start_s - 0.5
    with pytest.raises(ValueError, match="status 1: out of luck"):
        bench.seconds_to_output([sys.executable, "-c", waits.format("'out of luck'")])
    with pytest.raises(ValueError, match="status 0"):
        bench.seconds_to_output([sys.executable, "-c", ""])


def test_decoding_counts_from_when_every_request_has_its_first_token(llama):
    """Three prompts of 300 tokens take two steps of 512: the first draws while the last is still read."""
    run = bench.run_once(llama, bench.Workload("batch", 300, 6, bench.decode_interval, 3), 1)
    assert (run.prompt_tokens, run.answer_tokens) == (900, 18) and 3 * 5 - 2 <= run.decoded_tokens < 3 * 5
    assert 0 < run.first_token_s < run.finished_s


def test_token_cost_of_a_model_small_enough_to_count(llama):
    """hidden 64, 2 layers, 4 heads and 2 kv heads of 16, feed-forward 96, vocabulary 320, float32."""
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    head, kv_values = 320 * 64, 2 * 2 * (16 + 16)
    num_bytes, flops = bench.token_cost(llama.model, bench.Workload("decode", 16, 128, bench.decode_interval), 512,
                                         torch.float32)
    assert num_bytes == 4 * (matrices + head) + 4 * kv_values * (16 + 64)
    assert flops == 2 * (matrices + head) + 4 * 64 * 2 * (16 + 64)
    num_bytes, flops = bench.token_cost(llama.model, bench.Workload("prefill", 512, 1, bench.prefill_interval), 256,
                                         torch.float32)
    assert num_bytes == 4 * (matrices + head) / 256 + 4 * kv_values * 256 / 256
    assert flops == 2 * (matrices + head / 512) + 4 * 64 * 2 * 256
    num_bytes, _ = bench.token_cost(llama.model, bench.Workload("decode", 16, 128, bench.decode_interval), 512,
                                    torch.int8)
    assert num_bytes == 4 * (matrices + head) + (kv_values + 4 * 2 * 2 * 2) * (16 + 64)


def test_a_shared_prefix_is_computed_once(llama):
    """The workload does what its name says, and a token found in the cache is counted as free."""
    cached, uncached = (bench.Workload("prefix", 96, 2, bench.served_interval, 4, 64, variant)
                        for variant in ("cached", "uncached"))
    before = llama.stats.computed_tokens
    assert bench.run_once(llama, cached, 1).prompt_tokens == 4 * 96
    assert llama.stats.computed_tokens - before == 64 + 4 * 32 + 4
    costs = [bench.token_cost(llama.model, workload, 512, torch.float32) for workload in (cached, uncached)]
    assert costs[0][1] / costs[1][1] == pytest.approx((64 + 4 * 32) / (4 * 96))
    [result] = bench.measure(llama, uncached, FAST_LIMITS)
    assert result["variant"] == "uncached" and result["failed"] == 0 and llama.config.prefix_cache


def test_mixed_draws_its_own_lengths_and_scales(llama, capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine_limits", lambda model: FAST_LIMITS)
    monkeypatch.setattr(bench, "REPEATS", 1)
    mixed = bench.Workload("mixed", 50, 20, bench.answered_interval, 40, spread=15)
    monkeypatch.setattr(bench, "WORKLOADS", (mixed,))
    finished = []
    submit = llama.submit
    monkeypatch.setattr(llama, "submit", lambda *args: finished.append(submit(*args)) or finished[-1])
    assert bench.main(bench_args("mixed", json=True, scale=0.25), lambda args: llama) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert result["batch"] == 10 and result["repeats"] == 1 and len(finished) == 20
    for name, mean in (("num_prompt", 50), ("num_output", 20)):
        lengths = [getattr(request, name) for request in finished]
        assert mean - 15 <= min(lengths) < mean < max(lengths) <= mean + 15
    decode = bench.Workload("decode", 50, 20, bench.decode_interval, 10)
    costs = [bench.token_cost(llama.model, workload, 512, torch.float32)
             for workload in (decode, replace(mixed, requests=10))]
    assert costs[1][1] == pytest.approx(costs[0][1] * (1 + 50 / 20))


def test_stall_compares_steps_with_and_without_a_prompt_beside_them(llama, monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 2)
    result = bench.measure_stall(llama, num_decoding=3, prompt_tokens=100)
    assert (result["batch"], result["repeats"]) == (3, 2) and 0 < result["p95_ms_without"] and 0 < result["p95_ms"]
    assert not llama.has_work
    result = bench.measure_stall(llama, num_decoding=3, prompt_tokens=100_000)
    assert result["repeats"] == 0 and "100000" in result["error"] and not llama.has_work


def test_limit_fraction_is_that_of_the_narrower_limit():
    assert bench.least_seconds(2e9, 1e9, FAST_LIMITS) == pytest.approx(0.1)
    assert bench.least_seconds(2e9, 50e9, FAST_LIMITS) == pytest.approx(0.5)


def test_draft_is_measured_with_and_without(engine):
    rows = bench.measure_draft(engine)
    assert [row["variant"] for row in rows] == ["edit, plain", "edit, ngram", "new, plain", "new, ngram"]
    assert all(row["tokens_per_s"] > 0 for row in rows) and rows[0]["draft"] is None and rows[1]["draft"]["steps"] > 0
    assert bench.table_row(rows[1] | {"limit_fraction": None}).startswith("draft   edit, ngram  quire")
