"""families.py against transformers' config classes; and every setting that has to be refused."""
from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

import tiny
from families import Fields, LayerConfig, RopeConfig, configure
from model import rope_tables


def config_of(family: str = "llama", **overrides):
    return configure(Fields("config.json", tiny.tiny_config(family, **overrides)))


def wrong(family: str = "llama", *words: str, **overrides) -> None:
    with pytest.raises(ValueError) as caught:
        config_of(family, **overrides)
    assert all(word in str(caught.value) for word in ("config.json", *words)), caught.value


def transformers_config(family: str, values: dict):
    import transformers
    return getattr(transformers, {"llama": "LlamaConfig", "qwen2": "Qwen2Config"}[family])(**values)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_defaults_are_those_of_transformers(family):
    """Settings that a config leaves out, or gives as null."""
    values = {key: tiny.BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                              "num_attention_heads")} | {"model_type": family}
    theirs = transformers_config(family, {**values, "num_key_value_heads": None})
    for partial in (values, values | dict.fromkeys(("num_key_value_heads", "head_dim", "rope_scaling", "rope_theta",
                                                  "rms_norm_eps", "tie_word_embeddings", "hidden_act", "layer_types",
                                                  "eos_token_id", "bos_token_id", "sliding_window"))):
        ours = configure(Fields("config.json", partial))
        assert ours.norm_eps == theirs.rms_norm_eps and ours.tied == theirs.tie_word_embeddings
        assert ours.context == ours.max_context == theirs.max_position_embeddings
        assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"], dim=16)
        assert (ours.kv_heads, ours.head_dim, ours.eos_ids) == (theirs.num_key_value_heads, 16, ())


