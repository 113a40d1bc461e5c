"""Small networks that go on from the model's own hidden rows: EAGLE's layer, layers for multi-token prediction, and
Medusa's heads.

Owns their structure and how their files name it. Knows nothing of requests or of how drafts grow (lookahead.py). Start
at `Network`; `Eagle` is the simplest.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import quant
from checkpoint import Checkpoint, open_heads
from families import Fields, ModelConfig
from kernels import KV
from model import Attention, Batch, FeedForward, Layer, Linear, Model, layer_shapes, rope_tables, wide
from speculative import LOWEST
from weights import LLAMA, Weights


class Network(Protocol):
    """Row i of its input joins token i + 1 with what is known of the text up to token i: the model's own hidden row or,
    where that was not computed yet, the network's row before. Of both it makes the next row, which tells token i + 2.
    """

    name: str
    config: ModelConfig  # sizes of its layer
    taps: tuple[int, ...]  # layers of the model whose inputs it reads

    def seen(self, h_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """What it reads of the model's hidden rows and the inputs of those layers, row by row, to be kept: x_TI."""

    def features(self, x_TI: Tensor) -> Tensor:
        """What it makes of that, as wide as its own rows: f_TD."""

    def forward(self, batch: Batch, f_TD: Tensor, kv: KV) -> Tensor:
        """The next rows g_TD; `batch` has tokens i + 1 at places i."""

    def logits(self, g_LD: Tensor) -> Tensor:
        """Scores of the tokens after those: logits_LV, as wide as the model's."""


