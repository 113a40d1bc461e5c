"""Trains draft heads for a model, on text that the model writes itself: an EAGLE-3 head, Medusa heads.

Owns how a head is trained, and the published layout that it is written in; what drafting with it computes is stated
here once more, for all places of a text at once. Start at `train`; `Eagle` and `Medusa` are the heads.

    python tools/train_head.py both ~/.cache/quire/heads/SmolLM2-135M-Instruct     (eagle3 and medusa in that folder)

Letters besides those of model.py: R rows of text (each BLOCK tokens), T places in a row, N chains (a place from which
drafts are grown), C ids that a head knows, X the width of all tapped rows together.

EAGLE-3: https://arxiv.org/abs/2503.01840. Medusa: https://arxiv.org/abs/2401.10774. The loss: 2606.12370.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in run.py: a waiting thread leaves the core to others

import torch  # noqa: E402 (it reads the environment)
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

import kernels  # noqa: E402
import run  # noqa: E402
from flags import COUNT, POSITIVE, THREADS, Parser, UsageError, make_parser  # noqa: E402
from loading import load_engine  # noqa: E402
from model import Model  # noqa: E402
from own_text import Clock, Text, table, write_text  # noqa: E402
from terminal import held_signals  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# The heads. A chain begins at a place i: step j of it stands for the token at i + j + 2, which the model itself draws
# from what it computed at the place i + j + 1.

MOST_FITTED = 24576  # tokens that least squares look at


class Eagle:
    """EAGLE-3's head: one decoder layer over entries that join a token's embedding with what the token before it left.

    `weights` have their published names. `fc` is trained on taps divided by their size, channel by channel, which
    differs a hundredfold, and is written with the division in it.
    """

    outside = -math.inf  # the logarithm of what ids that the head does not know add to its sum

    def __init__(self, model: Model, text: Text, ids_C: Tensor):
        config = model.config
        self.config, self.ids_C, self.norm_eps = config, ids_C, config.norm_eps
        self.inv_freq, self.rope_scale = model.inv_freq, model.rope_scale
        self.embed_VD, self.known_CD = table(model, model.token_embd), table(model, model.output)[ids_C]
        self.size_X = text.taps_TX[:20000].float().square().mean(0).sqrt().clamp(min=1e-3)
        D, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes = {"self_attn.q_proj": (q, 2 * D), "self_attn.k_proj": (kv, 2 * D), "self_attn.v_proj": (kv, 2 * D),
                  "self_attn.o_proj": (D, q), "mlp.gate_proj": (config.ffn, D), "mlp.up_proj": (config.ffn, D),
                  "mlp.down_proj": (D, config.ffn)}
        self.weights = {f"midlayer.{name}.weight": torch.randn(shape) / math.sqrt(shape[1])
                        for name, shape in shapes.items()}
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.weights[f"midlayer.{name}.weight"] = torch.ones(D)
        self.weights["norm.weight"] = model.output_norm_D.float().clone()
        self.weights["lm_head.weight"] = self.known_CD.clone()
        self.begin(model, text)

    def begin(self, model: Model, text: Text) -> None:
        """Sets the head to what least squares finds for the model's next hidden row: from the taps through fc, from
        the token's embedding through values and output, as far as their rank goes, of heads that see their own entry (a
        query that is its key finds itself). What these lack comes from the model's last feed-forward network, as far
        as its output matrix can be fitted to it. The other heads begin small."""
        D, A, group = self.config.hidden, self.config.head_dim, self.config.heads // self.config.kv_heads
        at_T = (text.doc_T[1:] == text.doc_T[:-1]).nonzero()[:, 0][:MOST_FITTED]
        taps_TX = text.taps_TX[at_T].float() / self.size_X
        embedded_TD = self.norm(self.embed_VD[text.token_T[at_T + 1]], "midlayer.input_layernorm")
        next_TD = text.h_TD[at_T + 1].float() / self.weights["norm.weight"]
        fit_DI = least_squares(torch.cat((taps_TX, embedded_TD), -1), next_TD)
        from_taps_DX, from_embedded_DD = fit_DI.split((len(self.size_X), D), 1)
        self.weights["fc.weight"] = from_taps_DX.contiguous()
        q_OI, k_OI, v_OI, o_OI = (self.weights[f"midlayer.self_attn.{kind}_proj.weight"] for kind in "qkvo")
        rank, num_sharp = min(D, len(v_OI)), -(-group // 2)  # so many of the heads that share a key see themselves
        left_DI, size_I, right_ID = torch.linalg.svd(from_embedded_DD)
        q_OI.unflatten(0, (-1, group, A))[:, :num_sharp] = 2 * k_OI.unflatten(0, (-1, 1, A))
        left_DI, size_I, right_ID = left_DI[:, :rank], size_I[:rank], right_ID[:rank]
        v_OI.mul_(0.1)[:rank, :D] = size_I[:, None].sqrt() * right_ID
        o_OI.mul_(0.1).unflatten(1, (-1, group, A))[:, :, :num_sharp] += F.pad(
            left_DI * size_I.sqrt(), (0, len(v_OI) - rank)).unflatten(1, (-1, 1, A)) / num_sharp
        self.fit_feed_forward(model, taps_TX @ from_taps_DX.T + embedded_TD @ (left_DI * size_I @ right_ID).T, next_TD)

    def fit_feed_forward(self, model: Model, h_TD: Tensor, wanted_TD: Tensor) -> None:
        """Its input matrices are those of the model's last one; its output matrix makes `wanted` of h."""
        ffn = model.layers[-1].ffn
        self.weights["midlayer.post_attention_layernorm.weight"] = ffn.norm_D.float().clone()
        identity_DD = torch.eye(h_TD.shape[1], dtype=model.dtype)  # shows a matrix, however it is stored
        for name, weight_FD in zip(("gate", "up"), ffn.gate_up(identity_DD).T.float().chunk(2)):
            self.weights[f"midlayer.mlp.{name}_proj.weight"] = weight_FD.contiguous()
        act_TF = self.activation(h_TD)
        size_F = act_TF.square().mean(0).sqrt().clamp(min=1e-6)
        self.weights["midlayer.mlp.down_proj.weight"] = least_squares(act_TF / size_F, wanted_TD - h_TD) / size_F

    def tensors(self) -> dict[str, Tensor]:
        config = self.config
        known_V = torch.zeros(config.vocab, dtype=torch.bool)
        known_V[self.ids_C] = True
        weights = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        weights["fc.weight"] = (self.weights["fc.weight"].detach() / self.size_X).bfloat16()
        return weights | {"d2t": self.ids_C - torch.arange(len(self.ids_C)), "t2d": known_V}

    def settings(self) -> dict:
        c = self.config
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": c.hidden,
                "intermediate_size": c.ffn, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
                "head_dim": c.head_dim, "num_hidden_layers": 1, "vocab_size": c.vocab,
                "draft_vocab_size": len(self.ids_C), "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta,
                "max_position_embeddings": c.context, "hidden_act": "silu", "tie_word_embeddings": False,
                "torch_dtype": "bfloat16"}

    def hidden(self, block: Text, num_steps: int) -> Iterator[Tensor]:
        """Rows h_RTD of the chains that begin at each place, step by step; each step's stand for f in the next.

        A chain sees the entries of the text up to its beginning, and its own from there on (training-time test).
        """
        weights = self.weights
        f_RTD = F.linear(block.taps_TX.float(), weights["fc.weight"] / self.size_X)
        place_T = torch.arange(block.token_T.shape[1])
        sees_RTT = (place_T <= place_T[:, None]) & (block.doc_T[:, None] == block.doc_T[..., None])
        bias_RTT = torch.zeros(sees_RTT.shape).masked_fill(~sees_RTT, -math.inf)
        keys, values = [], []
        for step in range(num_steps):
            token_RT = block.token_T.roll(-1 - step, 1)  # beyond a row's end no chain goes
            x_RTI = torch.cat((self.norm(F.embedding(token_RT, self.embed_VD), "midlayer.input_layernorm"),
                               self.norm(f_RTD, "midlayer.hidden_norm")), -1)
            angles = kernels.rope_angles(place_T + step, self.inv_freq, self.rope_scale, torch.float32)
            q_RTHA, k_RTGA, v_RTGA = (self.linear(x_RTI, f"midlayer.self_attn.{kind}_proj").unflatten(
                -1, (-1, self.config.head_dim)) for kind in "qkv")
            keys.append(kernels.rope(k_RTGA, *angles))
            values.append(v_RTGA)
            out_RTHA = attend(kernels.rope(q_RTHA, *angles), keys, values, bias_RTT)
            h_RTD = f_RTD + self.linear(out_RTHA.flatten(2), "midlayer.self_attn.o_proj")
            f_RTD = h_RTD + self.linear(self.activation(h_RTD), "midlayer.mlp.down_proj")
            yield f_RTD

    def activation(self, h: Tensor) -> Tensor:
        x = self.norm(h, "midlayer.post_attention_layernorm")
        return F.silu(self.linear(x, "midlayer.mlp.gate_proj")) * self.linear(x, "midlayer.mlp.up_proj")

    def logits(self, h_ND: Tensor, step: int) -> Tensor:
        return self.linear(self.norm(h_ND, "norm"), "lm_head")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return kernels.rms_norm(x, self.weights[f"{name}.weight"], self.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])