ROPES = {
    "linear": {"type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all set": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5,
                      "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False, "partial_rotary_factor": 0.5},
    "yarn, zeros": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128, "beta_fast": 0,
                    "mscale": 0, "mscale_all_dim": 0.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2, 3.5] * 4,
                 "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("form", ["published", "transformers5"])
def test_rope_scaling(name, form):
    """Every kind, in both spellings, gives the numbers that transformers computes its frequencies from."""
    values = tiny.tiny_config(rope_scaling=dict(ROPES[name]), rope_theta=5000.0)
    theirs = transformers_config("llama", dict(values, rope_scaling=dict(ROPES[name]))).rope_parameters
    ours = configure(Fields("config.json", values if form == "published" else tiny.transformers5_form(values))).rope
    assert (ours.kind, ours.theta, ours.dim) == (theirs["rope_type"], 5000.0, 8 if "all" in name else 16)
    original = theirs.get("original_max_position_embeddings", 512)
    assert ours.original_context == original
    assert ours.factor == (theirs.get("factor") or 512 / original)
    assert ours.attention_factor == theirs.get("attention_factor")
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"):
        default = getattr(RopeConfig(1.0, 2), key)
        assert getattr(ours, key) == (theirs.get(key) or default)
    assert ours.truncate == theirs.get("truncate", True)
    assert list(ours.short_factor) == theirs.get("short_factor", [])
    assert list(ours.long_factor) == theirs.get("long_factor", [])


def test_context_that_scaling_covers():
    assert [config_of(rope_scaling=ROPES[name]).max_context for name in ("linear", "dynamic", "llama3", "longrope")] \
        == [1024, 2048, 512, 512]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_of(rope_scaling=scaling).max_context == 2048
    assert config_of(rope_scaling=scaling, max_position_embeddings=2048).max_context == 2048


def test_original_context_beside_the_scaling():
    """Where a config names it at the top, that wins, as in transformers."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config_of(rope_scaling=scaling, original_max_position_embeddings=128).rope.original_context == 128


def test_rope_refused():
    wrong("llama", "'mrope'", "longrope", rope_scaling={"type": "mrope"})
    wrong("llama", "rope_scaling.factor", "missing", rope_scaling={"type": "linear"})
    wrong("llama", "rope_scaling.factor", "-2", rope_scaling={"type": "linear", "factor": -2})
    wrong("llama", "rope_scaling.factor", "'4'", rope_scaling={"type": "linear", "factor": "4"})
    wrong("llama", "rope_scaling.low_freq_factor", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    wrong("llama", "high_freq_factor", rope_scaling=ROPES["llama3"] | {"high_freq_factor": 1})
    wrong("llama", "long_factor", "list of 8", rope_scaling=ROPES["longrope"] | {"long_factor": [1.0] * 4})
    wrong("llama", "long_factor", "above 0", rope_scaling=ROPES["longrope"] | {"long_factor": [1.0, 0] * 4})
    wrong("llama", "rope_parameters", "all layers", rope_parameters={"full_attention": {"rope_type": "default"}})
    wrong("llama", "rope_theta", "nan", rope_theta=math.nan)
    wrong("llama", "rope_scaling", "[]", rope_scaling=[])
    wrong("llama", "rope scaling []", rope_scaling={"rope_type": []})
    wrong("llama", "15 of 15", "even", head_dim=15)
    wrong("llama", "32 of 16", partial_rotary_factor=2.0)


@pytest.mark.parametrize("scaling, words", [
    ({"rope_type": "longrope", "original_max_position_embeddings": 1}, ("rope_scaling.attention_factor", "missing")),
    ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125}, ("2 entries", "4 or more", "head_dim")),
    ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, ("rope_scaling.rope_theta", "1.0", "2 or more")),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, ("beta_fast 1.0", "beta_slow 2.0")),
    ({"rope_type": "yarn", "factor": 1e29}, ("rope_scaling.factor", "1e+29", "4.1943e+06", "2147483648")),
    ({"rope_type": "dynamic", "factor": 1e29}, ("rope_scaling.factor", "1e+29", "4.1943e+06")),
    ({"rope_type": "linear", "factor": 1e-40}, ("rope_scaling.factor", "1e-40", "1e-30")),
], ids=lambda value: value.get("rope_type") if isinstance(value, dict) else "")
def test_rope_settings_whose_formula_has_no_value(scaling, words):
    """A division by zero, a logarithm of 1, or numbers beyond any context."""
    lists = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8} if scaling["rope_type"] == "longrope" else {}
    wrong("llama", *words, rope_scaling=scaling | lists)


@given(st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"]), st.data())
def test_rope_tables_are_finite_or_the_settings_are_refused(kind, data):
    """Whatever positive numbers stand there, short of attention_factor's product with them."""
    number = st.sampled_from([1e-300, 1e-30, 1e-29, 1e-5, 0.5, 1, 1 + 2**-52, 2, 3.0, 8, 1e4, 1e15, 9e29, 1e300])
    keys = ("factor", "rope_theta", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor",
            "high_freq_factor", "partial_rotary_factor", "attention_factor")
    scaling = data.draw(st.fixed_dictionaries({"rope_type": st.just(kind)}, optional=dict.fromkeys(keys, number)))
    if context := data.draw(st.sampled_from([None, 1, 2, 7, 512, 2**31])):
        scaling["original_max_position_embeddings"] = context
    dim = data.draw(st.sampled_from([2, 4, 16]))
    if kind == "longrope":
        scaling |= {name: data.draw(st.lists(number, min_size=dim // 2, max_size=dim // 2))
                    for name in ("short_factor", "long_factor")}
    try:
        config = config_of(rope_scaling=scaling, head_dim=dim, max_position_embeddings=data.draw(
            st.sampled_from([1, 2, 512, 2**31])))
    except ValueError as error:
        assert "config.json" in str(error) and "\n" not in str(error)
        return
    for context in (1, config.context, config.max_context):
        inv_freq, scale = rope_tables(config.rope, config.context, context)
        assert inv_freq.isfinite().all() and math.isfinite(scale) and scale > 0


def test_head_sizes():
    assert config_of(hidden_size=40, num_attention_heads=6, head_dim=16).head_dim == 16
    wrong("llama", "hidden_size", "40", "6 heads", hidden_size=40, num_attention_heads=6, head_dim=None)
    wrong("llama", "num_key_value_heads", "divide the 4 heads", num_key_value_heads=3)
    wrong("llama", "num_key_value_heads", "divide", num_key_value_heads=8)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                "max_position_embeddings", "num_key_value_heads", "head_dim"):
        for value in (0, -1, 2.5, "8", True, 2**40):
            wrong("llama", f"'{key}'", repr(value), **{key: value})


@pytest.mark.parametrize("changes", [
    {}, {"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, {"max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}])
def test_qwen2_windows(changes):
    """Layer by layer as transformers has it; a switched-off or null window never counts."""
    values = tiny.tiny_config("qwen2", **changes)
    theirs = transformers_config("qwen2", dict(values))
    want = [LayerConfig("window", theirs.sliding_window) if kind == "sliding_attention" else LayerConfig("full")
            for kind in theirs.layer_types]
    assert list(configure(Fields("config.json", values)).layers) == want


def test_qwen2_windows_refused():
    wrong("qwen2", "sliding_window", "0", use_sliding_window=True, sliding_window=0)
    wrong("qwen2", "layer_types", "list of 2", layer_types=["full_attention"])
    wrong("qwen2", "layer_types", "'linear_attention'", layer_types=["full_attention", "linear_attention"])
    wrong("qwen2", "use_sliding_window", "true or false", use_sliding_window="no")


def test_biases():
    def biases(config):
        return config.qkv_bias, config.o_bias, config.mlp_bias
    assert biases(config_of("llama")) == (False, False, False)
    assert biases(config_of("llama", attention_bias=True)) == (True, True, False)
    assert biases(config_of("llama", mlp_bias=True)) == (False, False, True)
    assert biases(config_of("qwen2")) == (True, False, False)


def test_dtype_under_either_key():
    assert config_of(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert config_of(torch_dtype=None, dtype="float16").dtype == "float16"


def test_unsupported_settings():
    wrong("llama", "'gpt_neox'", "llama, qwen2", model_type="gpt_neox")
    wrong("llama", "hidden_act", "'gelu'", "silu", hidden_act="gelu")