class Eagle:
    """EAGLE-1 and 2 (Li et al. 2024, 2401.15077 and 2406.16858): a layer without a norm before its attention, over the
    embedding and the model's last hidden row, side by side; the model's head reads what comes out."""

    name, taps = "eagle", ()

    def __init__(self, model: Model, weights: Weights):
        self.model, self.config, self.rope = model, weights.checkpoint.config, Rope(model, weights)
        D = model.config.hidden
        shapes = {"fc.weight": (D, 2 * D)} | without(layer_shapes(self.config, "blk.0"), "attn_norm")
        weights.require(shapes | ({"fc.bias": (D,)} if weights.has("fc.bias") else {}), OTHER_HEAD)
        self.fc = Linear(model.ops, weights, "fc", bias=weights.has("fc.bias"))
        self.attention = Attention(model.ops, weights, self.config, 0, "blk.0")
        self.ffn = FeedForward(model.ops, weights, self.config, "blk.0")

    def seen(self, h_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        return h_TD.clone()

    def features(self, x_TI: Tensor) -> Tensor:
        return x_TI

    def forward(self, batch: Batch, f_TD: Tensor, kv: KV) -> Tensor:
        g_TD = self.fc(torch.cat((self.model.embed(batch), f_TD), -1))
        self.attention.add_(g_TD, g_TD, batch, kv, self.rope.angles(batch))
        self.ffn.add_(g_TD)
        return g_TD

    def logits(self, g_LD: Tensor) -> Tensor:
        return self.model.logits(g_LD)


class Eagle3:
    """EAGLE-3 (Li et al. 2025, 2503.01840): three of the model's layers in place of its last hidden row, a norm for
    each of the two inputs, and a head of its own, usually for the most frequent tokens only."""

    name = "eagle"

    def __init__(self, model: Model, weights: Weights):
        ops, config, path = model.ops, weights.checkpoint.config, weights.checkpoint.path
        settings = Fields(path / "config.json", weights.checkpoint.metadata)
        self.model, self.config, self.rope = model, config, Rope(model, weights)
        self.taps = eagle3_taps(path, settings, len(model.layers))
        self.adds_normed = settings.flag("norm_before_residual", False)
        D, num_tokens = config.hidden, settings.count("draft_vocab_size", model.config.vocab)
        optional = {"fc.bias": (D,), "d2t": (num_tokens,)}
        weights.require({"fc.weight": (D, 3 * D), "blk.0.hidden_norm.weight": (D,), "norm.weight": (D,),
                         "lm_head.weight": (num_tokens, D)} | layer_shapes(config, "blk.0", 2 * D)
                        | {name: shape for name, shape in optional.items() if weights.has(name)}, OTHER_HEAD)
        self.fc = Linear(ops, weights, "fc", bias=weights.has("fc.bias"))
        self.embd_norm_D = weights.take("blk.0.attn_norm.weight")
        self.hidden_norm_D = weights.take("blk.0.hidden_norm.weight")
        self.attention = Attention(ops, weights, config, 0, "blk.0")
        self.ffn = FeedForward(ops, weights, config, "blk.0")
        self.norm_D = weights.take("norm.weight")
        self.head = Linear(ops, weights, "lm_head")
        id_C = torch.arange(num_tokens)
        if weights.has("d2t"):  # how far each id of the head lies from the model's
            id_C += weights.dequantized("d2t", torch.int64)
        if not 0 <= int(id_C.min()) <= int(id_C.max()) < model.config.vocab:
            raise ValueError(f"{path}: d2t names ids {int(id_C.min())} to {int(id_C.max())} but the model has "
                             f"{model.config.vocab} tokens: {OTHER_HEAD}")
        self.id_C = id_C.to(model.device)

    def seen(self, h_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(taps), -1)

    def features(self, x_TI: Tensor) -> Tensor:
        return self.fc(x_TI)

    def forward(self, batch: Batch, f_TD: Tensor, kv: KV) -> Tensor:
        ops, eps = self.model.ops, self.config.norm_eps
        normed_TD = ops.rms_norm(f_TD, self.hidden_norm_D, eps)
        x_TI = torch.cat((ops.rms_norm(self.model.embed(batch), self.embd_norm_D, eps), normed_TD), -1)
        g_TD = ops.copy(normed_TD if self.adds_normed else f_TD)
        self.attention.add_(g_TD, x_TI, batch, kv, self.rope.angles(batch))
        self.ffn.add_(g_TD)
        return g_TD

    def logits(self, g_LD: Tensor) -> Tensor:
        logits_LC = wide(self.head(self.model.ops.rms_norm(g_LD, self.norm_D, self.config.norm_eps)))
        logits_LV = logits_LC.new_full((len(logits_LC), self.model.config.vocab), LOWEST)
        logits_LV[:, self.id_C] = logits_LC
        return logits_LV


class Mtp:
    """The layer for multi-token prediction that DeepSeek-V3 (2412.19437) and GLM are published with: a layer like the
    model's own over the two inputs, each normed, side by side. Here the first such layer serves for every token."""

    name, taps = "mtp", ()

    def __init__(self, model: Model, weights: Weights):
        ops, config = model.ops, model.config
        self.model, self.config = model, config
        D, name = config.hidden, f"blk.{len(config.layers)}"
        norms = {f"{name}.nextn.{norm}.weight": (D,) for norm in ("enorm", "hnorm", "shared_head_norm")}
        weights.require({f"{name}.nextn.eh_proj.weight": (D, 2 * D)} | norms | layer_shapes(config, name))
        self.embd_norm_D = weights.take(f"{name}.nextn.enorm.weight")
        self.hidden_norm_D = weights.take(f"{name}.nextn.hnorm.weight")
        self.fc = Linear(ops, weights, f"{name}.nextn.eh_proj")
        self.layer = Layer(ops, weights, config, 0, name)
        self.norm_D = weights.take(f"{name}.nextn.shared_head_norm.weight")

    def seen(self, h_TD: Tensor, taps: Sequence[Tensor]) -> Tensor:
        return h_TD.clone()

    def features(self, x_TI: Tensor) -> Tensor:
        return x_TI

    def forward(self, batch: Batch, f_TD: Tensor, kv: KV) -> Tensor:
        ops, eps = self.model.ops, self.config.norm_eps
        normed_TD = ops.rms_norm(f_TD, self.hidden_norm_D, eps)
        g_TD = self.fc(torch.cat((ops.rms_norm(self.model.embed(batch), self.embd_norm_D, eps), normed_TD), -1))
        self.layer.forward_(g_TD, batch, kv, self.model.angles(batch))
        return ops.rms_norm(g_TD, self.norm_D, eps)

    def logits(self, g_LD: Tensor) -> Tensor:
        return self.model.logits(g_LD)


class Rope:
    """A network's own rotary frequencies, as far as the model's context."""

    def __init__(self, model: Model, weights: Weights):
        config = weights.checkpoint.config
        self.model = model
        inv_freq, self.scale = rope_tables(config.rope, config.context, model.context)
        self.inv_freq = inv_freq.to(model.device)

    def angles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.model.ops.rope_angles(batch.position_T, self.inv_freq, self.scale, self.model.dtype)


OTHER_HEAD = "give the folder of a head of this kind that was trained for the model"


def eagle3_taps(path: Path, settings: dict, num_layers: int) -> tuple[int, ...]:
    """The three layers whose inputs an EAGLE-3 head reads: near the model's first, its middle and its last."""
    nested = settings.get("eagle_config")
    found = (nested if isinstance(nested, dict) else settings).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(found) if isinstance(found, list) else (2, num_layers // 2, num_layers - 3) if not found else (found,)
    if len(taps) != 3 or not all(type(tap) is int and 0 <= tap < num_layers for tap in taps):
        raise ValueError(f"{path}: the head reads the inputs of layers {list(taps)} but must read three of the model's "
                         f"layers 0 to {num_layers - 1}: {OTHER_HEAD}")
    if sorted(set(taps)) != list(taps):
        raise ValueError(f"{path}: the head reads layers {list(taps)}, which must ascend: correct config.json")
    return taps


def without(shapes: dict[str, tuple[int, ...]], part: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if f".{part}." not in name}


def open_eagle(folder: str | Path, model: Model) -> Eagle | Eagle3:
    """An EAGLE head of any version, trained for the model."""
    checkpoint = open_heads(folder, model.config)
    name = "midlayer" if any(tensor.startswith("midlayer.") for tensor in checkpoint.tensors) else "layers.0"
    table = {"blk.0." + canonical.removeprefix("blk.{}."): f"{name}." + published.removeprefix("model.layers.{}.")
             for canonical, published in LLAMA.items() if canonical.startswith("blk.") and ".nextn." not in canonical}
    table["blk.0.hidden_norm"] = f"{name}.hidden_norm"
    for part in ("fc_norm", "norm_output"):
        if checkpoint.metadata.get(part):
            raise ValueError(f"{checkpoint.path}: {part} is set: heads of this kind are not supported")
    if checkpoint.config.hidden != model.config.hidden:
        raise ValueError(f"{checkpoint.path}: the head is {checkpoint.config.hidden} wide but the model "
                         f"{model.config.hidden}: {OTHER_HEAD}")
    has = {kind: f"{name}.{part}.bias" in checkpoint.tensors for kind, part in
           (("qkv_bias", "self_attn.q_proj"), ("o_bias", "self_attn.o_proj"), ("mlp_bias", "mlp.down_proj"))}
    checkpoint.config = replace(checkpoint.config, mtp_layers=0, **has)
    weights = weights_of(checkpoint, model, table)
    return (Eagle3 if weights.has("blk.0.hidden_norm.weight") else Eagle)(model, weights)


def open_mtp(checkpoint: Checkpoint, model: Model) -> Mtp:
    """The multi-token prediction layer of the model's own checkpoint; ValueError if it has none."""
    if not model.config.mtp_layers:
        raise ValueError(f"{checkpoint.path} has no layers for multi-token prediction: leave --draft mtp out, or use a "
                         "checkpoint that has them")
    return Mtp(model, weights_of(checkpoint, model))


def weights_of(checkpoint: Checkpoint, model: Model, table: dict | None = None) -> Weights:
    """In the model's type. Beside a quantized model matrices are rounded to 8 bits: a network is read for every token
    that it drafts, and half the bytes save more than the drafts that they spoil."""
    def pack_rounded(tensors: Sequence) -> object:
        return model.ops.pack([rounded(*tensor) for tensor in tensors])

    pack = pack_rounded if model.matrix_dtype is None else getattr(model.ops, "pack", None)
    return Weights(checkpoint, model.matrix_dtype, model.device, pack, table)


def rounded(format: str, shape: tuple[int, ...], raw: Tensor) -> tuple[str, tuple[int, ...], Tensor]:
    """A matrix as `pack` takes it, in 8 bits if it has more and they serve its width."""
    if format not in ("f32", "bf16") or shape[1] % quant.FORMATS["q8_0"].block:
        return format, shape, raw
    matrix = quant.dequantize(raw.flatten(), format, shape, torch.float32)
    return "q8_0", shape, quant.quantize_q8_0(matrix)


class MedusaHead:
    """Medusa (Cai et al. 2024, 2401.10774): blocks x + silu(W x + b), then a matrix to the vocabulary. Head i tells the
    token i + 2 places after the one whose hidden row it reads, whatever lies between."""

    def __init__(self, blocks: Sequence[Linear], output: Linear):
        self.blocks, self.output = blocks, output

    def __call__(self, h_LD: Tensor) -> Tensor:
        for block in self.blocks:
            h_LD = h_LD + F.silu(block(h_LD))
        return wide(self.output(h_LD))


def open_medusa(folder: str | Path, model: Model) -> list[MedusaHead]:
    """All Medusa heads of a file; some writers leave the names' first part out."""
    weights = weights_of(open_heads(folder, model.config), model, {})
    prefix = "medusa_head." if weights.has("medusa_head.0.0.linear.weight") else ""
    D, V, heads = model.config.hidden, model.config.vocab, []
    while not heads or weights.has(f"{prefix}{len(heads)}.0.linear.weight"):
        name, blocks = f"{prefix}{len(heads)}", 0
        while weights.has(f"{name}.{blocks}.linear.weight"):
            blocks += 1
        shapes = {f"{name}.{max(blocks, 1)}.weight": (V, D)}
        for j in range(max(blocks, 1)):
            shapes |= {f"{name}.{j}.linear.weight": (D, D), f"{name}.{j}.linear.bias": (D,)}
        weights.require(shapes, OTHER_HEAD)
        heads.append(MedusaHead([Linear(model.ops, weights, f"{name}.{j}.linear", bias=True) for j in range(blocks)],
                                Linear(model.ops, weights, f"{name}.{blocks}")))
    return heads
