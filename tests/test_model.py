"""model.py: rotary tables against published numbers, containers against each other, and what must be refused.

That the forward pass computes what transformers computes is in test_reference.py.
"""

import math
from dataclasses import replace

import pytest
import torch

import tiny
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from families import RopeConfig
from model import load_model, rope_tables
from sampling import SamplingParams

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
LLAMA3 = RopeConfig(theta=10000, dim=16, kind="llama3", factor=8, original_context=64, low_freq_factor=1,
                    high_freq_factor=4)


def logits_of(path, dtype=torch.float64, tokens=TOKENS, context=None):
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, dtype, context=context)
    return Engine(model, EngineConfig(num_pages=16)).logits(tokens)


# ---- rotary tables


def test_llama3_frequencies():
    inv_freq, scale = rope_tables(LLAMA3, 512, 512)
    published = [1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.00039528, 0.000125, 0.0000395]
    assert inv_freq.tolist() == pytest.approx(published, rel=1e-3) and scale == 1


def test_yarn_magnitude():
    yarn = RopeConfig(theta=10000, dim=16, kind="yarn", factor=4, original_context=64)
    assert rope_tables(yarn, 256, 256)[1] == pytest.approx(1.13863, abs=1e-5)
    assert rope_tables(replace(yarn, attention_factor=0.5), 256, 256)[1] == 0.5
    assert rope_tables(replace(yarn, mscale=1.0, mscale_all_dim=1.0), 256, 256)[1] == 1
    assert rope_tables(replace(yarn, mscale=0.707, mscale_all_dim=0.0), 256, 256)[1] == pytest.approx(1.13863, abs=1e-5)


def test_factors_that_depend_on_length_are_chosen_from_the_context():
    plain, _ = rope_tables(RopeConfig(10000, 8, "default"), 64, 64)
    dynamic = RopeConfig(10000, 8, "dynamic", factor=2)
    assert torch.equal(rope_tables(dynamic, 64, 64)[0], plain)
    assert torch.equal(rope_tables(dynamic, 64, 10)[0], plain)
    stretched = 10000 * (2 * 128 / 64 - 1) ** (8 / 6)
    assert rope_tables(dynamic, 64, 128)[0].tolist() == pytest.approx([stretched ** (-i / 4) for i in range(4)])
    longrope = RopeConfig(10000, 8, "longrope", factor=4, original_context=32, short_factor=(1, 1, 1, 1),
                          long_factor=(1, 2, 4, 8))
    assert torch.equal(rope_tables(longrope, 128, 32)[0], plain)
    long, scale = rope_tables(longrope, 128, 33)
    assert torch.allclose(long, plain / torch.tensor([1, 2, 4, 8]))
    assert scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    assert torch.equal(rope_tables(RopeConfig(10000, 8, "linear", factor=4), 64, 64)[0], plain / 4)


# ---- the same model in other containers


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("quant", ["f32", "f16"])
def test_gguf_equals_safetensors(tmp_path, family, quant):
    dtype = {"f32": "float32", "f16": "float16"}[quant]
    # norms and biases stay float32 in a GGUF: round them too, so that both hold the same numbers
    tensors = {name: t.to(getattr(torch, dtype)).float()
               for name, t in tiny.tiny_tensors(tiny.tiny_config(family)).items()}
    folder = tiny.write_safetensors(tmp_path / "folder", family, dtype=dtype, tensors=tensors)
    file = tiny.write_gguf(tmp_path / "file.gguf", family, quant=quant, tensors=tensors)
    assert torch.equal(logits_of(folder), logits_of(file))


def test_llama3_scaling_in_a_gguf_equals_the_config(tmp_path):
    scaling = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 16}}
    folder = tiny.write_safetensors(tmp_path / "folder", **scaling)
    file = tiny.write_gguf(tmp_path / "file.gguf", **scaling)
    tokens = TOKENS * 20  # the difference grows with the position
    assert torch.allclose(logits_of(folder, tokens=tokens), logits_of(file, tokens=tokens), atol=1e-5)
    plain = logits_of(tiny.write_safetensors(tmp_path / "plain"), tokens=tokens)
    assert not torch.allclose(logits_of(folder, tokens=tokens), plain, atol=1e-2)


