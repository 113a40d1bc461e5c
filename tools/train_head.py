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
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from engine import Engine  # noqa: E402
from flags import COUNT, POSITIVE, Parser, UsageError, make_parser  # noqa: E402
from model import Model  # noqa: E402
from sampling import NO_DRAFT, SamplingParams  # noqa: E402
from scheduler import Request  # noqa: E402
from terminal import held_signals  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
# The text: what the model answers to many small questions, half of it greedily, half of it drawn

TASKS = """Explain {} to a curious teenager. | What are the main causes and effects of {}? | Write a short story about {}.
Give me five practical tips about {}. | Summarize the history of {} in two paragraphs. | Write a poem about {}.
What are common misconceptions about {}? | Compare {} with something similar and say how they differ.
Write an email to a colleague about {}. | List ten facts about {}. | Write a dialogue between two friends about {}.
Describe {} step by step. | What questions would an expert ask about {}? | Write a lesson plan about {}.
Write a Python function that has to do with {}, and explain it. | Define {} and give three examples.
Argue for and against {}. | How has {} changed over the last hundred years? | Write a news report about {}.
What should a beginner know about {}? | Give a recipe or a procedure that involves {}. | Write a product review about {}.
Write a small SQL schema for data about {}. | Make a table of terms about {} with their meanings.
What is the future of {}? | Write a quiz of five questions about {}, with answers. | Write a speech in praise of {}.
Translate a simple sentence about {} into French and Spanish, and explain the words. | Write a diary entry about {}.
Solve a word problem with numbers about {}, step by step. | Write a JSON document that describes {}."""
TOPICS = """photosynthesis, the Roman Empire, bicycles, bread, the Moon, climate change, chess, jazz, vaccines, earthquakes,
machine learning, the printing press, coffee, whales, democracy, volcanoes, black holes, electric cars, gardening,
the water cycle, money, the French Revolution, bees, football, sleep, sorting algorithms, DNA, the Silk Road, cats,
inflation, rivers, wind power, cooking rice, public libraries, the human heart, robots, mountains, trains, novels,
probability, the Internet, honesty, running, glass, the Great Wall of China, antibiotics, painting, data privacy,
gravity, school, maps, the violin, owls, recycling, space travel, tea, friendship, prime numbers, bridges, the weather,
small businesses, tourism, plastic, dinosaurs, photography, a job interview, computer networks, the immune system, rain,
fractions, the theatre, migration, clocks, the ocean floor, working from home, solar panels, salt, ants, ancient Egypt,
a city park, unit testing, moving house, a long winter, the stock market, healthy food, dogs, learning a language"""
BEGINNINGS = ('def read_{0}(path):\n    """Reads a file about {1}."""\n', "class {0}:\n    def __init__(self, name):\n",
              "import random\n\n# A small simulation of {1}\n", "# {1}\n\n## Introduction\n\n", "The story of {1} begins with",
              "Most people who think about {1}", "In the early morning, when nobody was thinking of {1},",
              "Question: What is {1}?\nAnswer:")
ANSWER_TOKENS = (200, 400)  # the longest answers, at least and at most


