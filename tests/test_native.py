"""native.py: how the kernels are compiled and refused, and models on them: near the reference, and the same bits
whatever runs beside. The kernels one by one are in test_native_matmul.py and test_native_attention.py."""

import inspect
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import bench
import kernels
import native
import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import SamplingParams

QUANTS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
PROMPTS = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate((1, 2, 7, 8, 9, 30, 33, 64, 100))]


# ---- the build


def test_sources_are_compiled_once_and_found_again(tmp_path, monkeypatch):
    def compile_into(folder):
        (folder / "quire_native.so").write_bytes(b"")
        (folder / "build.ninja").write_text("")

    monkeypatch.setattr(native, "compile_into", compile_into)
    (tmp_path / "csrc/cpu").mkdir(parents=True)
    (tmp_path / "csrc/cpu/a.inc").write_text("")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "csrc")
    told = []
    first = native.library(lambda: told.append(1))
    assert native.library(lambda: told.append(1)) == first and told == [1]
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    (tmp_path / "csrc/cpu/a.inc").write_text("// changed")
    assert native.library(lambda: told.append(1)) != first and told == [1, 1]


@pytest.mark.slow
def test_a_build_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/binding.cpp").write_text("#error this cannot be\n")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "csrc")
    with pytest.raises(RuntimeError, match="error.*this cannot be"):
        native.library()
    assert [path.name for path in (tmp_path / "build").iterdir()] == [".lock"]


def test_what_a_killed_build_left_goes_with_the_next(tmp_path):
    def killed(folder):
        (folder / "a.o").write_bytes(b"")
        os._exit(9)

    def finished(folder):
        (folder / "name.so").write_bytes(b"")

    if (child := os.fork()) == 0:
        native.built(tmp_path / "build/native-1", "name", killed, lambda: None)
    os.waitpid(child, 0)
    assert len(list((tmp_path / "build").iterdir())) == 2
    native.built(tmp_path / "build/native-1", "name", finished, lambda: None)
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == [".lock", "native-1"]


def test_who_waits_for_anothers_build_is_told(tmp_path):
    started, told = tmp_path / "started", []

    def slow(folder):
        started.touch()
        time.sleep(1)
        (folder / "name.so").write_bytes(b"")

    if (child := os.fork()) == 0:
        native.built(tmp_path / "build/native-1", "name", slow, lambda: None)
        os._exit(0)
    while not started.exists():
        time.sleep(0.01)
    native.built(tmp_path / "build/native-1", "name", lambda folder: pytest.fail("built twice"), lambda: told.append(1))
    assert told == [1] and os.waitpid(child, 0)[1] == 0


def test_an_interrupt_leaves_no_compiler_behind(tmp_path, monkeypatch):
    """The compilers are children of the process that is started."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{tmp_path}/compiler\nwait\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(native.sys, "executable", str(tmp_path / "python"))
    compiler = tmp_path / "compiler"

    def interrupt():
        while not (compiler.exists() and compiler.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        native.compile_extension(name="x")
    thread.join()
    state = Path(f"/proc/{compiler.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_of_what_compilers_say_the_line_that_tells_is_passed_on(tmp_path, monkeypatch):
    """A linker's last line does not."""
    text = "ld: cannot find -lcudart: No such file\ncollect2: error: ld returned 1 exit status\nninja: build stopped"
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(native.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match="^ld: cannot find -lcudart"):
        native.compile_extension(name="x")


def test_a_toolkit_is_found_through_a_compiler_that_calls_it(tmp_path, monkeypatch):
    def write(path, text):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    write(tmp_path / "cuda/bin/nvcc", "[ \"$1\" = --dryrun ] && echo \"#$ TOP=$(dirname $0)/..\" >&2")
    write(tmp_path / "local/bin/nvcc", f"exec {tmp_path}/cuda/bin/nvcc \"$@\"")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/local/bin", prepend=":")
    assert native.cuda_toolkit() == tmp_path / "cuda"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert native.cuda_toolkit() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert native.cuda_toolkit() == tmp_path / "cuda"


# ---- the operations


