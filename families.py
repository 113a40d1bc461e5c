"""What a model is: its sizes and rules as one ModelConfig, and how each family's metadata becomes one.

Owns ModelConfig and the meaning of config.json's settings, their defaults and the checks on them. Knows nothing of
files: checkpoint.py reads the settings and renames a GGUF's keys to these names. Start at `ModelConfig`; a new family
is one function under `@family`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

MAX_LAYERS = 1024
MAX_SIZE = 1 << 31              # any width, vocabulary or context


# What a model is ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) and its scaling for longer contexts.

    `dim` entries of each head are rotated, the i-th pair by position * theta ** (-2i / dim), changed by `kind`:
    default, linear, dynamic (NTK), llama3, yarn (https://arxiv.org/abs/2309.00071), longrope (2402.13753).
    attention_factor None means: derive it from `factor` (and mscale, where given) by the rule of the kind.
    """
    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0       # tokens before scaling; 0: no scaling
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerConfig:
    """What one layer is made of. A window of n lets a token see n tokens, itself included."""
    mixer: str                      # "full" | "window"
    window: int = 0
    ffn: str = "dense"


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes and rules, whatever file they came from. Sizes count entries, contexts count tokens."""
    family: str
    layers: tuple[LayerConfig, ...]
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int                    # as trained
    max_context: int                # as far as the rope scaling covers
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    mtp_layers: int                 # more layers, of which a drafter makes use (heads.Mtp)
    bos_id: int | None
    eos_ids: tuple[int, ...]        # any of them ends a text
    dtype: str                      # "float32", "bfloat16", ... as the file asks, or "quantized"


# Settings, named as in config.json, become a ModelConfig -------------------------------------------------------------

REQUIRED = object()
FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {}


def family(model_type: str):
    """Register a function from neutral fields to a ModelConfig."""
    def register(function: Callable[[Fields], ModelConfig]):
        FAMILIES[model_type] = function
        return function
    return register


class Fields(dict):
    """Settings by their config.json names, checked as they are read; null counts as absent.

    Errors name the file and the key as it stands there.
    """

    def __init__(self, source: Path | str, values: Mapping, keys: Mapping[str, str] | None = None, prefix: str = ""):
        super().__init__(values)
        self.source, self.keys, self.prefix = source, keys or {}, prefix

    def error(self, name: str, problem: str, value: bool = True) -> ValueError:
        found = f"is {self[name]!r:.100} " if value else ""
        return ValueError(f"{self.source}: key '{self.keys.get(name, self.prefix + name)}' {found}{problem}")

    def read(self, name: str, default=REQUIRED):
        if self.get(name) is not None:
            return self[name]
        if default is REQUIRED:
            raise self.error(name, "is missing", value=False)
        return default

    def count(self, name: str, default=REQUIRED, most: int = MAX_SIZE) -> int:
        value = self.read(name, default)
        if not is_count(value) or value > most:
            raise self.error(name, f"but must be a whole number from 1 to {most}")
        return value

    def number(self, name: str, default=REQUIRED) -> float:
        """A positive finite number, or the default itself."""
        value = self.read(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not 1e-30 < value < 1e30:
            raise self.error(name, "but must be a number above 0 (1e-30 to 1e30)")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.read(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "but must be true or false")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.read(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"but must be a list of {length} numbers")
        return tuple(Fields(self.source, {name: item}, self.keys, self.prefix).number(name) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them, each once."""
        value = self.read(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in ids):
            raise self.error(name, "but must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))


def is_count(value: object) -> bool:
    return type(value) is int and value > 0


def check_family(fields: Fields) -> None:
    if (name := fields.get("model_type")) not in tuple(FAMILIES):
        raise ValueError(f"{fields.source}: model_type {name!r:.99} is not supported: known are {', '.join(FAMILIES)}")


def configure(fields: Fields) -> ModelConfig:
    check_family(fields)
    return FAMILIES[fields["model_type"]](fields)


@family("llama")
def llama(fields: Fields) -> ModelConfig:
    """Llama 1 to 3 and what is built like them: RMSNorm, rope, grouped heads, gated MLP (2302.13971, 2407.21783)."""
    bias = fields.flag("attention_bias", False)
    layers = (LayerConfig("full"),) * fields.count("num_hidden_layers", most=MAX_LAYERS)
    return decoder(fields, layers, fields.count("max_position_embeddings", 2048), qkv_bias=bias, o_bias=bias,
                   mlp_bias=fields.flag("mlp_bias", False))


@family("qwen2")
def qwen2(fields: Fields) -> ModelConfig:
    """Qwen 2 and 2.5 (2407.10671): llama with biases on Q, K, V and, if switched on, windows in the upper layers."""
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    window = 0
    if fields.flag("use_sliding_window", False) and fields.get("sliding_window", 4096) is not None:
        window = fields.count("sliding_window", 4096)
    return decoder(fields, qwen2_layers(fields, num_layers, window), fields.count("max_position_embeddings", 32768),
                   qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen2_layers(fields: Fields, num_layers: int, window: int) -> tuple[LayerConfig, ...]:
    """Windows from layer max_window_layers on, unless layer_types names each layer's kind."""
    first = fields.read("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise fields.error("max_window_layers", "but must be a whole number")
    kinds = fields.read("layer_types", ["full_attention"] * min(first, num_layers)
                        + ["sliding_attention"] * max(0, num_layers - first))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"but must be a list of {num_layers} kinds")
    known = {"full_attention": LayerConfig("full"),
             "sliding_attention": LayerConfig("window", window) if window else LayerConfig("full")}
    if strange := [kind for kind in kinds if not isinstance(kind, str) or kind not in known]:
        raise fields.error("layer_types", f"names {strange[0]!r}: this family has {', '.join(known)}", value=False)
    return tuple(known[kind] for kind in kinds)


def decoder(fields: Fields, layers: tuple[LayerConfig, ...], context: int, **biases: bool) -> ModelConfig:
    """What llama and its relatives share."""
    if fields.get("hidden_act", "silu") not in ("silu", "swish", None):
        raise fields.error("hidden_act", "but this family is built with silu")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"but must divide the {heads} heads")
    head_dim = head_dim_of(fields)
    rope = read_rope(fields, head_dim, context)
    return ModelConfig(
        family=fields["model_type"], layers=layers, hidden=fields.count("hidden_size"),
        ffn=fields.count("intermediate_size"), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=fields.count("vocab_size"), context=context,
        max_context=max(context, int(rope.original_context * rope.factor)),
        mtp_layers=fields.count("num_nextn_predict_layers") if fields.get("num_nextn_predict_layers") else 0,
        norm_eps=fields.number("rms_norm_eps", 1e-6), rope=rope, tied=fields.flag("tie_word_embeddings", False),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None), eos_ids=fields.token_ids("eos_token_id"),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch."), **biases)


def head_dim_of(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.error("hidden_size", f"but must be a multiple of the {heads} heads, or head_dim be given")
    return hidden // heads


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(fields: Fields, head_dim: int, context: int) -> RopeConfig:
    """RopeConfig from rope_scaling (`type` or `rope_type`) or, as transformers 5 saves it, rope_parameters."""
    source = "rope_scaling" if fields.get("rope_scaling") not in (None, {}) else "rope_parameters"
    scaling = fields.read(source, {})
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise fields.error(source, "but must be one set of rope settings for all layers")
    scaling = Fields(fields.source, scaling, fields.keys, prefix=f"{source}.")
    kind = scaling.read("rope_type", scaling.read("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"{fields.source}: rope scaling {kind!r:.100} is unknown: known are {', '.join(ROPE_KINDS)}")
    part = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dim = int(round(head_dim * part, 6))
    if not 0 < dim <= head_dim or dim % 2:
        raise ValueError(f"{fields.source}: rope would turn {dim} of {head_dim} entries of a head, but must turn an "
                         "even number of them: correct head_dim or partial_rotary_factor")
    theta_place = scaling if scaling.get("rope_theta") is not None else fields
    rope = RopeConfig(theta_place.number("rope_theta", 10000.0), dim, kind)
    if kind == "yarn" and rope.theta < 2:
        raise theta_place.error("rope_theta", "but yarn, which divides by its logarithm, needs 2 or more")
    return rope if kind == "default" else replace(rope, **rope_scaling(fields, scaling, kind, dim, context))


def rope_scaling(fields: Fields, scaling: Fields, kind: str, dim: int, context: int) -> dict:
    """What a scaling of this kind adds to RopeConfig; defaults are those of transformers' modeling_rope_utils."""
    original = fields.count("original_max_position_embeddings",
                            scaling.count("original_max_position_embeddings", context))
    if kind == "dynamic":
        original = context      # its formula knows the trained context only
        if dim < 4:
            raise ValueError(f"{fields.source}: rope turns {dim} entries of a head, but dynamic scaling needs 4 or "
                             "more: correct head_dim or rope_type")
    factor = REQUIRED if kind in ("linear", "dynamic", "llama3") else context / original
    values = {"factor": scaling.number("factor", factor), "original_context": original}
    if int(values["factor"] * original) > MAX_SIZE:
        raise scaling.error("factor", f"but must be at most {MAX_SIZE / original:g}: contexts end at {MAX_SIZE}")
    if kind == "llama3":
        values |= {"low_freq_factor": scaling.number("low_freq_factor"),
                   "high_freq_factor": scaling.number("high_freq_factor")}
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            raise scaling.error("high_freq_factor", f"but must be above low_freq_factor {values['low_freq_factor']}")
    if kind in ("yarn", "longrope"):
        values["attention_factor"] = scaling.number("attention_factor", None)
    if kind == "yarn":
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
            values[name] = scaling.number(name, default) if scaling.get(name) else default      # 0 is absent, too
        if values["beta_fast"] < values["beta_slow"]:
            raise ValueError(f"{fields.source}: yarn's beta_fast {values['beta_fast']} must not be below its beta_slow "
                             f"{values['beta_slow']}")
        values["truncate"] = scaling.flag("truncate", True)
    if kind == "longrope":
        if original == 1 and values["factor"] > 1 and values["attention_factor"] is None:
            raise scaling.error("attention_factor", "is missing: it is derived from original_max_position_embeddings, "
                                "but not from 1", value=False)
        values |= {name: scaling.numbers(name, dim // 2) for name in ("short_factor", "long_factor")}
    return values