@pytest.mark.parametrize("version", [0, 1])
def test_llama2c_equals_safetensors(tmp_path, version):
    # llama2.c's format has no key for the theta of rope nor for eps: both are fixed
    folder = tiny.write_safetensors(tmp_path / "folder", rms_norm_eps=1e-5, rope_theta=10000.0)
    file = tiny.write_llama2c(tmp_path / "file.bin", version)
    assert torch.allclose(logits_of(folder), logits_of(file), atol=1e-12)


def test_both_forms_of_config_and_any_sharding(tmp_path):
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    expected = logits_of(tiny.write_safetensors(tmp_path / "a", **scaling))
    for i, options in enumerate(({"form": "transformers5"}, {"shards": 3})):
        assert torch.equal(logits_of(tiny.write_safetensors(tmp_path / str(i), **scaling, **options)), expected)


def test_tied_and_untied_heads(tmp_path):
    tied = tiny.write_safetensors(tmp_path / "tied", tie_word_embeddings=True)
    tensors = tiny.tiny_tensors(tiny.tiny_config(tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    untied = tiny.write_safetensors(tmp_path / "untied", tensors=tensors)
    assert torch.equal(logits_of(tied), logits_of(untied))
    gguf = tiny.write_gguf(tmp_path / "tied.gguf", tie_word_embeddings=True)
    assert torch.equal(logits_of(gguf), logits_of(tied))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 16), (4, 1, 20), (7, 7, 8), (2, 1, 40)])
def test_head_widths_that_do_not_divide_the_model(tmp_path, heads, kv_heads, head_dim):
    """Chunked and paged against one pass; that the width is the right one is test_reference.py's."""
    folder = tiny.tiny_llama(tmp_path, hidden_size=40, num_attention_heads=heads, num_key_value_heads=kv_heads,
                             head_dim=head_dim)
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, torch.float64)
    chunked = Engine(model, EngineConfig(num_pages=16, page_size=8, max_step_tokens=3)).logits(TOKENS)
    assert torch.allclose(chunked, logits_of(folder), atol=1e-12)


# ---- refusals


@pytest.mark.parametrize("context", [0, 513, -1])
def test_a_context_the_model_does_not_cover(tmp_path, context):
    folder = tiny.write_safetensors(tmp_path)
    with open_checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=f"{context} .* 512"):
        load_model(checkpoint, torch.float32, context=context)


def test_a_scaling_covers_a_longer_context(tmp_path):
    folder = tiny.write_safetensors(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with open_checkpoint(folder) as checkpoint:
        assert load_model(checkpoint, torch.float32, context=1024).context == 1024


def test_every_missing_tensor_is_named(tmp_path):
    tensors = tiny.tiny_tensors(tiny.tiny_config())
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"], tensors["lm_head.weight"]
    folder = tiny.write_safetensors(tmp_path, tensors=tensors)
    with open_checkpoint(folder) as checkpoint, pytest.raises(ValueError) as error:
        load_model(checkpoint, torch.float32)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert name in str(error.value)


# ---- biases and divisors are the config's, not whatever a file holds


def notes_of(path):
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, torch.float64).notes


@pytest.mark.parametrize("sizes", [{"q": 64}, {"q": 64, "k": 32, "v": 32}, {"q": 3}], ids=["q", "qkv", "misshapen"])
def test_biases_that_the_config_does_not_name_are_left_out(tmp_path, sizes):
    """As transformers does; with a note."""
    extra = {f"model.layers.1.self_attn.{part}_proj.bias": torch.ones(size) for part, size in sizes.items()}
    folder = tiny.write_safetensors(tmp_path / "more", tensors=tiny.tiny_tensors(tiny.tiny_config()) | extra)
    assert torch.equal(logits_of(folder), logits_of(tiny.write_safetensors(tmp_path / "plain")))
    note, = notes_of(folder)
    assert "does not use" in note and all(name in note for name in extra)