def test_operations_have_the_signatures_of_the_reference(native_ops):
    public = [name for name, value in vars(kernels).items() if inspect.isfunction(value) and not name.startswith("_")]
    served = [name for name in public if hasattr(native_ops, name)]
    assert {"embed", "linear", "linear_add_", "rms_norm", "silu_mul", "draw", "distribution", "rope_angles",
            "rope_store_", "move_kv_", "attention", "new_kv"} <= set(served)
    for name in ("rope_angles", "rope_store_", "move_kv_", "attention", "new_kv"):
        assert list(inspect.signature(getattr(native_ops, name)).parameters) == list(
            inspect.signature(getattr(kernels, name)).parameters)


def test_what_the_kernels_cannot_read_is_refused_by_name(native_ops):
    x_TD, weight_D = torch.ones(3, 8), torch.ones(8)
    for bad in (x_TD.double(), torch.ones(3, 16)[:, ::2]):
        with pytest.raises(ValueError, match="x_TD must be a contiguous CPU tensor of Float"):
            native_ops.rms_norm(bad, weight_D, 1e-5)
    with pytest.raises(ValueError, match="weight_D"):
        native_ops.rms_norm(x_TD, torch.ones(7), 1e-5)
    packed = native_ops.pack([("f32", (4, 8), torch.ones(4, 8).view(torch.uint8))])
    with pytest.raises(ValueError, match="x_TI must have as many columns"):
        native_ops.linear(torch.ones(3, 9), packed, None)
    with pytest.raises(ValueError, match="raw does not have the bytes"):
        native_ops.pack([("f32", (4, 9), torch.ones(4, 8).view(torch.uint8))])
    with pytest.raises(ValueError, match="embed: an index out of range"):
        native_ops.embed(packed, torch.tensor([4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size, head_dim", [(8, 20), (16, 64), (32, 256)])
def test_what_is_moved_is_as_if_it_had_been_stored_there(native_ops, page_size, head_dim, dtype):
    """Of both operations. A slot that is read may be written after that."""
    from_T, to_T = torch.tensor([17, 9, 40]), torch.tensor([16, 17, 41])
    qkv_TX = torch.randn(3, 6 * head_dim, generator=torch.Generator().manual_seed(1))
    qkv_TX[1, 3 * head_dim] = torch.nan
    for ops in (kernels, native_ops):
        angles = ops.rope_angles(torch.arange(3), kernels.rope_frequencies(1e4, 8), 1.0, torch.float32)
        kvs = [ops.new_kv(8, page_size, 2, head_dim, head_dim, dtype, "cpu", 0) for _ in range(2)]
        for kv in kvs:
            for memory in filter(lambda memory: memory is not None, (kv.k, kv.v, kv.k_scale, kv.v_scale)):
                memory.zero_()
            ops.rope_store_(kv, qkv_TX, angles, from_T, head_dim)
        ops.move_kv_(kvs[0], from_T, to_T)
        ops.rope_store_(kvs[1], qkv_TX, angles, to_T, head_dim)
        for ours, theirs in ((kvs[0].k, kvs[1].k), (kvs[0].v, kvs[1].v)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for bad in (-1, 8 * page_size):
            with pytest.raises((ValueError, IndexError, RuntimeError)):
                ops.move_kv_(kvs[0], from_T, torch.tensor([16, 17, bad]))
    with pytest.raises(ValueError, match="to_T must have a slot"):
        native_ops.move_kv_(kvs[0], from_T, to_T[:2])


# ---- models


def load(path, dtype, ops=kernels, **kwargs):
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, dtype, ops=ops, **kwargs)


def answers(model, prompts, params, **config):
    """Of each request its ids, and the logits they were drawn from: (ids, rows)."""
    engine = Engine(model, EngineConfig(**({"num_pages": 64, "page_size": 8} | config)))
    logits, rows = model.logits, []
    model.logits = lambda h_LD: rows.append(logits(h_LD).clone()) or rows[-1]
    try:
        requests = [engine.submit(prompt, params) for prompt in prompts]
        seen = {request: [] for request in requests}
        while engine.has_work:
            before = {request: request.num_output for request in requests}
            engine.step()
            drew = [request for request in engine_order(engine, requests) if request.num_output > before[request]]
            for request, row in zip(drew, rows.pop() if drew else ()):
                seen[request].append(row)
    finally:
        del model.logits
    return [(request.output_ids, torch.stack(seen[request])) for request in requests]


def engine_order(engine, requests):
    """Requests of one class draw in the order in which they were admitted."""
    return sorted(requests, key=lambda request: (request.admitted_s is None, request.admitted_s))


def assert_same_bits(ours, theirs):
    for (ids, rows), (other_ids, other_rows) in zip(ours, theirs, strict=True):
        assert ids == other_ids and torch.equal(rows, other_rows)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request):
    return request.param, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if (
        request.param == "qwen2") else {}


# Those that the quick tests leave out differ in the kernels alone, which have tests of their own.
@pytest.fixture(scope="module", params=[
    pytest.param(quant, marks=[] if quant in ("bf16", "q4_1", "q8_0") else pytest.mark.slow) for quant in QUANTS])
def path(request, family, tmp_path_factory):
    name, overrides = family
    return tiny.write_gguf(tmp_path_factory.mktemp(name) / "tiny.gguf", name, quant=request.param, **overrides)


def test_logits_are_near_those_of_the_reference(path, native_ops):
    """Quantized weights meet activations of 8 bits: a hundredth of the logits' spread; others only round."""
    ids = PROMPTS[-1]
    exact = Engine(load(path, torch.float64), EngineConfig(num_pages=16)).logits(ids)
    model = load(path, None, native_ops)
    ours = Engine(model, EngineConfig(num_pages=16, cache_dtype=torch.float32)).logits(ids)
    quantized = model.token_embd.weight.nbytes < 2 * model.token_embd.num_weights
    error = (ours - exact).std() / exact.std()
    assert error < (0.03 if quantized else 1e-5)


GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("config", [
    {}, {"max_step_tokens": 1}, {"max_step_tokens": 7}, {"page_size": 32}, {"max_requests": 2}, {"prefix_cache": False},
], ids=str)
def test_company_changes_no_bit(path, native_ops, config):
    model = load(path, None, native_ops)
    alone = [answers(model, [prompt], GREEDY, prefix_cache=False)[0] for prompt in PROMPTS]
    assert_same_bits(answers(model, PROMPTS, GREEDY, **config), alone)


def test_preemption_changes_no_id(path, native_ops):
    model = load(path, None, native_ops)
    alone = [answers(model, [prompt], GREEDY, prefix_cache=False)[0][0] for prompt in PROMPTS]
    engine = Engine(model, EngineConfig(num_pages=17, page_size=8, max_step_tokens=50))
    long = SamplingParams(max_tokens=6, ignore_eos=True)
    assert [completion.token_ids for completion in engine.generate(PROMPTS, long)] == alone
    assert engine.cache.num_available_full == 17


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_large_chunks_in_bfloat16_touch_no_others(path, native_ops, kernel):
    """A prompt of 100 tokens is rounded, those of 63 and less and all decoding are not; what shares its step is not."""
    model = load(path, None, native_ops) if kernel == "native" else load(path, torch.float32)
    long = [(5 * j + 1) % 256 for j in range(100)]
    exact = answers(model, [*PROMPTS, long], GREEDY, max_step_tokens=512)
    mixed = answers(model, [*PROMPTS, long], GREEDY, max_step_tokens=512, prefill="bfloat16")
    large = [i for i, prompt in enumerate([*PROMPTS, long]) if len(prompt) >= 64]
    assert large
    for i, (one, other) in enumerate(zip(exact, mixed)):
        if i not in large:
            assert one[0] == other[0] and (kernel == "torch" or torch.equal(one[1], other[1]))
    rounded = Engine(model, EngineConfig(num_pages=16, prefill="bfloat16")).logits(long)
    ours = Engine(model, EngineConfig(num_pages=16)).logits(long)
    assert not torch.equal(rounded, ours) or kernel == "native"  # in float32 where the CPU has no AMX
    assert (rounded - ours).std() / ours.std() < 0.05
    configs = [EngineConfig(num_pages=16, prefill=name) for name in ("exact", "bfloat16")]
    assert torch.equal(*(Engine(model, config).logits(long[:63]) for config in configs))


@pytest.mark.parametrize("quant", ["f32", "q8_0"])
def test_an_int8_cache_keeps_the_bits_too_and_is_near_the_reference(quant, family, tmp_path, native_ops):
    """Of prompts that share pages as well: one reads another's from the cache."""
    name, overrides = family
    path = tiny.write_gguf(tmp_path / "tiny.gguf", name, quant=quant, **overrides)
    model, prompts = load(path, None, native_ops), [*PROMPTS, PROMPTS[-1], PROMPTS[-1][:50]]
    alone = [answers(model, [prompt], GREEDY, prefix_cache=False, cache_dtype=torch.int8)[0] for prompt in prompts]
    for config in ({}, {"max_step_tokens": 1}, {"max_step_tokens": 7}, {"page_size": 32}, {"max_requests": 2}):
        assert_same_bits(answers(model, prompts, GREEDY, cache_dtype=torch.int8, **config), alone)
    config = EngineConfig(num_pages=16, cache_dtype=torch.int8)
    exact = Engine(load(path, torch.float64), EngineConfig(num_pages=16)).logits(PROMPTS[-1])
    for model, bound in ((load(path, torch.float32), 0.01), (model, 0.03 if quant == "q8_0" else 0.01)):
        assert (Engine(model, config).logits(PROMPTS[-1]) - exact).std() / exact.std() < bound


@pytest.mark.models
@pytest.mark.slow
def test_smollm2_has_the_same_bits_alone_among_32_in_chunks_and_after_a_hit(smollm2, native_ops):
    model = load(smollm2, None, native_ops, context=512)
    reference = json.loads((Path(__file__).parent / "data/references_smollm2.json").read_text())
    prompts = [prompt["prompt_ids"][:60] for prompt in reference["prompts"].values()]
    prompts = [prompt[i:] for i in range(9) for prompt in prompts if len(prompt) > i][:32]
    config = {"num_pages": 256, "page_size": 16}
    alone = [answers(model, [prompt], GREEDY, **config)[0] for prompt in prompts]
    assert_same_bits(answers(model, prompts, GREEDY, **config), alone)
    assert_same_bits(answers(model, prompts[:8], GREEDY, max_step_tokens=7, **config), alone[:8])
    twice = answers(model, [*prompts[:8], *prompts[:8]], GREEDY, **config)
    assert_same_bits(twice[8:], alone[:8])


@pytest.mark.models
@pytest.mark.slow
def test_perplexity_of_quantized_weights(smollm2, native_ops):
    """float32 has 18.4529 on this text, llama.cpp 18.5190."""
    ids = json.loads((Path(__file__).parent / "data/text30k.llamacpp.ids.json").read_text())
    engine = Engine(load(smollm2, None, native_ops, context=512), EngineConfig(num_pages=64))
    assert bench.perplexity(engine, ids).ppl == pytest.approx(18.4529, rel=0.005)


@pytest.mark.models
@pytest.mark.slow
def test_perplexity_with_an_int8_cache(smollm2, native_ops):
    """Within half a percent of that with a bfloat16 cache, 18.5326."""
    ids = json.loads((Path(__file__).parent / "data/text30k.llamacpp.ids.json").read_text())
    model = load(smollm2, None, native_ops, context=512)
    engine = Engine(model, EngineConfig(num_pages=64, cache_dtype=torch.int8))
    assert bench.perplexity(engine, ids).ppl == pytest.approx(18.5326, rel=0.005)


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8_0"])
def test_first_outputs_have_the_bits_they_have_among_all(tmp_path, native_ops, quant):
    path = tiny.write_gguf(tmp_path / "m.gguf", quant=quant)
    model = load(path, None if quant == "q8_0" else torch.float32 if quant == "f32" else torch.bfloat16, native_ops)
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.output.first(48)(x_TD), model.output(x_TD)[:, :48])
    for num in (0, 8, 336):
        with pytest.raises(ValueError, match="multiple of 16"):
            model.output.first(num)
