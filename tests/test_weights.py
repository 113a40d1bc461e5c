"""Tensors by canonical name: twins in other containers agree bit for bit, and what is wrong with a file is said."""
import re

import gguf
import numpy as np
import pytest
import tiny
import torch

from checkpoint import open_checkpoint
from families import FAMILIES
from weights import PUBLISHED, Weights, half_split

NO_GQA = {"num_key_value_heads": 4}
ODD_HEADS = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def take_all(path, dtype=torch.float32) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        weights = Weights(checkpoint, dtype)
        return {name: weights.take(name) for name in weights.file_names}


def expected(family: str, **overrides) -> dict[str, torch.Tensor]:
    """What the checkpoint was written from, by canonical name."""
    config = tiny.tiny_config(family, **overrides)
    return {tiny.gguf_name(name): tensor for name, tensor in tiny.tiny_tensors(config).items()}


def assert_same(got: dict, want: dict):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def edited(family: str, change, **overrides) -> dict[str, torch.Tensor]:
    """Published tensors after `change` had its way with them."""
    tensors = tiny.tiny_tensors(tiny.tiny_config(family, **overrides))
    change(tensors)
    return tensors


# Names and layouts -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, overrides", [
    ("llama", {}), ("llama", NO_GQA), ("llama", ODD_HEADS), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}),
], ids=["gqa", "mha", "head_dim", "tied", "qwen2"])
def test_gguf_equals_safetensors_equals_source(tmp_path, family, overrides):
    want = expected(family, **overrides)
    assert_same(take_all(tiny.write_safetensors(tmp_path / "folder", family, **overrides)), want)
    assert_same(take_all(tiny.write_gguf(tmp_path / "twin.gguf", family, **overrides)), want)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_llama2c_equals_source(tmp_path, version, tied):
    path = tiny.write_llama2c(tmp_path / "twin.bin", version, tie_word_embeddings=tied)
    assert_same(take_all(path), expected("llama", tie_word_embeddings=tied))


def test_llama2c_int8_is_within_half_a_step(tmp_path):
    got, want = take_all(tiny.write_llama2c(tmp_path / "twin.bin", 2, group_size=16)), expected("llama")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor.dim() == 1:
            assert torch.equal(got[name], tensor)
        else:
            step = tensor.reshape(-1, 16).abs().amax(1, keepdim=True) / 127
            error = (got[name] - tensor).reshape(-1, 16).abs()
            assert (error <= 0.501 * step).all() and error.max() > 0


def test_sharded_equals_whole(tmp_path):
    whole = take_all(tiny.write_safetensors(tmp_path / "whole", "qwen2"))
    assert_same(take_all(tiny.write_safetensors(tmp_path / "sharded", "qwen2", shards=3)), whole)