def attend(q_RTHA: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], bias_RTT: Tensor) -> Tensor:
    """Each place's query sees the first of `keys` at the places that the bias lets it see, the others at its own."""
    group = q_RTHA.shape[2] // keys[0].shape[2]
    q_RTGQA = q_RTHA.unflatten(2, (-1, group)) / math.sqrt(q_RTHA.shape[-1])
    scores_RGQTT = torch.einsum("rtgqa,rsga->rgqts", q_RTGQA, keys[0]) + bias_RTT[:, None, None]
    own = [torch.einsum("rtgqa,rtga->rgqt", q_RTGQA, k_RTGA)[..., None] for k_RTGA in keys[1:]]
    share = torch.cat([scores_RGQTT, *own], -1).softmax(-1)
    num_places = bias_RTT.shape[-1]
    out_RTGQA = torch.einsum("rgqts,rsga->rtgqa", share[..., :num_places], values[0])
    for j, v_RTGA in enumerate(values[1:]):
        out_RTGQA = out_RTGQA + torch.einsum("rgqt,rtga->rtgqa", share[..., num_places + j], v_RTGA)
    return out_RTGQA.flatten(2, 3)


def least_squares(x_TI: Tensor, y_TO: Tensor) -> Tensor:
    """The matrix W_OI for which W x comes closest to y, with a little ridge: x may have fewer rows than columns, or
    columns of zeros."""
    gram_II = (x_TI.T @ x_TI).double()
    gram_II.diagonal().add_(0.01 * gram_II.diagonal().mean() + 1e-6)
    return torch.linalg.solve(gram_II, (x_TI.T @ y_TO).double()).T.float()


