"""Tiny draft heads for tiny models, in the published layouts; every parameter is random, as in tiny.py.

    write_eagle(folder, config, version, seed=0, bias=True, tensors=None, **settings) -> Path      version 1 or 3
    write_medusa(folder, config, num_heads=3, num_blocks=1, seed=0, prefix="medusa_head.", tensors=None) -> Path
    mtp_tensors(config, seed=0) -> dict         of a model with num_nextn_predict_layers, beside tiny.tiny_tensors
`config` is the model's, as tiny.tiny_config makes it. tensors=None: random ones of eagle_tensors, medusa_tensors.
"""
from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import head_dim, write_json


def randoms(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """float32: norms around 1, matrices that keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = name.endswith(("norm.weight", "layernorm.weight"))
        tensors[name] = 1 + 0.1 * noise if is_norm else noise / math.sqrt(shape[-1]) if len(shape) == 2 else 0.2 * noise
    return tensors


def layer_shapes(config: dict, name: str, width: int) -> dict[str, tuple[int, ...]]:
    D, F, A = config["hidden_size"], config["intermediate_size"], head_dim(config)
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (H * A, width), "self_attn.k_proj": (G * A, width),
              "self_attn.v_proj": (G * A, width), "self_attn.o_proj": (D, H * A), "mlp.gate_proj": (F, D),
              "mlp.up_proj": (F, D), "mlp.down_proj": (D, F), "post_attention_layernorm": (D,)}
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def eagle_tensors(config: dict, version: int, seed: int = 0, bias: bool = True,
                  draft_vocab: int | None = None) -> dict[str, torch.Tensor]:
    D, V = config["hidden_size"], config["vocab_size"]
    if version == 1:
        shapes = {"fc.weight": (D, 2 * D)} | layer_shapes(config, "layers.0", D)
        tensors = randoms(shapes | ({"fc.bias": (D,)} if bias else {}), seed)
        return tensors | {"embed_tokens.weight": torch.zeros(V, D)}  # the model's is to be used
    shapes = {"fc.weight": (D, 3 * D), "midlayer.input_layernorm.weight": (D,), "midlayer.hidden_norm.weight": (D,),
              "norm.weight": (D,), "lm_head.weight": (draft_vocab or V, D)} | layer_shapes(config, "midlayer", 2 * D)
    tensors = randoms(shapes, seed)
    if draft_vocab:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_eagle(folder, config: dict, version: int, seed: int = 0, bias: bool = True, draft_vocab: int | None = None,
                tensors: dict | None = None, **settings) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or eagle_tensors(config, version, seed, bias, draft_vocab), folder / "model.safetensors")
    ours = {key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
                                         "num_key_value_heads", "rms_norm_eps", "rope_theta")}
    ours |= {"head_dim": head_dim(config), "model_type": "llama", "num_hidden_layers": 1, "torch_dtype": "float32"}
    write_json(folder / "config.json", ours | ({"draft_vocab_size": draft_vocab} if draft_vocab else {}) | settings)
    return folder


def medusa_tensors(config: dict, num_heads: int = 3, num_blocks: int = 1, seed: int = 0,
                   prefix: str = "medusa_head.") -> dict[str, torch.Tensor]:
    D, V, shapes = config["hidden_size"], config["vocab_size"], {}
    for i in range(num_heads):
        for j in range(num_blocks):
            shapes |= {f"{prefix}{i}.{j}.linear.weight": (D, D), f"{prefix}{i}.{j}.linear.bias": (D,)}
        shapes[f"{prefix}{i}.{num_blocks}.weight"] = (V, D)
    return randoms(shapes, seed)


def write_medusa(folder, config: dict, num_heads: int = 3, num_blocks: int = 1, seed: int = 0,
                 prefix: str = "medusa_head.", tensors: dict | None = None) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or medusa_tensors(config, num_heads, num_blocks, seed, prefix),
              folder / "medusa_lm_head.safetensors")
    write_json(folder / "config.json", {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks})
    return folder


def mtp_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    D, V, N = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    name = f"model.layers.{N}"
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
    shapes = {f"{name}.{norm}.weight": (D,) for norm in norms}
    tensors = randoms({f"{name}.eh_proj.weight": (D, 2 * D)} | shapes | layer_shapes(config, name, D), seed + 100)
    return tensors | {f"{name}.embed_tokens.weight": torch.zeros(V, D),
                      f"{name}.shared_head.head.weight": torch.zeros(V, D)}  # the model's are to be used