@pytest.mark.parametrize("heads, rotated", [(1, 8), (2, 8), (3, 4)])
def test_half_split_commutes_with_rope(heads, rotated):
    """Turning the pairs (2i, 2i+1), then splitting, equals splitting, then turning the pairs (i, i + rotated/2)."""
    def turn(rows, first, second):
        x, y = rows[:, first], rows[:, second]
        rows = rows.clone()
        rows[:, first], rows[:, second] = x * cos - y * sin, x * sin + y * cos
        return rows

    half, width = rotated // 2, 8
    angles = torch.arange(1, half + 1, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    rows = torch.randn(heads, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = turn(rows, torch.arange(half) * 2, torch.arange(half) * 2 + 1)
    split = half_split(rows.flatten(), heads, rotated).view(heads, width)
    want = turn(split, torch.arange(half), torch.arange(half) + half)
    assert torch.equal(half_split(turned.flatten(), heads, rotated).view(heads, width), want)


def test_biases_of_q_and_k_move_with_their_rows():
    rows = torch.randn(32, 5)
    assert torch.equal(half_split(rows[:, 0].contiguous(), 4, 8), half_split(rows, 4, 8)[:, 0])


def test_every_family_has_names():
    assert PUBLISHED.keys() == FAMILIES.keys()


def test_quantized_values_are_rounded_once_and_frequencies_not_at_all(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    path = tiny.write_gguf(tmp_path / "q.gguf", quant="q8_0", rope_scaling=scaling)
    exact, rounded = take_all(path), take_all(path, torch.bfloat16)
    assert (exact["rope_freqs.weight"] != exact["rope_freqs.weight"].bfloat16()).any()
    assert torch.equal(rounded.pop("rope_freqs.weight"), exact.pop("rope_freqs.weight"))
    assert_same(rounded, {name: tensor.bfloat16() for name, tensor in exact.items()})


# What may be missing or left over ----------------------------------------------------------------------------------

def test_all_that_is_missing_or_misshapen_in_one_line(tmp_path):
    def damage(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 64)

    shapes = {name: tuple(tensor.shape) for name, tensor in expected("llama").items()}
    with open_checkpoint(tiny.write_safetensors(tmp_path, tensors=edited("llama", damage))) as checkpoint:
        with pytest.raises(ValueError) as error:
            Weights(checkpoint, torch.float32).require(shapes)
    message = str(error.value)
    assert "model.layers.1.mlp.up_proj.weight (96, 64) is missing" in message
    assert "model.norm.weight (64,) is missing" in message
    assert "model.layers.0.self_attn.k_proj.weight is (64, 64), not (32, 64)" in message
    assert f"3 of {len(shapes)} tensors" in message and "\n" not in message


def test_untied_without_head_names_the_head(tmp_path):
    tensors = edited("llama", lambda tensors: tensors.pop("lm_head.weight"))
    with open_checkpoint(tiny.write_safetensors(tmp_path, tensors=tensors)) as checkpoint:
        weights = Weights(checkpoint, torch.float32)
        assert not weights.has("output.weight")
        with pytest.raises(ValueError, match=r"lm_head\.weight \(320, 64\) is missing"):
            weights.require({"output.weight": (320, 64)})


def test_gguf_without_head_is_tied(tmp_path):
    with open_checkpoint(tiny.write_gguf(tmp_path / "tied.gguf", tie_word_embeddings=True)) as checkpoint:
        assert checkpoint.config.tied and not Weights(checkpoint, torch.float32).has("output.weight")


@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_uses_the_embedding(tmp_path, same):
    def add_head(tensors):
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if same else embedding + 1

    path = tiny.write_safetensors(tmp_path, tensors=edited("llama", add_head, tie_word_embeddings=True),
                                  tie_word_embeddings=True)
    with open_checkpoint(path) as checkpoint:
        weights = Weights(checkpoint, torch.float32)
        assert not weights.has("output.weight")
        for name in expected("llama", tie_word_embeddings=True):
            weights.take(name)
        assert [note.split(" from")[0] for note in weights.notes] == ([] if same else ["lm_head.weight differs"])


def test_unused_tensors_are_noted_and_old_buffers_are_not(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors |= {f"model.layers.1.adapter{i}.weight": torch.ones(8) for i in range(7)}
        tensors["a\33[2J\n"] = torch.ones(8)

    with open_checkpoint(tiny.write_safetensors(tmp_path, tensors=edited("llama", add))) as checkpoint:
        weights = Weights(checkpoint, torch.float32)
        for name in expected("llama"):
            weights.take(name)
        note, = weights.notes
        assert "does not use: a?[2J?, model.layers.1.adapter0.weight, " in note and note.endswith(", and 3 more")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_beyond_float16_are_refused(tmp_path, dtype):
    def grow(tensors):
        tensors["model.layers.1.input_layernorm.weight"][3] = 1e5

    path = tiny.write_safetensors(tmp_path, dtype=dtype, tensors=edited("llama", grow))
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm\.weight .*65504.*--dtype bfloat16 or float32"):
        take_all(path, torch.float16)
    assert take_all(path, torch.bfloat16)["blk.1.attn_norm.weight"][3] == torch.tensor(1e5).bfloat16()


# Real files --------------------------------------------------------------------------------------------------------

@pytest.mark.models
@pytest.mark.slow
def test_smollm2_equals_the_gguf_package(smollm2):
    """On bits, in every tenth layer; of Q and K, after moving the rows by the definition of llama.cpp's converter."""
    info = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    with open_checkpoint(smollm2) as checkpoint:
        weights = Weights(checkpoint, torch.float32)
        for name, tensor in info.items():
            layer = re.match(r"blk\.(\d+)", name)
            if layer and int(layer[1]) % 10:
                continue
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if heads := {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2]):
                want = want.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(want.shape)
            assert np.array_equal(weights.take(name).numpy().view(np.uint32), want.view(np.uint32)), name
