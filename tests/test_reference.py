"""The same answers as transformers: of real models from stored references, of tiny random ones in every variant live.

The stored answers were made once by make_references.py, on weights that the gguf package dequantized.
"""

import gc
import json
import os
import random
from pathlib import Path

import pytest
import torch
import transformers

import bench
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from model import load_model
from sampling import SamplingParams
from tiny import write_safetensors

DATA = Path(__file__).parent / "data"
REAL_LOGITS = 1e-3   # float32, sums of up to 8960 products over 28 layers
TINY_LOGITS = 1e-4


def load(path, dtype=torch.float32, context=None, **config) -> Engine:
    with open_checkpoint(path) as checkpoint:
        return Engine(load_model(checkpoint, dtype, context=context), EngineConfig(num_pages=64, **config))


def reference(name: str) -> dict:
    return json.loads((DATA / f"references_{name}.json").read_text())


def assert_same_top5(ours: list[dict], theirs: list) -> None:
    """Step by step equal log-probabilities, and equal ids where the one below is further off than rounding."""
    assert len(ours) == len(theirs)
    for step, (entry, known) in enumerate(zip(ours, theirs)):
        for i, (top, (id, logprob)) in enumerate(zip(entry["top"], known, strict=True)):
            assert top["logprob"] == pytest.approx(logprob, abs=REAL_LOGITS), f"step {step}, rank {i}"
            neighbours = known[max(i - 1, 0) : i] + known[i + 1 : i + 2]
            if i < 4 and all(abs(logprob - other) > 2 * REAL_LOGITS for _, other in neighbours):
                assert top["id"] == id, f"step {step}, rank {i}"


# ---- real models -----------------------------------------------------------------------------------------------------


ALL_TOKENS = 64  # of the stored answers
LARGE_TOKENS = int(os.environ.get("LARGE_TOKENS", 16))  # of these, what the larger models write; all in `make soak`


# Two families; the largest, of the second one too, takes minutes.
MODELS = [pytest.param(("smollm2", "smollm2", ALL_TOKENS), id="smollm2"),
          pytest.param(("qwen0.5b", "qwen_05b", LARGE_TOKENS), id="qwen0.5b"),
          pytest.param(("qwen1.5b", "qwen_15b", LARGE_TOKENS), id="qwen1.5b", marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=MODELS)
def answered(request):
    """An engine in float32, its model's reference, and its own answers to the prompts, all in the engine at once."""
    name, fixture, num_tokens = request.param
    known = reference(name)
    engine = load(request.getfixturevalue(fixture), context=2048)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=5)
    completions = engine.generate([prompt["prompt_ids"] for prompt in known["prompts"].values()], params)
    yield engine, known, dict(zip(known["prompts"], completions))
    del engine, completions
    gc.collect()   # before the next model is loaded: the largest takes 7 GB


@pytest.mark.models
@pytest.mark.slow
def test_greedy_ids(answered):
    _, known, completions = answered
    for name, prompt in known["prompts"].items():
        ours = completions[name].token_ids
        assert len(ours) in (ALL_TOKENS, LARGE_TOKENS) and ours == prompt["ids"][: len(ours)], name


@pytest.mark.models
@pytest.mark.slow
def test_top5(answered):
    _, known, completions = answered
    for name, prompt in known["prompts"].items():
        ours = completions[name].logprobs
        assert_same_top5(ours, prompt["top5"][: len(ours)])


@pytest.mark.models
@pytest.mark.slow
def test_logits(answered):
    """In one pass over prompt and answer; the answers above came by chunks and decode steps among other requests."""
    engine, known, _ = answered
    for name, prompt in known["prompts"].items():
        rows = engine.logits(prompt["prompt_ids"] + prompt["ids"][:-1], first=len(prompt["prompt_ids"]) - 1)
        ours = rows[[0, -1]][:, known["logit_ids"]]
        theirs = torch.tensor([prompt["logits_after_prompt"], prompt["logits_last"]])
        assert (ours - theirs).abs().max() < REAL_LOGITS, name


@pytest.mark.models
@pytest.mark.slow
def test_an_older_run_of_transformers_agrees(smollm2):
    """references_hf.json was made with transformers' own reader of GGUF files."""
    known = reference("hf")
    engine = load(smollm2, context=512)
    params = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=5)
    completions = engine.generate([prompt["prompt_ids"] for prompt in known.values()], params)
    for completion, prompt in zip(completions, known.values()):
        assert completion.token_ids == prompt["ids"]
        assert_same_top5(completion.logprobs, prompt["top5"])


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 0.001), pytest.param(torch.bfloat16, 0.003, marks=pytest.mark.soak)])  # minutes on most CPUs
def test_perplexity(smollm2, dtype, tolerance):
    ids = json.loads((DATA / "text30k.llamacpp.ids.json").read_text())
    result = bench.perplexity(load(smollm2, dtype, context=512), ids)
    assert (result.windows, result.scored) == (12, 3060)
    assert result.ppl == pytest.approx(reference("smollm2")["perplexity"], rel=tolerance)