class Medusa:
    """Medusa's heads: from a token's hidden row, head i tells the token i + 2 places on. One ResBlock each.

    Of a head's (V, D) matrix the rows of the known ids are trained. The others are written as zeros: their logits are
    0, and count so in the sum here. The known ones begin as the model's own, less the mean of the others, behind the
    linear map by which the hidden row comes closest to the one i + 1 places on.
    """

    def __init__(self, model: Model, text: Text, ids_C: Tensor, num_heads: int = 3):
        self.ids_C, self.config, self.num_heads = ids_C, model.config, num_heads
        output_VD = table(model, model.output)
        self.known_CD = output_VD[ids_C]
        num_others = model.config.vocab - len(ids_C)
        self.outside = math.log(num_others) if num_others else -math.inf
        mean_D = (output_VD.sum(0) - self.known_CD.sum(0)) / max(1, num_others)
        D = model.config.hidden
        self.weights = {}
        for i in range(num_heads):
            at_T = (text.doc_T[1 + i :] == text.doc_T[: -1 - i]).nonzero()[:, 0][:MOST_FITTED]
            fit_DD = least_squares(text.h_TD[at_T].float(), text.h_TD[at_T + 1 + i].float())
            self.weights |= {f"medusa_head.{i}.0.linear.weight": torch.zeros(D, D),
                             f"medusa_head.{i}.0.linear.bias": torch.zeros(D),
                             f"medusa_head.{i}.1.weight": (self.known_CD - mean_D) @ fit_DD}

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        for i in range(self.num_heads):
            known_CD = tensors[f"medusa_head.{i}.1.weight"]
            all_VD = known_CD.new_zeros(self.config.vocab, self.config.hidden)
            tensors[f"medusa_head.{i}.1.weight"] = all_VD.index_copy(0, self.ids_C, known_CD)
        return tensors

    def settings(self) -> dict:
        return {"medusa_num_heads": self.num_heads, "medusa_num_layers": 1, "hidden_size": self.config.hidden,
                "vocab_size": self.config.vocab}

    def hidden(self, block: Text, num_steps: int) -> Iterator[Tensor]:
        for _ in range(num_steps):
            yield block.h_TD.float()

    def logits(self, h_ND: Tensor, step: int) -> Tensor:
        linear = (self.weights[f"medusa_head.{step}.0.linear.{kind}"] for kind in ("weight", "bias"))
        return F.linear(h_ND + F.silu(F.linear(h_ND, *linear)), self.weights[f"medusa_head.{step}.1.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# Training

BLOCK = 256  # tokens of a row


@dataclass(frozen=True)
class Plan:
    """How a head is trained: learning rate at its highest, for numbers around 1, and for the matrix that gives logits
    the part of it; steps until it is reached, rows in a step, the part of the time in which cross-entropy counts."""

    rate: float = 0.008
    head: float = 0.2
    warm_up: int = 30
    num_rows: int = 2
    entropy_until: float = 0.6

    def rate_of(self, name: str, weight: Tensor) -> float:
        """In proportion to the tensor's numbers: those that least squares found are small."""
        size = float(weight.detach().square().mean().sqrt()) or weight.shape[-1] ** -0.5
        return self.rate * size * (self.head if name.endswith(("lm_head.weight", ".1.weight")) else 1)


def blocks(text: Text, num_steps: int) -> Text:
    """The text in rows of BLOCK tokens, whatever sequences they are of; without what does not fill a row, and rows in
    which no chain begins."""
    num_rows = len(text) // BLOCK
    rows = Text(*(getattr(text, field.name)[: num_rows * BLOCK].unflatten(0, (num_rows, BLOCK))
                  for field in fields(text)))
    return rows[(chains(rows, num_steps) // BLOCK).unique()]


def chains(block: Text, num_steps: int) -> Tensor:
    """Where chains of so many steps begin, among all places of the rows, all of whose tokens the model itself drew."""
    is_whole_RT = torch.ones_like(block.drawn_T)
    for step in range(num_steps):
        is_whole_RT = is_whole_RT & block.drawn_T.roll(-1 - step, 1)
    is_whole_RT &= block.doc_T == block.doc_T.roll(-num_steps, 1)
    is_whole_RT[:, -num_steps:] = False
    return is_whole_RT.flatten().nonzero()[:, 0]


class Judgement(torch.autograd.Function):
    """Of logits and the model's probabilities: the chance sum min(p, q) that a draft of q stands, and the
    cross-entropy. The gradients share one softmax; what is kept for them is as large as the logits once, not six times.
    """

    @staticmethod
    def forward(ctx, logits_NC: Tensor, p_NC: Tensor, outside: float) -> tuple[Tensor, Tensor]:
        sum_N1 = torch.logsumexp(logits_NC, -1, keepdim=True)
        sum_N1 = torch.logaddexp(sum_N1, torch.tensor(outside))
        mass_N1 = p_NC.sum(-1, keepdim=True)
        entropy_N = mass_N1[:, 0] * sum_N1[:, 0] - (p_NC * logits_NC).sum(-1)
        q_NC = (logits_NC - sum_N1).exp_()
        ctx.save_for_backward(q_NC, p_NC, mass_N1)
        return torch.minimum(p_NC, q_NC).sum(-1), entropy_N

    @staticmethod
    def backward(ctx, of_accept_N: Tensor, of_entropy_N: Tensor) -> tuple[Tensor, None, None]:
        q_NC, p_NC, mass_N1 = ctx.saved_tensors
        below_NC = torch.where(q_NC < p_NC, q_NC, 0)
        slope = of_entropy_N[:, None] * mass_N1 - of_accept_N[:, None] * below_NC.sum(-1, keepdim=True)
        grad_NC = q_NC.mul(slope).addcmul_(below_NC, of_accept_N[:, None])
        return grad_NC.addcmul_(p_NC, of_entropy_N[:, None], value=-1), None, None


def judged(head, block: Text, num_steps: int, chain_N: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step, for each chain: the chance that its draft stands, the cross-entropy, and the logits."""
    p_TC = (block.h_TD.flatten(0, 1).float() @ head.known_CD.T).sub_(block.log_sum_T.flatten()[:, None]).exp_()
    for step, h_RTD in enumerate(head.hidden(block, num_steps)):
        logits_NC = head.logits(h_RTD.flatten(0, 1)[chain_N], step)
        yield *Judgement.apply(logits_NC, p_TC[chain_N + step + 1], head.outside), logits_NC.detach()


def train(head, text: Text, clock: Clock, num_steps: int, plan: Plan, seed: int, stop: Sequence = ()) -> None:
    """AdamW; the rate rises over the first steps and falls by a cosine to the end of the time, or until there is
    something in `stop`. The loss begins as cross-entropy, whose gradient is strong where nothing is right yet, and
    becomes that of the acceptance: what is lost of the drafts' length, 1 - mean over steps of prod a_i."""
    rows, order = blocks(text, num_steps), []
    generator = torch.Generator().manual_seed(seed)
    for weight in head.weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW([{"params": [weight], "full": plan.rate_of(name, weight)}
                                   for name, weight in head.weights.items()],
                                  betas=(0.9, 0.98), weight_decay=0, fused=True)
    shown_J = None
    while not clock.is_over and not stop:
        if len(order) < plan.num_rows:
            order = torch.randperm(len(rows), generator=generator).tolist()
        block, order = rows[order[: plan.num_rows]], order[plan.num_rows :]
        part = min(1.0, clock.part)
        accepts, entropies, _ = zip(*judged(head, block, num_steps, chains(block, num_steps)))
        accept_JN, weight = torch.stack(accepts), max(0.0, 1 - part / plan.entropy_until)
        lost = 1 - accept_JN.cumprod(0).mean()
        (weight * torch.stack(entropies).mean() + (1 - weight) * lost).backward()
        torch.nn.utils.clip_grad_norm_(head.weights.values(), 1.0)
        for group in optimizer.param_groups:
            rise = min(1, (clock.step + 1) / plan.warm_up)
            group["lr"] = group["full"] * rise * (1.02 + math.cos(math.pi * part)) / 2
        optimizer.step()
        optimizer.zero_grad()
        clock.step += 1
        accept_J = accept_JN.detach().mean(1)
        shown_J = accept_J if shown_J is None else shown_J.lerp(accept_J, 0.05)
        clock.tell(lambda: f"step {clock.step}, {clock.step * plan.num_rows / len(rows):.1f} times the text, "
                           f"a draft stands {shares(shown_J)}")


def shares(part_J: Tensor) -> str:
    return " ".join(f"{part:.1%}" for part in part_J.tolist())


@torch.no_grad()
def evaluate(head, text: Text, num_steps: int) -> list[str]:
    """Lines that say how often drafts for a text stand, step by step, and how many tokens each run of the model brings
    with so many drafts."""
    rows, accepts, agrees, greedy = blocks(text, num_steps), [], [], []
    for block in (rows[slice(start, start + 4)] for start in range(0, len(rows), 4)):
        chain_N = chains(block, num_steps)
        of_steps, _, logits = zip(*judged(head, block, num_steps, chain_N))
        accepts.append(torch.stack(of_steps))
        agrees.append(torch.stack([head.ids_C[logits_NC.argmax(-1)] == block.best_T.flatten()[chain_N + step + 1]
                                   for step, logits_NC in enumerate(logits)]).float())
        greedy.append(block.greedy_T.flatten()[chain_N])
    accept_JN, agree_JN, is_greedy_N = torch.cat(accepts, 1), torch.cat(agrees, 1), torch.cat(greedy)
    lines = []
    for what, part_JN in (("drawn text, 1 - TV", accept_JN[:, ~is_greedy_N]),
                          ("greedy text, 1 - TV", accept_JN[:, is_greedy_N]),
                          ("greedy text, likeliest token", agree_JN[:, is_greedy_N])):
        if part_JN.shape[1]:
            lines.append(f"{what}: {shares(part_JN.mean(1))}, {1 + part_JN.cumprod(0).sum(0).mean():.2f} tokens a run "
                         f"({part_JN.shape[1]} chains)")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# From the command line to files


def write(head, folder: Path) -> None:
    """Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, part = head.tensors(), folder / ".model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.settings(), indent=2) + "\n", "utf-8")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{folder}: {len(tensors)} tensors, {nbytes / 1e6:.1f} MB", flush=True)


def make_head(kind: str, model: Model, text: Text, held: Text, args: argparse.Namespace, seconds: float) -> None:
    """Trains a head, writes it and tells what it is worth on text that it has not seen."""
    count_V = torch.bincount(text.token_T[1:][text.drawn_T[:-1]], minlength=model.config.vocab)
    ids_C = count_V.topk(min(args.ids, model.config.vocab)).indices.sort().values
    covered = torch.isin(held.token_T[1:][held.drawn_T[:-1]], ids_C).float().mean()
    print(f"{kind}: its {len(ids_C)} ids are {covered:.1%} of the text held out", flush=True)
    torch.manual_seed(args.seed)
    clock = Clock(kind, seconds, args.steps)
    head = Eagle(model, text, ids_C) if kind == "eagle" else Medusa(model, text, ids_C)
    with held_signals() as signals:  # what has been learnt is written all the same
        train(head, text, clock, NUM_DRAFTS, Plan(), args.seed, signals)
        print(f"{kind}: {clock.step} steps in {time.perf_counter() - clock.start_s:.0f} s", flush=True)
        write(head, Path(args.out).expanduser() / FOLDERS[kind])
    head.weights = {name: weight.detach().bfloat16().float() for name, weight in head.weights.items()}  # as written
    for line in evaluate(head, held, NUM_DRAFTS):
        print(f"{kind}: {line}", flush=True)


FOLDERS = {"eagle": "eagle3", "medusa": "medusa"}
NUM_DRAFTS = 3  # a chain's steps in training; as many Medusa heads
SHARES = {"eagle": {"text": 0.46, "eagle": 0.42}, "medusa": {"text": 0.5, "medusa": 0.36},
          "both": {"text": 0.38, "eagle": 0.34, "medusa": 0.14}}  # of the time; the rest is for all that is between


def make_heads(args: argparse.Namespace) -> None:
    words = ["generate", "--no-prefix-cache"]  # what is found in a cache is not computed, and leaves no features
    for name in ("model", "threads"):
        words += [f"--{name}={getattr(args, name)}"] * (getattr(args, name) is not None)
    engine_args = make_parser(run.COMMANDS).parse_args(words)
    engine_args.sampling = {}
    engine = load_engine(engine_args)
    keep_memory()
    seconds = {kind: 60 * args.minutes * share for kind, share in SHARES[args.kind].items()}
    clock = Clock("text", math.inf if args.tokens else seconds["text"])
    text = write_text(engine, clock, args.tokens or math.inf, args.seed)
    held_T = text.doc_T % 19 == 18  # an odd number: of greedy and of drawn sequences
    text, held = text[~held_T], text[held_T]
    spent_s = time.perf_counter() - clock.start_s
    print(f"text: {len(text)} tokens and {len(held)} held out in {spent_s:.0f} s", flush=True)
    if not len(blocks(text, NUM_DRAFTS)) or not len(blocks(held, NUM_DRAFTS)):
        raise UsageError(f"{len(text) + len(held)} tokens are too few to train on: raise --minutes or --tokens")
    for kind in list(seconds)[1:]:
        make_head(kind, engine.model, text, held, args, seconds[kind])


def keep_memory() -> None:
    """Has glibc keep what is freed, however large the block, for the next one: fresh pages take longer to get than
    such a block takes to fill. (run.py, whose blocks stay, has it do the opposite.)"""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            mallopt(option, 1 << 30)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="train_head.py", description="Trains an EAGLE-3 head (FOLDER/eagle3), Medusa heads "
                    "(FOLDER/medusa) or both for a model, on text that the model writes. "
                    "Both together take 36 minutes on two cores, unless you say otherwise.",
                    epilog="With --tokens and --steps the same seed gives the same heads. Interrupted (Ctrl-C) while "
                           "it trains, it writes what it has.")
    parser.add_argument("kind", choices=tuple(SHARES))
    parser.add_argument("out", metavar="FOLDER", help="where the heads are written to")
    parser.add_argument("-m", "--model", metavar="MODEL", help="as for run.py")
    for name, kind, default, help in (
            ("minutes", POSITIVE, 36, "that all takes (36)"),
            ("tokens", COUNT, None, "of text, instead of what the time allows"),
            ("steps", COUNT, None, "of training, instead of what the time allows"),
            ("ids", COUNT, 4096, "that a head knows, the most frequent (4096)"),
            ("seed", COUNT, 1, "of text and heads (1)"), ("threads", THREADS, None, "as for run.py")):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    words = sys.argv[1:] if argv is None else argv
    try:
        make_heads(parser.parse_args(words))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"train_head.py: error: {run.one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