def prompts(engine: Engine, seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Each task with each topic once, in an order of its own; one in six is a text to go on with, no question."""
    chance, tokenizer = random.Random(seed), engine.tokenizer
    tasks = [task.strip() for line in TASKS.split("\n") for task in line.split("|")]
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    pairs = list(itertools.product(tasks, topics))
    for number in itertools.count():
        if number % len(pairs) == 0:
            chance.shuffle(pairs)
        task, topic = pairs[number % len(pairs)]
        if number % 6 == 5 or tokenizer.chat_template is None:
            ids = tokenizer.encode(chance.choice(BEGINNINGS).format(topic.replace(" ", "_"), topic))
        else:
            ids = tokenizer.chat([{"role": "user", "content": task.format(topic)}])
        most = min(chance.randint(*ANSWER_TOKENS), engine.capacity - len(ids) - 1)
        temperature = 0.0 if number % 2 else chance.choice((0.7, 0.8, 0.9, 1.0))
        yield ids, SamplingParams(max_tokens=most, temperature=temperature, seed=seed + number)


@dataclass
class Text:
    """All sequences one after the other, and what the model computed at each token. `drawn_T`: whether the model wrote
    the token after it; `greedy_T`: at temperature 0. Where it did, `best_T` is the likeliest id, and `log_sum_T` the
    logarithm of the sum of exponentiated logits."""

    token_T: Tensor
    doc_T: Tensor  # number of its sequence
    drawn_T: Tensor
    greedy_T: Tensor
    h_TD: Tensor
    taps_TX: Tensor
    log_sum_T: Tensor
    best_T: Tensor

    def __getitem__(self, rows) -> Text:
        return Text(*(getattr(self, field.name)[rows] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.token_T)


class Recorder:
    """A drafter that drafts nothing and keeps the hidden rows that it is shown: so features come with the text. What a
    row's logits are like it notes when the engine has them computed for the draw."""

    name, is_free = "recorder", True

    def __init__(self, model: Model):
        last = len(model.layers) - 1
        self.layers = [min(max(layer, 0), last) for layer in (2, (last + 1) // 2, last - 2)]
        self.taps = tuple(sorted(set(self.layers)))  # a step hands them out in this order, each once
        self.logits, self.num_seen = model.logits, 0
        self.steps: list[tuple[Tensor, Tensor]] = []  # rows of h and of all taps side by side
        self.rows: dict[Request, list[int]] = {}  # of each place of a request, among all rows that were seen
        self.drawing: list[int] = []  # of them those whose logits were computed, and what these are like:
        self.likes: list[tuple[Tensor, Tensor, Tensor]] = []  # the greatest logit, its id, the logarithm of the sum

    def watched_logits(self, h_LD: Tensor) -> Tensor:
        logits_LV = self.logits(h_LD)
        self.likes.append((*logits_LV.max(-1), logits_LV.logsumexp(-1)))
        return logits_LV

    def observe(self, spans: Sequence[tuple[Request, int, int]], h_TD: Tensor, taps: Sequence[Tensor]) -> None:
        taps_TX = torch.cat([taps[self.taps.index(layer)] for layer in self.layers], 1)
        self.steps.append((h_TD.bfloat16(), taps_TX.bfloat16()))
        for request, start, end in spans:  # what was preempted is computed again
            first = self.num_seen
            self.num_seen += end - start
            self.rows.setdefault(request, [])[start:end] = range(first, self.num_seen)
            if end == len(request.tokens):  # the next token is drawn
                self.drawing.append(self.num_seen - 1)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list:
        return [NO_DRAFT] * len(requests)

    def forget(self, request: Request) -> None:
        pass

    def text(self, output_VD: Tensor) -> Text:
        requests = list(self.rows)
        row_T = torch.tensor([row for request in requests for row in self.rows[request]])
        counts = [len(self.rows[request]) for request in requests]

        def of_each(values: Callable[[Request], Sequence]) -> Tensor:
            return torch.tensor([x for request, count in zip(requests, counts) for x in values(request)[:count]])

        h_TD, taps_TX = (torch.cat(parts)[row_T] for parts in zip(*self.steps))
        greatest_L, best_L, log_sum_L = map(torch.cat, zip(*self.likes))
        at_T, is_drawn_T = torch.zeros(self.num_seen, dtype=torch.int64), torch.zeros(self.num_seen, dtype=torch.bool)
        at_T[self.drawing], is_drawn_T[self.drawing] = torch.arange(len(self.drawing)), True
        at_T, is_drawn_T = at_T[row_T], is_drawn_T[row_T]
        # Logits will be computed from these rows, and differ a little from those of quantized kernels. So that the
        # likeliest token has the probability that it had, the sum takes on its logit's difference.
        again_T = torch.cat([(h_ID.float() * output_VD[id_I]).sum(-1)
                             for h_ID, id_I in zip(h_TD.split(4096), best_L[at_T].split(4096))])
        log_sum_T = log_sum_L[at_T] - greatest_L[at_T] + again_T
        return Text(of_each(lambda r: r.tokens), torch.arange(len(requests)).repeat_interleave(torch.tensor(counts)),
                    is_drawn_T, of_each(lambda r: [r.params.temperature == 0] * len(r.tokens)), h_TD, taps_TX,
                    log_sum_T.masked_fill(~is_drawn_T, math.inf), best_L[at_T])


def write_text(engine: Engine, clock: Clock, num_tokens: float, seed: int) -> Text:
    """Has the model answer prompts until there are so many tokens, prompts included, or the time is over."""
    recorder, source = Recorder(engine.model), prompts(engine, seed)
    engine.draft_with(recorder)
    engine.model.logits = recorder.watched_logits
    while recorder.num_seen < num_tokens and not clock.is_over:
        while len(engine.writers) < engine.config.max_requests:
            engine.submit(*next(source))
        engine.step()
        clock.tell(lambda: f"{recorder.num_seen} tokens of text")
    for request in list(engine.writers):
        engine.abort(request)
    engine.model.logits = recorder.logits
    return recorder.text(table(engine.model, engine.model.output))


def table(model: Model, matrix) -> Tensor:
    """A matrix with a row for each id, as numbers, however it is stored."""
    return model.ops.embed(matrix.weight, torch.arange(model.config.vocab)).float()


class Clock:
    """How much of a phase is over, by the time it may take or by the number of its steps; and a line now and then."""

    def __init__(self, what: str, seconds: float, num_steps: int | None = None):
        self.what, self.seconds, self.num_steps = what, seconds, num_steps
        self.start_s = self.told_s = time.perf_counter()
        self.step = 0

    @property
    def part(self) -> float:
        if self.num_steps is not None:
            return self.step / self.num_steps
        return (time.perf_counter() - self.start_s) / self.seconds

    @property
    def is_over(self) -> bool:
        return self.part >= 1

    def tell(self, line: Callable[[], str], every_s: float = 20) -> None:
        now_s = time.perf_counter()
        if now_s - self.told_s >= every_s:
            self.told_s = now_s
            print(f"{self.what} {now_s - self.start_s:5.0f} s: {line()}", flush=True)


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
        """Sets the head to the best that is linear: the model's next hidden row by least squares from the taps (through
        fc) and the token's embedding (through values and output, as far as their rank goes, of heads that see their
        own entry: a query that equals its key finds itself). What else there is begins small, and is learnt."""
        D, A, group = self.config.hidden, self.config.head_dim, self.config.heads // self.config.kv_heads
        at_T = (text.doc_T[1:] == text.doc_T[:-1]).nonzero()[:, 0][:MOST_FITTED]
        x_TI = torch.cat((text.taps_TX[at_T].float() / self.size_X,
                          self.norm(self.embed_VD[text.token_T[at_T + 1]], "midlayer.input_layernorm")), -1)
        y_TD = text.h_TD[at_T + 1].float() / self.weights["norm.weight"]
        from_taps_DX, from_embedding_DD = least_squares(x_TI, y_TD).split((len(self.size_X), D), 1)
        self.weights["fc.weight"] = from_taps_DX.contiguous()
        left_DI, size_I, right_ID = torch.linalg.svd(from_embedding_DD)
        q_OI, k_OI, v_OI, o_OI = (self.weights[f"midlayer.self_attn.{kind}_proj.weight"] for kind in "qkvo")
        rank, num_sharp = min(D, len(v_OI)), -(-group // 2)  # so many of the heads that share a key see themselves
        q_OI.unflatten(0, (-1, group, A))[:, :num_sharp] = 2 * k_OI.unflatten(0, (-1, 1, A))
        v_OI.mul_(0.1)[:rank, :D] = size_I[:rank, None].sqrt() * right_ID[:rank]
        from_values_DO = F.pad(left_DI[:, :rank] * size_I[:rank].sqrt(), (0, len(v_OI) - rank)) / num_sharp
        o_OI.mul_(0.1).unflatten(1, (-1, group, A))[:, :, :num_sharp] += from_values_DO.unflatten(1, (-1, 1, A))
        h_TD = x_TI[:, : len(self.size_X)] @ self.weights["fc.weight"].T
        h_TD += x_TI[:, len(self.size_X) :] @ ((left_DI[:, :rank] * size_I[:rank]) @ right_ID[:rank]).T
        ffn = model.layers[-1].ffn  # its first two matrices; what its third makes of them is fitted
        gate_up_2FD = ffn.gate_up(torch.eye(D, dtype=model.dtype)).T.float()
        self.weights["midlayer.post_attention_layernorm.weight"] = ffn.norm_D.float().clone()
        for name, weight_FD in zip(("gate", "up"), gate_up_2FD.chunk(2)):
            self.weights[f"midlayer.mlp.{name}_proj.weight"] = weight_FD.contiguous()
        act_TF = self.activation(h_TD)
        size_F = act_TF.square().mean(0).sqrt().clamp(min=1e-6)
        self.weights["midlayer.mlp.down_proj.weight"] = least_squares(act_TF / size_F, y_TD - h_TD) / size_F

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
    """The matrix W_OI for which W x comes closest to y, with a little ridge: x may have fewer rows than columns."""
    gram_II = (x_TI.T @ x_TI).double()
    gram_II.diagonal().add_(0.01 * gram_II.diagonal().mean())
    return torch.linalg.solve(gram_II, (x_TI.T @ y_TO).double()).T.float()


class Medusa:
    """Medusa's heads: from a token's hidden row, head i tells the token i + 2 places on. One ResBlock each.

    Of a head's (V, D) matrix the rows of the known ids are trained. The others are written as zeros: their logits are 0,
    and count so in the sum here. The known ones begin as the model's own, less the mean of the others.
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

    def size(self, weight: Tensor, num_ids: int) -> float:
        """How large a tensor's numbers are, to which its rate is in proportion: what least squares found is small."""
        size = float(weight.detach().square().mean().sqrt()) or weight.shape[-1] ** -0.5
        return size * (self.head if weight.shape[0] == num_ids else 1)


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
    """Of logits and the model's probabilities: the chance sum min(p, q) that a draft of q stands, and the cross-entropy.
    The two gradients share one softmax, and what is kept of it is as large as the logits once, not six times."""

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
    """For each step, for each chain: the chance that its draft stands, the cross-entropy, and the likeliest draft."""
    p_TC = (block.h_TD.flatten(0, 1).float() @ head.known_CD.T).sub_(block.log_sum_T.flatten()[:, None]).exp_()
    for step, h_RTD in enumerate(head.hidden(block, num_steps)):
        logits_NC = head.logits(h_RTD.flatten(0, 1)[chain_N], step)
        yield *Judgement.apply(logits_NC, p_TC[chain_N + step + 1], head.outside), logits_NC.detach()


def train(head, text: Text, clock: Clock, num_steps: int, plan: Plan, seed: int) -> None:
    """AdamW; the rate rises over the first steps and falls by a cosine to the end of the time. The loss begins as
    cross-entropy, whose gradient is strong where nothing is right yet, and becomes that of the acceptance: what is lost
    of the drafts' length, 1 - mean over steps of prod a_i."""
    rows, order = blocks(text, num_steps), []
    generator = torch.Generator().manual_seed(seed)
    for weight in head.weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW([{"params": [weight], "full": plan.rate * plan.size(weight, len(head.ids_C))}
                                   for weight in head.weights.values()], betas=(0.9, 0.98), weight_decay=0, fused=True)
    shown_J = None
    with held_signals() as signals:
        while not clock.is_over and not signals:
            if len(order) < plan.num_rows:
                order = torch.randperm(len(rows), generator=generator).tolist()
            block, order = rows[order[: plan.num_rows]], order[plan.num_rows :]
            part, chain_N = min(1.0, clock.part), chains(block, num_steps)
            accepts, entropies, _ = zip(*judged(head, block, num_steps, chain_N))
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
    """Lines that say how often drafts for a text stand, step by step, and how many tokens a step of the model brings."""
    rows, accepts, agrees, greedy = blocks(text, num_steps), [], [], []
    for block in (rows[slice(start, start + 4)] for start in range(0, len(rows), 4)):
        chain_N = chains(block, num_steps)
        accept_, _, logits_ = zip(*judged(head, block, num_steps, chain_N))
        accepts.append(torch.stack(accept_))
        agrees.append(torch.stack([head.ids_C[logits_NC.argmax(-1)] == block.best_T.flatten()[chain_N + step + 1]
                                   for step, logits_NC in enumerate(logits_)]).float())
        greedy.append(block.greedy_T.flatten()[chain_N])
    accept_JN, agree_JN, is_greedy_N = torch.cat(accepts, 1), torch.cat(agrees, 1), torch.cat(greedy)
    lines = []
    for what, part_JN in (("drawn text, 1 - TV", accept_JN[:, ~is_greedy_N]),
                          ("greedy text, 1 - TV", accept_JN[:, is_greedy_N]),
                          ("greedy text, likeliest token", agree_JN[:, is_greedy_N])):
        if part_JN.shape[1]:
            lines.append(f"{what}: {shares(part_JN.mean(1))}, {1 + part_JN.cumprod(0).sum(0).mean():.2f} tokens a step "
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
    train(head, text, clock, NUM_DRAFTS, Plan(), args.seed)
    print(f"{kind}: {clock.step} steps in {time.perf_counter() - clock.start_s:.0f} s", flush=True)
    write(head, Path(args.out).expanduser() / {"eagle": "eagle3"}.get(kind, kind))
    for line in evaluate(head, held, NUM_DRAFTS):
        print(f"{kind}: {line}", flush=True)


NUM_DRAFTS = 3  # a chain's steps in training; as many Medusa heads
SHARES = {"eagle": {"text": 0.36, "eagle": 0.52}, "medusa": {"text": 0.5, "medusa": 0.36},
          "both": {"text": 0.27, "eagle": 0.42, "medusa": 0.16}}  # of the time; the rest is for all that is between


def make_heads(args: argparse.Namespace) -> None:
    words = ["generate", "--no-prefix-cache"]  # what is found in a cache is not computed, and leaves no features
    for name in ("model", "threads"):
        words += [f"--{name}={getattr(args, name)}"] * (getattr(args, name) is not None)
    engine_args = make_parser(run.COMMANDS).parse_args(words)
    engine_args.sampling = {}
    engine = run.load_engine(engine_args)
    keep_memory()
    start_s, seconds = time.perf_counter(), {kind: 60 * args.minutes * share for kind, share in SHARES[args.kind].items()}
    text = write_text(engine, Clock("text", seconds.pop("text")), args.tokens or math.inf, args.seed)
    held_T = text.doc_T % 19 == 18
    text, held = text[~held_T], text[held_T]
    print(f"text: {len(text)} tokens and {len(held)} held out in {time.perf_counter() - start_s:.0f} s", flush=True)
    if not len(blocks(text, NUM_DRAFTS)) or not len(blocks(held, NUM_DRAFTS)):
        raise UsageError(f"{len(text) + len(held)} tokens are too few to train on: raise --minutes or --tokens")
    for kind in seconds:
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
                    epilog="With --tokens and --steps the same seed gives the same heads. Interrupted (Ctrl-C) while it "
                           "trains, it writes what it has.")
    parser.add_argument("kind", choices=tuple(SHARES))
    parser.add_argument("out", metavar="FOLDER", help="where the heads are written to")
    parser.add_argument("-m", "--model", metavar="MODEL", help="as for run.py")
    parser.add_argument("--minutes", type=POSITIVE, default=36, metavar="N", help="that all takes (36)")
    parser.add_argument("--tokens", type=COUNT, metavar="N", help="of text, instead of what the time allows")
    parser.add_argument("--steps", type=COUNT, metavar="N", help="of training, instead of what the time allows")
    parser.add_argument("--ids", type=COUNT, default=4096, metavar="N", help="that a head knows: the most frequent (4096)")
    parser.add_argument("--seed", type=COUNT, default=1, metavar="N", help="of text and heads (1)")
    parser.add_argument("--threads", type=COUNT, metavar="N", help="as for run.py")
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