@pytest.mark.models
@pytest.mark.slow
def test_company_changes_no_token(smollm2):
    """Classes, chunks, shared prefixes, hits and preemption, greedy and sampled, against each request alone."""
    rng = random.Random(4)
    prefix = [rng.randrange(49152) for _ in range(70)]
    prompts = [prefix + [rng.randrange(49152) for _ in range(n)] for n in (3, 20, 9)] + [prefix[:5], prefix[40:]]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=i, temperature=i % 2) for i in range(5)]
    model = load(smollm2, torch.float64, context=256).model
    alone = [Engine(model, EngineConfig(num_pages=16, page_size=16, prefix_cache=False)).generate([prompt], each)
             for prompt, each in zip(prompts, params)]
    engine = Engine(model, EngineConfig(num_pages=9, page_size=16, max_step_tokens=17))
    together = [engine.submit(prompt, each, class_name=name)
                for prompt, each, name in zip(prompts, params, ("batch", "long", "interactive", "batch", "long"))]
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in together] == [completion.token_ids for completion, in alone]
    assert engine.stats.cached_tokens and engine.stats.preemptions


# ---- tiny models -----------------------------------------------------------------------------------------------------

SHORT, LONG = 40, 150   # tokens, below and beyond the original context of 64
SCALED = {"max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}

CASES = {   # name: (family, tokens and context, config)
    "llama": ("llama", LONG, {}),
    "llama-head-dim": ("llama", SHORT, {"head_dim": 24}),
    "llama-biases": ("llama", SHORT, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", SHORT, {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", SHORT, {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("llama", SHORT, {"num_key_value_heads": 4}),
    "llama-theta": ("llama", LONG, {"rope_theta": 500000.0, "rms_norm_eps": 1e-3}),
    "linear": ("llama", LONG, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic-short": ("llama", SHORT, {"max_position_embeddings": 64,
                                       "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "dynamic-long": ("llama", LONG, {"max_position_embeddings": 64,
                                     "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama3": ("llama", LONG, SCALED | {"rope_scaling": LLAMA3}),
    "yarn": ("llama", LONG, SCALED | {"rope_scaling": YARN}),
    "yarn-attention-factor": ("llama", LONG, SCALED | {"rope_scaling": YARN | {"attention_factor": 0.8}}),
    "yarn-betas": ("llama", LONG, SCALED | {"rope_scaling": YARN | {"beta_fast": 8.0, "beta_slow": 2.0,
                                                                    "truncate": False}}),
    "yarn-mscale": ("llama", LONG, SCALED | {"rope_scaling": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}}),
    "longrope-short": ("llama", SHORT, SCALED | {"rope_scaling": LONGROPE}),
    "longrope-long": ("llama", LONG, SCALED | {"rope_scaling": LONGROPE}),
    "longrope-attention-factor": ("llama", LONG, SCALED | {"rope_scaling": LONGROPE | {"attention_factor": 1.3}}),
    "qwen2": ("qwen2", LONG, {}),
    "qwen2-tied": ("qwen2", SHORT, {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", LONG, SCALED | {"rope_scaling": YARN}),
    "qwen2-window": ("qwen2", LONG, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2-all-window": ("qwen2", LONG, {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 0}),
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def tiny(request, tmp_path_factory):
    """A random model's folder, its context, as many ids, and transformers' logits after each of them.

    The ids fill the context, because transformers chooses length-dependent rope factors by the length it sees.
    """
    family, context, overrides = CASES[request.param]
    folder = write_safetensors(tmp_path_factory.mktemp("tiny"), family, seed=5, **overrides)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                               attn_implementation="eager")
    ids = torch.randint(0, 256, (context,), generator=torch.Generator().manual_seed(6)).tolist()
    return folder, context, ids, logits_of(theirs, ids), theirs


@torch.inference_mode()
def logits_of(theirs, ids: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([ids])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 1, 3, 7])
def test_tiny_logits_in_chunks(tiny, chunk):
    folder, context, ids, theirs, _ = tiny
    ours = load(folder, context=context, max_step_tokens=chunk).logits(ids)
    assert (ours - theirs).abs().max() < TINY_LOGITS


@pytest.mark.slow
def test_tiny_decode(tiny):
    """Drawn token by token, among others: each is transformers' first choice, with its log-probability."""
    folder, context, ids, _, theirs = tiny
    engine = load(folder, context=context, max_step_tokens=29)
    answer = context - 24   # where the longest of the answers begins
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    requests = [engine.submit(prompt, params) for prompt in (ids[:5], ids[:answer], ids[3:11])]
    while engine.has_work:
        engine.step()
    tokens = requests[1].tokens
    logprobs_LV = logits_of(theirs, tokens).log_softmax(-1)[answer - 1 : -1]
    assert len(tokens) == context
    assert logprobs_LV.argmax(-1).tolist() == tokens[answer:]
    ours = torch.tensor([entry["logprob"] for entry in requests[1].logprobs])
    assert (ours - logprobs_LV.amax(-1)).abs().max() < TINY_LOGITS


@pytest.mark.parametrize("family, overrides", [
    ("llama", SCALED | {"rope_scaling": LLAMA3}),
    ("llama", SCALED | {"rope_scaling": LONGROPE}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
])
@pytest.mark.slow
def test_a_folder_that_transformers_saved(tmp_path, family, overrides):
    """Its own form of the config: `rope_parameters`, `dtype`, `layer_types`."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        write_safetensors(tmp_path / "published", family, **overrides), dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "saved")
    ids = list(range(100))
    ours = load(tmp_path / "saved", context=100).logits(ids)
    assert (ours - logits_of(theirs, ids)).abs().max() < TINY_LOGITS
