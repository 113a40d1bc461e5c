"""Tiny checkpoints on disk: random ones of each family, twins in other containers, and models that follow a script.

Whole model folders (weights, config, byte-level tokenizer, chat template):
    tiny_llama(folder, **overrides) -> Path             vocab 320, hidden 64, 2 layers, 4 heads, 2 kv heads
    tiny_qwen2(folder, **overrides) -> Path             the same with q/k/v biases
    scripted(folder, transition, eos_ids=()) -> Path    the next token's distribution is exactly what you say
    The tokenizer's ids: byte b is id b, then EOS = 256, IM_START = 257, IM_END = 258; 259..319 are padding.

Weights alone; every parameter is random (norms around 1, biases too), the same seed gives the same model everywhere:
    tiny_config(family="llama", **overrides) -> dict    config.json in the published form; a value None stays null
    tiny_tensors(config, seed=0) -> dict                float32 tensors by their published names
    write_safetensors(folder, family="llama", seed=0, dtype="float32", shards=1, form="published", tensors=None,
                      generation=None, **overrides) -> Path             form "transformers5": rope_parameters, dtype
    write_gguf(path, family="llama", seed=0, quant="f32", tensors=None, tokenizer="bytes", extra={}, **overrides)
                                                        quant: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0, for matrices
    write_llama2c(path, version=0, seed=0, group_size=32, tensors=None, **overrides) -> Path        0 legacy, 1, 2

Tokenizers:
    byte_tokenizer(folder, specials=SPECIALS, chat_template=CHAT_TEMPLATE) -> Path      tokenizer.json, no merges
    sentencepiece_model(folder, vocab_size=400) -> Path tokenizer.model with byte fallback, trained on a few lines
"""
from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch

SPECIALS = ("<eos>", "<|im_start|>", "<|im_end|>")
EOS, IM_START, IM_END = 256, 257, 258
CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
                 "+ '<|im_end|>' + '\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

# Configs and parameters --------------------------------------------------------------------------------------------

BASE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": EOS, "torch_dtype": "float32"}
FAMILIES = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
              "mlp_bias": False},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False,
              "sliding_window": 4096, "max_window_layers": 28},
}


def tiny_config(family: str = "llama", **overrides) -> dict:
    return BASE | FAMILIES[family] | overrides