@pytest.mark.parametrize("layer, name, size, missing", [
    (0, "self_attn.q_proj", 64, "attn_k"), (1, "self_attn.q_proj", 64, "attn_k"), (1, "self_attn.v_proj", 32, "attn_q"),
    (1, "mlp.gate_proj", 96, "ffn_up"), (0, "mlp.down_proj", 64, "ffn_gate")])
def test_a_gguf_with_some_of_its_biases_lacks_the_others(tmp_path, layer, name, size, missing):
    """It has no settings for biases: one in any layer means all of them."""
    extra = {f"model.layers.{layer}.{name}.bias": torch.ones(size)}
    path = tiny.write_gguf(tmp_path / "m.gguf", tensors=tiny.tiny_tensors(tiny.tiny_config()) | extra)
    with pytest.raises(ValueError, match=rf"blk\.0\.{missing}\.bias \(\d+,\) is missing"):
        logits_of(path)


@pytest.mark.parametrize("divisors, words", [
    (torch.ones(1), r"is \(1,\), not \(8,\)"), (torch.ones(7), r"\(7,\), not"), (torch.ones(8, 1), r"\(8, 1\), not"),
    (torch.tensor([1.0, 0] * 4), "holds 0.0"), (torch.full((8,), math.nan), "holds nan"),
    (-torch.ones(8), "holds -1.0"), (torch.full((8,), math.inf), "holds inf")])
def test_rope_divisors_that_do_not_fit(tmp_path, monkeypatch, divisors, words):
    monkeypatch.setitem(tiny.GGUF_TOP, "rope_freqs", "rope_freqs")
    tensors = tiny.tiny_tensors(tiny.tiny_config()) | {"rope_freqs.weight": divisors}
    with pytest.raises(ValueError, match=rf"rope_freqs\.weight .*{words}"):
        logits_of(tiny.write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_a_thousand_missing_layers_are_one_short_line(tmp_path):
    tensors = tiny.tiny_tensors(tiny.tiny_config())
    folder = tiny.write_safetensors(tmp_path, tensors=tensors, num_hidden_layers=1024)
    with pytest.raises(ValueError, match=r"9198 of 9219 .*layers\.2\..*; and 9193 more") as error:
        logits_of(folder)
    assert len(str(error.value)) < 1000


# ---- numbers that are not finite never become a token


def finish_reason(engine, tokens):
    return engine.generate([tokens], SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_an_error(tmp_path, dtype, bad):
    """Wherever it stands: torch's attention loses a NaN in queries and keys, softmax an infinity."""
    config = tiny.tiny_config("qwen2")
    for name in [name for name in tiny.shapes(config) if "embed" not in name]:
        tensors = tiny.tiny_tensors(config)
        tensors[name].view(-1)[5] = bad
        with open_checkpoint(tiny.write_safetensors(tmp_path, "qwen2", tensors=tensors)) as checkpoint:
            engine = Engine(load_model(checkpoint, dtype), EngineConfig(num_pages=16, page_size=8))
        for tokens in (TOKENS[:1], TOKENS[:3], TOKENS):
            assert finish_reason(engine, tokens) == "error", name


@pytest.mark.parametrize("width", [3, 512])
def test_a_prefix_is_not_spoiled_by_what_follows_it(tmp_path, width):
    """A NaN at the end of a prompt must not reach the pages before it, which other prompts find in the cache."""
    tensors = tiny.tiny_tensors(tiny.tiny_config())
    tensors["model.embed_tokens.weight"][200] = math.nan
    with open_checkpoint(tiny.write_safetensors(tmp_path, tensors=tensors)) as checkpoint:
        engine = Engine(load_model(checkpoint, torch.float32),
                        EngineConfig(num_pages=16, page_size=8, max_step_tokens=width))
    assert finish_reason(engine, [*TOKENS, 200]) == "error"
    assert finish_reason(engine, [*TOKENS, 7]) == "length" and engine.stats.cached_tokens >= 8
