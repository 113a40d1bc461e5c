"""gpu.py: models on the CUDA kernels: near the CPU's, and the same bits whatever runs beside, with drafts and trees,
recorded steps or not. Through the emulator everywhere; the same and test_emu's kernels on a device (marker gpu)."""

import inspect
import json
import sys
import time
from dataclasses import replace

import pytest
import tiny
import torch
from conftest import ROOT
from tiny_heads import mtp_tensors, write_eagle, write_medusa

import apart
import emulator
import gpu
import kernels
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from heads import open_eagle, open_medusa, open_mtp
from lookahead import Follower, Medusa, TreeShape
from model import load_model
from replay import padded_size
from run import main
from sampling import SamplingParams
from speculative import DraftModel, Manner, Ngram, Trial
from vocab import load_tokenizer

sys.path.insert(0, str(ROOT / "tools"))

import gpu_check  # noqa: E402 (it needs the path above)

CONFIG = tiny.tiny_config("llama", num_hidden_layers=3)
PROMPTS = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate((1, 9, 40))]
PROMPTS.append(PROMPTS[2][:34] + [9] * 5)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.9, seed=11, repetition_penalty=1.2,
                         frequency_penalty=0.3)
on_device = pytest.mark.gpu


# The build -----------------------------------------------------------------------------------------------------------