def transformers5_form(config: dict) -> dict:
    """The same config as transformers 5 saves it: rope settings in one dict, `dtype` for `torch_dtype`."""
    config = dict(config, transformers_version="5.24.0", dtype=config["torch_dtype"])
    del config["torch_dtype"]
    scaling = dict(config.pop("rope_scaling", None) or {})
    rope_type = scaling.pop("type", None) or scaling.pop("rope_type", "default")
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": config.pop("rope_theta"), **scaling}
    return config


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its published name."""
    D, F, V, A = config["hidden_size"], config["intermediate_size"], config["vocab_size"], head_dim(config)
    H = config["num_attention_heads"]
    G = config.get("num_key_value_heads") or H
    qwen2 = config["model_type"] == "qwen2"
    qkv_bias = qwen2 or config.get("attention_bias")
    matrices = {"self_attn.q_proj": (H * A, D, qkv_bias), "self_attn.k_proj": (G * A, D, qkv_bias),
                "self_attn.v_proj": (G * A, D, qkv_bias),
                "self_attn.o_proj": (D, H * A, config.get("attention_bias") and not qwen2),
                "mlp.gate_proj": (F, D, config.get("mlp_bias")), "mlp.up_proj": (F, D, config.get("mlp_bias")),
                "mlp.down_proj": (D, F, config.get("mlp_bias"))}
    result = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"model.layers.{i}.{norm}.weight"] = (D,)
        for name, (rows, cols, bias) in matrices.items():
            result[f"model.layers.{i}.{name}.weight"] = (rows, cols)
            if bias:
                result[f"model.layers.{i}.{name}.bias"] = (rows,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (V, D)
    return result


def tiny_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 parameters that keep activations near 1, so that every one of them matters to the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif name.endswith(".bias"):
            tensors[name] = 0.2 * noise
        elif name == "model.embed_tokens.weight":
            tensors[name] = noise
        else:
            tensors[name] = noise / math.sqrt(shape[1])
    return tensors


# Containers --------------------------------------------------------------------------------------------------------

def write_safetensors(folder, family: str = "llama", seed: int = 0, dtype: str = "float32", shards: int = 1,
                      form: str = "published", tensors: dict | None = None, generation: dict | None = None,
                      **overrides) -> Path:
    from safetensors.torch import save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, torch_dtype=dtype) | overrides
    tensors = tiny_tensors(config, seed) if tensors is None else tensors
    stored = {name: tensor.to(getattr(torch, dtype)).contiguous().clone() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names, weight_map = list(stored), {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: stored[name] for name in names[i::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        size = sum(tensor.nbytes for tensor in stored.values())
        write_json(folder / "model.safetensors.index.json",
                   {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(folder / "config.json", config if form == "published" else transformers5_form(config))
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


GGUF_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
              "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
              "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
              "embed_tokens": "nextn.embed_tokens"}
GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{kind}"
    _, _, layer, *inner = stem.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(inner)]}.{kind}"


def interleave(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a Q or K projection from half-split rope order to pairs (2i, 2i+1), as llama.cpp stores them."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def interleave_qk(tensors: dict, config: dict) -> dict:
    heads = {"q_proj": config["num_attention_heads"],
             "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"]}
    return {name: interleave(t, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else t
            for name, t in tensors.items()}


def write_gguf(path, family: str = "llama", seed: int = 0, quant: str = "f32", tensors: dict | None = None,
               tokenizer: str | None = "bytes", extra: dict | None = None, **overrides) -> Path:
    """The GGUF twin of `write_safetensors`, written by the gguf package; vectors stay float32, as everywhere.

    `extra` adds metadata: {key: value} with ints as uint32, floats as float32, else strings, booleans and arrays.
    """
    import gguf
    config = tiny_config(family, **overrides)
    tensors = tiny_tensors(config, seed) if tensors is None else tensors
    if family == "llama":
        tensors = interleave_qk(tensors, config)
    writer = gguf.GGUFWriter(path, family)
    add_gguf_config(writer, config)
    if tokenizer == "bytes":
        add_gguf_bytes_vocab(writer, config)
    for key, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    kind = gguf.GGMLQuantizationType[quant.upper()]
    for name, tensor in tensors.items():
        data, stored = tensor.float().numpy(), kind if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(data, stored), raw_dtype=stored)
    add_gguf_rope_tensors(writer, config)
    finish(writer)
    return Path(path)


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_gguf_config(writer, config: dict) -> None:
    A = head_dim(config)
    writer.add_name("tiny")
    num_predicting = config.get("num_nextn_predict_layers", 0)  # here they count as layers
    writer.add_block_count(config["num_hidden_layers"] + num_predicting)
    if num_predicting:
        writer.add_nextn_predict_layers(num_predicting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if A * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(A)
        writer.add_value_length(A)
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(A)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf_scaling(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_type(gguf_scaling(kind))
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        factor = config["max_position_embeddings"] / scaling["original_max_position_embeddings"]
        log_ratio = math.log(factor) / math.log(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + log_ratio))


def gguf_scaling(kind: str):
    import gguf
    return gguf.RopeScalingType(kind)


def add_gguf_rope_tensors(writer, config: dict) -> None:
    """llama3 scaling travels as divisors of the frequencies, longrope as its two lists of factors."""
    import numpy as np
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(config), dtype=np.float32))
    if kind == "longrope":
        writer.add_tensor("rope_factors_short.weight", np.array(scaling["short_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(scaling["long_factor"], dtype=np.float32))


def llama3_divisors(config: dict) -> list[float]:
    scaling, A = config["rope_scaling"], head_dim(config)
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(0, A, 2):
        turns = original / (2 * math.pi * config["rope_theta"] ** (i / A))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def write_llama2c(path, version: int = 0, seed: int = 0, group_size: int = 32, tensors: dict | None = None,
                  **overrides) -> Path:
    """The llama2.c twin: rope_theta 10000, eps 1e-5 and hidden = heads x head_dim are built into that format."""
    config = tiny_config("llama", **overrides)
    tensors = tiny_tensors(config, seed) if tensors is None else tensors
    by_name = {gguf_name(name): tensor for name, tensor in interleave_qk(tensors, config).items()}
    layers, tied = range(config["num_hidden_layers"]), config["tie_word_embeddings"]

    def each(stem: str) -> list[torch.Tensor]:
        return [by_name[f"blk.{i}.{stem}.weight"] for i in layers]

    embedding, final = [by_name["token_embd.weight"]], [by_name["output_norm.weight"]]
    head = [] if tied else [by_name["output.weight"]]
    attention = each("attn_q") + each("attn_k") + each("attn_v") + each("attn_output")
    mlp = each("ffn_gate") + each("ffn_down") + each("ffn_up")
    numbers = [config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                       "num_attention_heads", "num_key_value_heads")]
    vocab, context = config["vocab_size"], config["max_position_embeddings"]
    with open(path, "wb") as file:
        if version == 0:
            file.write(struct.pack("<7i", *numbers, vocab if tied else -vocab, context))
            rope = [torch.zeros(context, head_dim(config))]      # cosines and sines that no reader needs
            plain = embedding + each("attn_norm") + attention + each("ffn_norm") + mlp + final + rope + head
            grouped = []
        else:
            flags = struct.pack("<B", tied) + (struct.pack("<i", group_size) if version == 2 else b"")
            header = struct.pack("<Ii7i", 0x616B3432, version, *numbers, vocab, context) + flags
            file.write(header.ljust(256, b"\0"))
            plain, grouped = each("attn_norm") + each("ffn_norm") + final, embedding + attention + mlp + head
        for tensor in plain + (grouped if version == 1 else []):
            file.write(tensor.contiguous().numpy().tobytes())
        for tensor in grouped if version == 2 else []:
            values, scales = quantize_groups(tensor, group_size)
            file.write(values.numpy().tobytes() + scales.numpy().tobytes())
    return Path(path)


def quantize_groups(tensor: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and float32 scales of each group, as llama2.c's exporter makes them."""
    groups = tensor.reshape(-1, group_size)
    scales = groups.abs().amax(1) / 127
    return (groups / scales[:, None]).round().to(torch.int8), scales


