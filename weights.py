"""Tensors out of model files, under one set of names and in one layout.

Owns the tables of names, the order of Q and K rows, and the question which tensors a model may lack or leave over.
Knows nothing of containers (checkpoint.py), of block formats (quant.py) or of what the tensors compute. Start at
`Weights.take`.

Canonical names are GGUF's: token_embd.weight, output_norm.weight, output.weight, rope_freqs.weight, and for layer N
blk.N.{attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down}.{weight, bias}; for one of
multi-token prediction also blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm, shared_head_head, embed_tokens}.
"""
import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import quant
from checkpoint import Checkpoint, TensorInfo, plain

LLAMA = {
    "token_embd": "model.embed_tokens",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    "blk.{}.nextn.eh_proj": "model.layers.{}.eh_proj",
    "blk.{}.nextn.enorm": "model.layers.{}.enorm",
    "blk.{}.nextn.hnorm": "model.layers.{}.hnorm",
    "blk.{}.nextn.shared_head_norm": "model.layers.{}.shared_head.norm",
    "blk.{}.nextn.shared_head_head": "model.layers.{}.shared_head.head",
    "blk.{}.nextn.embed_tokens": "model.layers.{}.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PUBLISHED = {"llama": LLAMA, "qwen2": LLAMA}    # family -> what safetensors files call a canonical name

# Not weights: buffers that old exporters saved, and the rope factors of a GGUF that its config already holds.
IGNORED = (".rotary_emb.inv_freq", "rope_factors_long.weight", "rope_factors_short.weight")


PACKED_FORMATS = tuple(name for name, row in quant.FORMATS.items() if row.block not in (None, 1)) + ("f32", "bf16")


class Weights:
    """A checkpoint's tensors by canonical name, in `dtype` on `device`. With `pack` (native.Native.pack) matrices are
    packed for it, in `dtype` or, if that is None, as the file has them; everything else is float32. `table`: what the
    file calls canonical names; by default as the family's models are published."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, device: str = "cpu",
                 pack: Callable | None = None, table: Mapping[str, str] | None = None):
        self.checkpoint, self.device, self.pack, self.matrix_dtype = checkpoint, device, pack, dtype
        self.dtype = torch.float32 if pack else dtype
        if table is None:
            table = PUBLISHED[checkpoint.config.family] if checkpoint.container == "safetensors" else {}
        first_mtp = len(checkpoint.config.layers)
        num_layers = first_mtp + checkpoint.config.mtp_layers
        self.published = {canonical.format(i): published.format(i) for canonical, published in table.items()
                          for i in range(num_layers)}
        canonical = {published: canonical for canonical, published in self.published.items()}
        self.file_names = {renamed(name, canonical): name for name in checkpoint.tensors}
        left_to_drafters = tuple(f"blk.{i}." for i in range(first_mtp, num_layers))
        self.unused = {name for name in self.file_names
                       if not name.endswith(IGNORED) and not name.startswith(left_to_drafters)}
        self.head_notes = self.check_spare_head() if checkpoint.config.tied else []

    def has(self, name: str) -> bool:
        """Whether the model should take this tensor. A tied model has no output.weight, whatever its file holds."""
        return name in self.file_names and not (name == "output.weight" and self.checkpoint.config.tied)

    def require(self, shapes: dict[str, tuple[int, ...]], remedy: str = "get a complete copy of the model") -> None:
        """ValueError with all of the tensors that are missing or have another shape than `shapes` says."""
        wrong = []
        for name, shape in shapes.items():
            if not self.has(name):
                wrong.append(f"{renamed(name, self.published)} {shape} is missing")
            elif (found := self.info(name).shape) != tuple(shape):
                wrong.append(f"{self.file_names[name]} is {found}, not {shape}")
        if wrong:
            raise ValueError(f"{self.checkpoint.path}: {len(wrong)} of {len(shapes)} tensors do not fit the model's "
                             f"config: {first_few(wrong, '; ')}: {remedy}")

    def take(self, name: str) -> Tensor:
        """The tensor, its rows in the layout of `forward`. The file's own pages leave memory."""
        tensor = self.arranged(name, self.dequantized(name, self.dtype))
        self.checkpoint.release(self.file_names[name])
        return tensor.to(self.device)

    def matrix(self, *names: str):
        """Matrices (O, I) that read the same input, side by side, as `linear` of the operations in use takes them."""
        if self.pack is None:
            tensors = [self.take(name) for name in names]
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        packed = self.pack([self.stored(name) for name in names])
        for name in names:
            self.checkpoint.release(self.file_names[name])
        return packed

    @property
    def notes(self) -> list[str]:
        """What the user should know once the model has taken its tensors."""
        unused = sorted(plain(self.file_names[name]) for name in self.unused)
        if not unused:
            return self.head_notes
        return [*self.head_notes, f"tensors of {self.checkpoint.path.name} that the model does not use: "
                                  f"{first_few(unused, ', ')}"]

    # Details ---------------------------------------------------------------------------------------------------

    def info(self, name: str) -> TensorInfo:
        return self.checkpoint.tensors[self.file_names[name]]

    def arranged(self, name: str, rows: Tensor) -> Tensor:
        """Rows of the tensor, as read from the file, in the layout of `forward`."""
        if self.checkpoint.interleaved_rope and (heads := self.rotated_heads(name)):
            rows = half_split(rows, heads, self.checkpoint.config.rope.dim)
        self.unused.discard(name)
        return rows

    def stored(self, name: str) -> tuple[str, tuple[int, ...], Tensor]:
        """Format, shape and bytes of a matrix that is to be packed."""
        info, format = self.info(name), self.info(name).format
        if self.matrix_dtype is None and format in PACKED_FORMATS:
            rows = self.raw(name).view(info.shape[0], -1)
        else:
            format = "bf16" if self.matrix_dtype == torch.bfloat16 else "f32"
            rows = self.dequantized(name, self.matrix_dtype or torch.float32).view(torch.uint8)
        return format, info.shape, self.arranged(name, rows)

    def dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in dtype, as the file has it; rope's frequency divisors stay float32, as angles need them."""
        is_divisors = name == "rope_freqs.weight"
        info, dtype = self.info(name), torch.float32 if is_divisors else dtype
        tensor = quant.dequantize(self.raw(name), info.format, info.shape, dtype)
        if is_divisors and (wrong := [x for x in tensor.tolist() if not 0 < x < math.inf]):
            raise ValueError(f"{self.checkpoint.path}: {info.name} must hold finite numbers above 0 but holds "
                             f"{wrong[0]}: get a complete copy of the model")
        if dtype == torch.float16 and tensor.isinf().any():
            raise ValueError(f"{self.checkpoint.path}: {info.name} holds values beyond 65504, the most that float16 "
                             "can: use --dtype bfloat16 or float32")
        return tensor

    def raw(self, name: str) -> Tensor:
        """The tensor's bytes, still in the file's mapping."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")    # and nobody writes to it
            return torch.frombuffer(self.checkpoint.data(self.file_names[name]), dtype=torch.uint8)

    def check_spare_head(self) -> list[str]:
        """A tied model computes with its embedding; a head in its file should be the same numbers, but need not be."""
        head, embedding = "output.weight", "token_embd.weight"
        self.unused.discard(head)
        if not {head, embedding} <= self.file_names.keys():
            return []
        same = (self.info(head).format == self.info(embedding).format
                and torch.equal(self.raw(head), self.raw(embedding)))
        for name in (head, embedding):
            self.checkpoint.release(self.file_names[name])
        return [] if same else [f"{self.file_names[head]} differs from the embedding that the config ties it to: "
                                "the embedding is used"]

    def rotated_heads(self, name: str) -> int | None:
        """How many heads rope rotates in the rows of this tensor; None if it rotates none."""
        config, part = self.checkpoint.config, name.split(".")[-2]
        return {"attn_q": config.heads, "attn_k": config.kv_heads}.get(part)


def first_few(items: list[str], separator: str) -> str:
    more = f"{separator}and {len(items) - 5} more" if len(items) > 5 else ""
    return separator.join(items[:5]) + more


def renamed(name: str, stems: dict[str, str]) -> str:
    """The name with what stands before its .weight or .bias replaced where `stems` knows it."""
    stem, dot, kind = name.rpartition(".")
    return stems.get(stem, stem) + dot + kind


def half_split(rows: Tensor, heads: int, rotated: int) -> Tensor:
    """Rows of a Q or K projection (or its bias) from pairs (2i, 2i+1) to two halves (i, i + rotated/2), head by head.

    Rope rotates two rows of a head together. llama.cpp and llama2.c keep them side by side, as in Su et al. 2021;
    `forward` wants them half a head apart, as in GPT-NeoX. Rows from `rotated` on are not rotated and stay.
    """
    row_HA = torch.arange(len(rows)).unflatten(0, (heads, -1))
    pairs, rest = row_HA[:, :rotated], row_HA[:, rotated:]
    order = torch.cat((pairs[:, 0::2], pairs[:, 1::2], rest), 1)
    return rows.index_select(0, order.flatten())