def test_without_a_device_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", quant="q8_0")
    assert main(["generate", "-m", str(path), "-p", "hi", "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "--device cpu" in said.err


@pytest.mark.parametrize("flag", ["--prefill bfloat16", "--cache-dtype int8", "--cache-dtype float32"])
def test_flags_without_effect_on_a_device_are_refused_before_anything_is_read(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.setattr(gpu, "check_device", lambda: None)
    monkeypatch.setattr(gpu, "load", lambda on_build: pytest.fail("kernels were loaded"))
    monkeypatch.setattr("model.load_model", lambda *args, **options: pytest.fail("the model was loaded"))
    path = tiny.write_gguf(tmp_path / "tiny.gguf", quant="q8_0")
    assert main(["generate", "-m", str(path), "-p", "hi", "--device", "cuda", *flag.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "{} is {} ".format(*flag.split()) in said and "--kernels torch" in said


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Makes a toolkit of a release, in tmp_path, and has it found."""
    def make(release: str) -> None:
        nvcc = tmp_path / "bin/nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return make


def test_a_compiler_of_another_cuda_is_told_in_one_line(toolkit):
    toolkit("11.8")
    with pytest.raises(ValueError, match="nvcc is of CUDA 11.8 but torch is built for 13.0: install one of CUDA 13"):
        gpu.check_compiler()


def test_a_compiler_of_a_later_release_of_the_same_cuda_fits(toolkit):
    toolkit("13.2")
    gpu.check_compiler()


def test_without_a_compiler_one_line_says_so(toolkit):
    with pytest.raises(ValueError, match="there is no nvcc .*: install the CUDA toolkit 13.0, or use --device cpu$"):
        gpu.check_compiler()


@pytest.fixture
def as_on_a_device(monkeypatch, tmp_path):
    """As if there were one, of a capability that is returned as a list, to be changed; nothing is built yet."""
    capability = [9, 0]
    monkeypatch.setattr(gpu, "check_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: tuple(capability))
    monkeypatch.setattr(gpu, "build_folder", lambda target: tmp_path / "build" / target)
    return capability


def test_nothing_is_said_or_left_where_it_cannot_be_compiled(toolkit, as_on_a_device, tmp_path):
    with pytest.raises(ValueError, match="no nvcc"):
        gpu.load(lambda: pytest.fail("it was told to compile"))
    as_on_a_device[:] = 7, 5
    with pytest.raises(ValueError, match="capability 7.5 but the CUDA kernels need 8.0"):
        gpu.load(lambda: pytest.fail("it was told to compile"))
    assert not (tmp_path / "build").exists()


def test_it_is_compiled_for_the_device_by_the_compiler_that_was_checked(toolkit, as_on_a_device, monkeypatch, tmp_path):
    toolkit("13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0+PTX")
    given = []

    def compile_extension(settings, **arguments):
        given.append(settings)
        raise RuntimeError("enough")

    monkeypatch.setattr("native.compile_extension", compile_extension)
    with pytest.raises(ValueError, match="cannot be compiled .enough."):
        gpu.load()
    assert given == [{"CUDA_HOME": str(tmp_path), "TORCH_CUDA_ARCH_LIST": "9.0"}]


def test_every_kernel_of_the_header_is_in_the_library(emulated):
    assert {"attention", "matmul", "draw", "rope_store", "group_by_expert"} <= emulated.kernels.keys()
    names = [name for name, _, _ in emulated.kernels["rms_norm"].parameters]
    assert names == ["out_TD", "x_TD", "weight_D", "T", "D", "eps", "stream"]


def test_operations_have_the_signatures_of_the_reference():
    public = [name for name, value in vars(kernels).items() if inspect.isfunction(value) and not name.startswith("_")]
    served = [name for name in public if hasattr(gpu.Cuda, name)]
    assert {"embed", "linear", "linear_add_", "rms_norm", "silu_mul", "copy", "first_outputs", "draw", "distribution",
            "rope_angles", "rope_store_", "move_kv_", "attention", "new_kv", "argmax"} <= set(served)
    for name in served:
        ours, theirs = (list(inspect.signature(function).parameters) for function in
                        (getattr(gpu.Cuda, name), getattr(kernels, name)))
        assert len(ours) - 1 == len(theirs), name


# Models --------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def emulated():
    return emulator.load()


@pytest.fixture(scope="module", params=["emulator", pytest.param("device", marks=on_device)])
def ops(request):
    return emulator.load() if request.param == "emulator" else gpu.load()


@pytest.fixture(scope="module", params=["q4_0", pytest.param("q8_0", marks=pytest.mark.slow)])
def path(request, tmp_path_factory):
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quant=request.param, num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(path, ops):
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, None, ops=ops)


def make_engine(model, replayed: bool = True, **config):
    engine = Engine(model, EngineConfig(**({"num_pages": 64, "page_size": 16} | config)))
    if not replayed:
        engine.replay.new_recording = None
    return engine


def tokens(engine, prompts=PROMPTS, params=GREEDY):
    completions = engine.generate(prompts, params)
    assert engine.cache.num_available == engine.cache.num_pages
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=[pytest.param(GREEDY, marks=pytest.mark.slow, id="greedy"),
                                        pytest.param(SAMPLED, id="sampled")])
def params(request):
    return request.param


@pytest.fixture(scope="module")
def alone(model, params):
    """Every prompt in an engine of its own, in one chunk, nothing recorded."""
    return [tokens(make_engine(model, replayed=False, prefix_cache=False), [prompt], params)[0] for prompt in PROMPTS]


def test_a_batch_equals_requests_alone(model, params, alone):
    engine = make_engine(model)
    assert tokens(engine, PROMPTS, params) == alone
    assert engine.replay.recorded and all(size[:2] == padded_size(*size[:2]) for size in engine.replay.recorded)


@pytest.mark.parametrize("config", [{"max_step_tokens": 7, "num_pages": 6}, {"page_size": 8, "max_requests": 3},
                                    {"page_size": 64, "replayed": False}], ids=str)
def test_chunks_preemptions_and_pages_change_no_token(model, params, alone, config):
    assert tokens(make_engine(model, **config), PROMPTS, params) == alone


def test_a_cached_prefix_changes_no_token(model, params, alone):
    engine = make_engine(model)
    for _ in range(2):
        assert tokens(engine, PROMPTS, params) == alone
    assert engine.stats.cached_tokens > 64


def test_recorded_steps_and_steps_ahead_have_the_bits_of_others(model):
    """All logits, while requests end one by one, so that sizes are filled up in different ways."""
    def logits(replayed: bool, is_async: bool):
        engine, nums_in_the_air = make_engine(model, replayed), set()
        engine.is_async &= is_async
        seen, compute = [], model.logits
        engine.model.logits = lambda h_LD: seen.append(compute(h_LD).clone()) or seen[-1]
        try:
            for i, prompt in enumerate(PROMPTS):
                engine.submit(prompt, SamplingParams(max_tokens=3 + 2 * i, ignore_eos=True))
            while engine.has_work:
                engine.step()
                nums_in_the_air.add(len(engine.flights))
        finally:
            del engine.model.logits
        assert nums_in_the_air == ({0, 1} if is_async else {0})
        return seen

    recorded, plain, ahead = logits(True, False), logits(False, False), logits(True, True)
    for some in (recorded, ahead):
        assert len(some) == len(plain) and all(map(torch.equal, some, plain))


def test_logits_are_near_those_of_the_cpu(path, ops, native_ops):
    """No further from what float64 makes of the same weights than the CPU's kernels are."""
    logits = []
    for some, dtype in ((ops, None), (native_ops, None), (kernels, torch.float64)):
        with open_checkpoint(path) as checkpoint:
            logits.append(make_engine(load_model(checkpoint, dtype, ops=some)).logits(PROMPTS[2]).cpu())
    error, cpu_error = ((some - logits[2]).std() for some in logits[:2])
    assert error < 1.5 * cpu_error and cpu_error < 0.05 * logits[2].std()


@pytest.mark.models
@pytest.mark.slow
def test_the_default_model_writes_what_it_writes_on_the_cpu(emulated, native_ops, smollm2):
    answers = []
    for some in (emulated, native_ops):
        with open_checkpoint(smollm2) as checkpoint:
            engine = Engine(load_model(checkpoint, None, context=64, ops=some), EngineConfig(num_pages=4, page_size=16),
                            load_tokenizer(checkpoint))
        answers.append(engine.generate(["The capital of France is"], SamplingParams(max_tokens=2))[0].token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 2


@on_device
def test_float64_through_torch_gives_the_same_tokens_on_a_device(path, params):
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, torch.float64, "cuda")
    alone = [tokens(make_engine(model, prefix_cache=False), [prompt], params)[0] for prompt in PROMPTS]
    assert tokens(make_engine(model, max_step_tokens=7), PROMPTS, params) == alone


@on_device
def test_what_is_fetched_waits_for_nothing_that_is_launched_later():
    ops = gpu.load()
    ids = torch.arange(5, device="cuda")
    read = ops.fetch(ids)
    torch.cuda._sleep(2 * 10**9)  # clock cycles: about a second
    start_s = time.perf_counter()
    assert read().tolist() == [0, 1, 2, 3, 4] and time.perf_counter() - start_s < 0.3
    torch.cuda.synchronize()
    assert time.perf_counter() - start_s > 0.3


# Drafts --------------------------------------------------------------------------------------------------------------

@pytest.fixture
def drafts_never_rest(monkeypatch):
    monkeypatch.setattr(Trial, "LOSS", 1e9)


def drafters(model, folder):
    """By name; heads that are random go on however unsure they are."""
    manner = Manner(True, False)
    medusa = open_medusa(write_medusa(folder / "medusa", CONFIG, 3), model)
    eagle = open_eagle(write_eagle(folder / "eagle", CONFIG, 1), model)
    found = {"ngram": Ngram(), "chain": Follower(eagle, model, None, manner),
             "tree": Medusa(medusa, model, TreeShape(3, 2), manner),
             "deep tree": Follower(eagle, model, TreeShape(2, 3), manner)}
    for drafter in found.values():
        drafter.sure = 0
    return found


@pytest.mark.parametrize("name", ["ngram", "chain", "tree", "deep tree"])
def test_drafts_change_no_token(model, params, alone, drafts_never_rest, tmp_path, name):
    engine = make_engine(model)
    engine.draft_with(drafters(model, tmp_path)[name])
    assert tokens(engine, PROMPTS, params) == alone
    assert name == "ngram" or engine.sums["drafted_tokens"] > 9


# A device's own memory -----------------------------------------------------------------------------------------------

# No drafter and each drafter, as chains and as trees, and each way to verify.
APART = [(None, None, "coupled"), ("eagle1", TreeShape(2, 2), "coupled"), ("eagle3", None, "block")]
APART += [pytest.param(*some, marks=pytest.mark.slow) for some in (
    ("eagle1", None, "coupled"), ("eagle3", None, "coupled"), ("eagle3", TreeShape(2, 2), "coupled"),
    ("mtp", None, "coupled"), ("mtp", TreeShape(2, 2), "coupled"), ("medusa", None, "rejection"),
    ("medusa", TreeShape(2, 2), "coupled"), ("ngram", None, "coupled"), ("ngram", None, "block"),
    ("model", None, "coupled"), ("model", None, "rejection"))]
FEW = tuple((id, 12.0) for id in range(2))  # tokens, so that text repeats itself
# Drafters that take penalties have logits on the host; these have not.
UNCHANGED = {"eagle1": SamplingParams(ignore_eos=True, temperature=0.8, seed=5), "mtp": GREEDY}
# Where the host waits for the device: for the ids of a step, and drafters for those that they draft.
WAITS = {"engine._judge", "speculative.grow", "lookahead.likely"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model with a layer for multi-token prediction, heads for it, and a draft model."""
    folder = tmp_path_factory.mktemp("stored")
    tensors = tiny.tiny_tensors(CONFIG) | mtp_tensors(CONFIG)
    tiny.write_safetensors(folder / "model", "llama", tensors=tensors, num_hidden_layers=3, num_nextn_predict_layers=1)
    write_eagle(folder / "eagle1", CONFIG, 1)
    write_eagle(folder / "eagle3", CONFIG, 3, draft_vocab=200, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    write_medusa(folder / "medusa", CONFIG, 4)
    tiny.write_gguf(folder / "draft.gguf", quant="q8_0", num_hidden_layers=1)
    return folder


def drafted(kind, device, stored, name, shape, verify) -> tuple[list, int]:
    """Tokens and log-probabilities of the prompts with that drafter, and how many tokens it drafted."""
    ops, dtype, draft_dtype = kernels, torch.float64, torch.float64
    if kind == "cuda":
        ops, dtype, draft_dtype = emulator.load(), torch.bfloat16, None
        ops.device = device
    manner = Manner(verify == "coupled", verify != "coupled")
    with open_checkpoint(stored / "model") as checkpoint, open_checkpoint(stored / "draft.gguf") as draft:
        model = load_model(checkpoint, dtype, device, 128, ops)
        engine = make_engine(model, num_pages=40, max_step_tokens=24, verify=verify)
        drafter = Ngram()
        if name == "model":
            drafter = DraftModel(name, lambda: load_model(draft, draft_dtype, device, ops=ops), model.config.vocab, 40,
                                 16, 8, manner)
        elif name == "medusa":
            drafter = Medusa(open_medusa(stored / name, model), model, shape, manner)
        elif name not in (None, "ngram"):
            network = open_mtp(checkpoint, model) if name == "mtp" else open_eagle(stored / name, model)
            drafter = Follower(network, model, shape, manner)
        drafter.sure = 0
        if name is not None:
            engine.draft_with(drafter)
        params = UNCHANGED.get(name, replace(SAMPLED, logit_bias=FEW, min_tokens=2))
        completions = engine.generate(PROMPTS[1:3], replace(params, max_tokens=12, logprobs=1))
        return [(c.token_ids, c.logprobs) for c in completions], engine.sums["drafted_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, shape, verify", APART, ids=str)
def test_nothing_of_the_host_meets_the_device(stored, drafts_never_rest, monkeypatch, kind, name, shape, verify):
    """Nor does the host wait for the device but for ids. (Reading weights does.)"""
    monkeypatch.setattr("engine.free_memory_bytes", lambda device: 10**9)
    plain = drafted(kind, torch.device("cpu"), stored, name, shape, verify)
    with apart.Apart() as memory:
        assert drafted(kind, apart.DEVICE, stored, name, shape, verify) == plain
    assert (plain[1] > 9) == (name is not None) and memory.waits.total() > 9
    waits = [where.split(".") for where in memory.waits]
    assert {f"{module}.{function}" for module, function in waits
            if module not in ("gpu", "kernels", "sampling", "weights") and function != "__init__"} <= WAITS


def test_what_meets_and_what_waits_is_seen():
    with apart.Apart() as memory:
        host_T, far_T = torch.arange(3), torch.arange(3, device=apart.DEVICE)
        assert [x.device.type for x in (host_T, far_T, far_T * 2, far_T.split(2)[1], far_T.cpu())] == [
            "cpu", "cuda", "cuda", "cuda", "cpu"]
        assert torch.equal(host_T, far_T.cpu()) and (far_T + 1.5).max() == 3.5
        for meet in (lambda: far_T + host_T, lambda: far_T[host_T], lambda: torch.cat([host_T, far_T]),
                     lambda: far_T.index_select(0, host_T), lambda: far_T.__setitem__(host_T, 0)):
            with pytest.raises(AssertionError, match="a tensor of the host"):
                meet()
        with pytest.raises(AssertionError, match="pinned"):
            far_T.pin_memory()
        assert far_T.to("cpu", non_blocking=True).tolist() == [0, 1, 2] and memory.waits.total() == 3
        for wait in (far_T.tolist, far_T[1].item, lambda: far_T[far_T > 0], lambda: int(far_T[2]), far_T.cpu,
                     lambda: host_T.to(apart.DEVICE), lambda: far_T.copy_(host_T), lambda: host_T.copy_(far_T)):
            before = memory.waits.total()
            wait()
            assert memory.waits.total() == before + 1
        for go_on in (lambda: far_T[1:], lambda: far_T.copy_(host_T, non_blocking=True), lambda: far_T.fill_(2),
                      lambda: host_T.tolist(), lambda: host_T.pin_memory().to(apart.DEVICE, non_blocking=True)):
            before = memory.waits.total()
            go_on()
            assert memory.waits.total() == before


# tools/gpu_check.py --------------------------------------------------------------------------------------------------

SMALL = gpu_check.Sizes(copy_bytes=1 << 20, square=256, rows=4, width=256, context=40, contexts_at_once=(1,),
                        vocab=320, page=16, models=((1, 64, 64, 2, 1), (2, 64, 64, 2, 1)), head_width=32,
                        batches=(1, 2), prompt=20, steps=3)


@pytest.fixture
def check(emulated, monkeypatch, tmp_path, capsys):
    """Runs the whole script on small sizes and gives its status, its document and the table."""
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    monkeypatch.setattr(gpu_check, "AT_LEAST_S", 0)
    monkeypatch.setattr(gpu_check, "CHECKS", ("--version",))

    def run(**sizes) -> tuple[int, dict, str]:
        status = gpu_check.main(str(tmp_path / "check.json"), emulated, replace(SMALL, **sizes))
        return status, json.loads((tmp_path / "check.json").read_text("utf-8")), capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_check_times_everything(check):
    status, document, table = check()
    rows = {row["name"]: row for row in document["rows"]}
    kernels_timed = ["rms_norm", "silu_mul", "quantize", "embed q8_0", "rope_store", "move_kv", "argmax, 8 x 320",
                     "draw, top-p, 2 x 320", "attention, decoding 1 x 40",
                     *(f"linear {name}, {T} rows" for name in ("bf16", *gpu_check.QUANTS) for T in (1, 4, 16))]
    assert status == 0 and document["checks_passed"] and document["checks"].startswith("pytest")
    assert all(rows[name]["unit"] == "GB/s" and rows[name]["limit"] == document["copy_gb_per_s"]
               for name in kernels_timed)
    models = [(unit, limit, [row for row in document["rows"] if f"B {dtype}, {work}" in row["name"]])
              for dtype in ("bf16", "q4_0") for work, unit, limit in
              [(f"decoding {S} ", "GB/s", "copy_gb_per_s") for S in SMALL.batches]
              + [(f"prompt of {SMALL.prompt} ", "TFLOP/s", "matmul_tflops")]]
    for unit, limit, of_both in models:  # whose rows may have one name
        assert [(row["unit"], row["limit"]) for row in of_both] == 2 * [(unit, document[limit])]
    assert {row["goal"] for row in rows.values()} == {None, 0.85, 0.7, 0.55, 0.8}
    assert "transformers, bf16, decoding 1" in table
    assert all(row["seconds"] > 0 and row["fraction"] == row["rate"] / row["limit"] > 0 and row["name"] in table
               for row in rows.values())


def test_the_check_goes_on_where_something_fails(check, monkeypatch):
    def attention(bench):
        yield bench.memory_row("before", 1, 1)
        raise RuntimeError("out of memory\nand more")

    for name in ("small_kernels", "products", "draws", "model_rows", "transformers_rows"):
        monkeypatch.setattr(gpu_check, name, lambda bench, part=name, **options: [gpu_check.Row(part, 1, 1, "", 1)])
    monkeypatch.setattr(gpu_check, "attention", attention)
    status, document, table = check(models=((1, 64, 64, 2, 1),))
    assert status == 1 and "attention" in table and "failed: out of memory\n" in table
    assert [row["name"] for row in document["rows"]] == [
        "small_kernels", "products", "before", "attention", "draws", *2 * ["model_rows"], "transformers_rows"]
    assert document["rows"][3]["error"] == "out of memory" and document["rows"][3]["rate"] is None
    monkeypatch.setattr(gpu_check, "attention", lambda bench: ())
    monkeypatch.setattr(gpu_check, "CHECKS", ("--no-such-flag",))
    status, document, _ = check()
    assert status == 1 and not document["checks_passed"]


def test_the_copy_rate_counts_what_is_read_and_written(emulated, monkeypatch):
    monkeypatch.setattr(gpu_check, "elapsed_seconds", lambda work, times, ops: 2.0 * times)
    bench = gpu_check.measured_limits(emulated, replace(SMALL, copy_bytes=3_000_000, square=100))
    assert bench.copy_gb_per_s == 3e-3 and bench.matmul_tflops == 1e-6


# Batches -------------------------------------------------------------------------------------------------------------

def test_a_batch_sent_elsewhere_says_the_same(path, emulated, monkeypatch):
    """As to a device: page tables of its requests alone, in the order of the batch."""
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, None, ops=emulated)
    engine = make_engine(model)
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    chunks = sorted(engine.scheduler.plan(512), key=lambda chunk: -len(chunk.request.tokens))
    batch, most_pages = engine._pack(chunks), max(len(prompt) for prompt in PROMPTS) // 16 + 1
    num = len(batch.lease_S)
    sent = batch.to(torch.device("cpu"), most_pages)
    assert num > 2 and batch.lease_S.tolist() != list(range(num))
    assert sent.lease_S.tolist() == list(range(num)) and len(sent.tables[0]) == num
    here, there = (model.forward(one, engine.cache)[0].clone() for one in (batch, sent))
    assert torch.equal(here, there)
    monkeypatch.setattr(engine.replay, "size", lambda *_: (8, 300))
    padded = engine._pack(chunks)
    for one in (padded, padded.to(torch.device("cpu"), most_pages)):
        assert torch.equal(model.forward(one, engine.cache)[0][: len(here)], here)
        assert (len(one.lease_S), len(one.lengths_S), len(one.token_T)) == (8, 8, 300)
        assert (one.slots_T[0][len(here) :] == -1).all() and one.starts_S1[-1] == 300


@pytest.mark.parametrize("num_requests", range(1, 70))
def test_padded_size_have_room_and_are_few(num_requests):
    sizes = set()
    for more in range(17):
        padded = padded_size(num_requests, num_requests + more)
        requests, tokens = padded[0] - num_requests, padded[1] - num_requests - more
        assert (requests, tokens) == (0, 0) or 0 < requests <= tokens
        assert requests <= max(num_requests, 8)
        sizes.add(padded)
    assert len(sizes) <= 10