def write_json(path: Path, value) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


# Tokenizers --------------------------------------------------------------------------------------------------------

def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b if b in printable else 256 + hidden.index(b)) for b in range(256)]


def byte_tokenizer(folder, specials: tuple[str, ...] = SPECIALS, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE without merges; specials get ids from 256 on."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    added = [{"id": 256 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, text in enumerate(specials)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {letter: b for b, letter in enumerate(byte_letters())}, "merges": []}
    write_json(folder / "tokenizer.json",
               {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if specials:
        config["eos_token"] = specials[0]
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)
    return folder


def add_gguf_bytes_vocab(writer, config: dict) -> None:
    """The byte tokenizer's vocabulary in GGUF terms, padded to the model's width with unused tokens."""
    import gguf
    vocab, kinds = config["vocab_size"], gguf.TokenType
    letters = byte_letters()
    merged = letters[0] + letters[1]        # a BPE vocabulary needs a merge: this one joins the bytes 0 and 1
    tokens = (letters + list(SPECIALS) + [merged] + [f"<pad{i}>" for i in range(vocab)])[:vocab]
    types = ([kinds.NORMAL] * 256 + [kinds.CONTROL] * len(SPECIALS) + [kinds.NORMAL] + [kinds.UNUSED] * vocab)[:vocab]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_add_bos_token(False)
    if isinstance(config.get("eos_token_id"), int):
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)


def sentencepiece_model(folder, vocab_size: int = 400) -> Path:
    """tokenizer.model with byte fallback: unk 0, bos 1, eos 2, the bytes from 3 on, then pieces."""
    import sentencepiece
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = "once upon a time there was a little red fox who lived in the green wood and read books at night".split()
    lines = [" ".join(words[i:] + words[:i]).capitalize() + "." for i in range(len(words))] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), vocab_size=vocab_size,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    (folder / "tokenizer.vocab").unlink()
    return folder / "tokenizer.model"


# Whole folders -----------------------------------------------------------------------------------------------------

def tiny_llama(folder, **overrides) -> Path:
    """A random llama with everything that generate, chat and batch need."""
    return byte_tokenizer(write_safetensors(folder, "llama", **overrides))


def tiny_qwen2(folder, **overrides) -> Path:
    """A random qwen2 with everything that generate, chat and batch need."""
    return byte_tokenizer(write_safetensors(folder, "qwen2", **overrides))


IMPOSSIBLE = -20.0      # the logarithm that stands for probability zero


def log_transition(transition, vocab: int) -> torch.Tensor:
    """Logits (last token, next token) of a script: a V x V matrix of probabilities, a dict, or a chain of ids.

    dict {last: next} or {last: {next: probability}}; the entry None is for all ids without one of their own (default:
    uniform). A chain [a, b, c] goes a -> b -> c, every other id goes to a, and c goes back to a.
    """
    if isinstance(transition, (list, tuple)) and isinstance(transition[0], int):
        assert len(set(transition)) == len(transition), "the next token depends on the last one only: no repeats"
        transition = dict(zip(transition, transition[1:])) | {None: transition[0]}
    if isinstance(transition, dict):
        rows = [transition.get(i, transition.get(None)) for i in range(vocab)]
        matrix = torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64)
        for row, entry in zip(matrix, rows):
            if entry is not None:
                row.zero_()
                for token, probability in (entry.items() if isinstance(entry, dict) else [(entry, 1.0)]):
                    row[token] = probability
    else:
        matrix = torch.as_tensor(transition, dtype=torch.float64)
    logits = matrix.log()
    certain = matrix == 1
    return torch.where(certain, -IMPOSSIBLE, logits.clamp(min=IMPOSSIBLE))


def scripted(folder, transition, eos_ids: tuple[int, ...] = (), vocab: int = 320, context: int = 4096,
             tokenizer: bool = True, **options) -> Path:
    """A llama whose next-token logits are log P(next | last token), whatever came before; zero becomes -20.

    hidden = vocab, the embedding is the identity and every projection is zero, so the final norm turns token i into
    the i-th unit vector times 1/sqrt(1/V + eps), which the head divides out. For `transition` see log_transition;
    rows with a certain token get +20 for it. `options` go to write_safetensors (dtype, generation, ...).
    """
    eps = 1e-6
    config = {"vocab_size": vocab, "hidden_size": vocab, "intermediate_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": eps,
              "max_position_embeddings": context, "eos_token_id": list(eos_ids) or None}
    tensors = {name: torch.zeros(shape) for name, shape in shapes(tiny_config("llama", **config)).items()}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
    tensors["model.embed_tokens.weight"] = torch.eye(vocab)
    tensors["lm_head.weight"] = (log_transition(transition, vocab).T * math.sqrt(1 / vocab + eps)).float()
    folder = write_safetensors(folder, "llama", tensors=tensors, **config, **options)
    return byte_tokenizer(folder) if tokenizer else folder
