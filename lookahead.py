"""Drafters that look ahead from the model's own hidden rows: by a network that continues them, or by Medusa's heads;
one token after the other, or as a tree.

Owns what such a drafter remembers of requests, and how trees of drafts grow. Knows nothing of what the networks compute
(heads.py), how drafts are judged (sampling.accept) or when they pay (speculative.py). Start at `Follower`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import torch
from torch import Tensor

import kernels
from heads import MedusaHead, Network
from kernels import DrawRules, sent
from kvcache import Cache
from model import MOST_ROWS, Batch, Model, id_tensor
from sampling import NO_DRAFT, Draft, noise_key
from scheduler import Request
from speculative import SURE, Chain, Manner, grow


@dataclass(frozen=True)
class TreeShape:
    """Of drafts in a tree: the `width` likeliest tokens of a level are gone on from, to `depth` levels. ValueError if
    there would be more of them than a step can take."""

    width: int
    depth: int

    def __post_init__(self):
        if self.width < 1 or self.depth < 1 or self.width * (self.depth - 1) >= MOST_ROWS:
            raise ValueError(f"a draft tree of width {self.width} and depth {self.depth} has more than {MOST_ROWS - 1} "
                             "tokens to go on from: choose a smaller one")


@dataclass(eq=False)
class Node:
    """A token of a draft tree; `score`: the sum of logarithms of chances on the way to it."""

    id: int
    parent: "Node | None"
    score: float
    row: Tensor | None = None  # the network's, that tells what follows


class Tree:
    """A request's draft tree while it grows, level by level, as in EAGLE-2 (Li et al. 2024, 2406.16858): the `width`
    likeliest followers of each token that is gone on from are put into it, and of all of a level the likeliest `width`
    are gone on from. What it proposes are the likeliest of all."""

    def __init__(self, request: Request, shape: TreeShape, row: Tensor | None = None):
        self.request, self.shape = request, shape
        self.root = Node(request.tokens[-1], None, 0.0, row)
        self.nodes: list[Node] = []
        self.level = [self.root]  # to be gone on from
        self.opened: list[Node] = []  # all that were, the root aside

    def path(self, node: Node) -> list[int]:
        return [] if node is self.root else [*self.path(node.parent), node.id]

    def rules(self) -> list[DrawRules]:
        """Of the token after each that is gone on from."""
        return [self.request.sampler.rules_along(Draft(tuple(self.path(node))))[-1] for node in self.level]

    def grow(self, rows: Sequence[tuple[DrawRules, Tensor, Tensor]]) -> None:
        """Adds a level: for each token that is gone on from its rules, and what `likely` says of its row."""
        new = []
        for node, row in zip(self.level, rows, strict=True):
            ids, scores = self._likeliest(*row, len(self.path(node)))
            new += [Node(id, node, node.score + score) for id, score in zip(ids, scores)]
        self.nodes += new
        self.level = sorted(new, key=lambda node: -node.score)[: self.shape.width]
        self.opened += self.level

    def _likeliest(self, rules: DrawRules, score_C: Tensor, id_C: Tensor,
                   depth: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens after a path of that length, with the noise of the draw itself, and their chances'
        logarithms; none where a number is not one."""
        if not score_C[0].isfinite():  # topk takes what is not a number for the greatest
            return [], []
        if rules.temperature > 0:
            scaled_C = (score_C.double() - score_C[0]) / rules.temperature
            kept_C = kernels.candidates(scaled_C, rules)
            id_C = id_C[kept_C]
            key = noise_key(self.request.params.seed, len(self.request.tokens) + depth, "draw")
            score_C = torch.log_softmax(scaled_C[kept_C] + kernels.gumbel(key, id_C), 0)
        score_C, place_C = score_C.topk(min(self.shape.width, len(score_C)))
        return id_C[place_C].tolist(), score_C.tolist()

    def draft(self, limit: int) -> Draft:
        """Its `limit` likeliest tokens, the likeliest first: no token is likelier than the one it follows."""
        best = sorted(self.nodes, key=lambda node: -node.score)[:limit]
        rows = {self.root: 0} | {node: row for row, node in enumerate(best, 1)}
        return Draft(tuple(node.id for node in best), None, tuple(rows[node.parent] for node in best))


def grow_trees(trees: Sequence[Tree], logits_LV: Tensor) -> None:
    """Adds a level to each: a row of logits for each token that is gone on from, one tree's after the other's."""
    rules = [rules for tree in trees for rules in tree.rules()]
    rows = iter(list(zip(rules, *likely(logits_LV, rules), strict=True)))
    for tree in trees:
        tree.grow(list(islice(rows, len(tree.level))))


def likely(logits_LV: Tensor, rules: Sequence[DrawRules]) -> tuple[Tensor, Tensor]:
    """Of each row the tokens that are considered, by their rules the likeliest first: logits (at temperature 0 the
    chances' logarithms) and ids, (L, C) each and on the host."""
    x_LV = logits_LV[:, : rules[0].vocab]
    if not all(row.leave_logits_alone for row in rules):
        x_LV = torch.stack([kernels.adjusted(x_V, row) for x_V, row in zip(x_LV.cpu(), rules)])
    if any(row.temperature == 0 for row in rules):
        x_LV = torch.log_softmax(x_LV, -1)
    score_LC, id_LC = x_LV.topk(min(CONSIDERED, x_LV.shape[1]))
    return score_LC.cpu(), id_LC.cpu()


CONSIDERED = 256  # tokens, the likeliest: noise may make another the likeliest, but seldom, and then the draft falls


# ---------------------------------------------------------------------------------------------------------------------
# Drafters


@dataclass(eq=False)
class Trail:
    """What a network has yet to read of a request: what it has seen of its places from `start` on."""

    start: int
    rows: deque[Tensor] = field(default_factory=deque)  # (I,) each

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def read(self, num: int) -> list[Tensor]:
        """Takes the first `num` rows from it."""
        self.start += num
        return [self.rows.popleft() for _ in range(num)]


class Follower:
    """Drafts by a network that continues the model's hidden rows, one token after the other or as a tree.

    Its keys and values lie in pages of the same numbers as the model's, in memory of its own: what the prefix cache
    finds has them, too. (The last place of a shared page knows the token that followed it first; drafts of another
    request may be the worse for it.) It reads prompts as they are computed, and tokens that stand when it is asked the
    next time: then from the model's own rows, in place of the ones that it made itself for its drafts.
    """

    is_free, sure = False, SURE
    MOST_KEPT = 64  # rows of decoded tokens, where there is no room for drafts; older ones it never reads

    def __init__(self, network: Network, model: Model, shape: TreeShape | None = None, manner: Manner = Manner()):
        self.network, self.model, self.shape, self.manner = network, model, shape, manner
        self.name, self.taps = network.name, network.taps
        self.most_opened = shape.width * (shape.depth - 1) if shape else 0
        self.trails: dict[Request, Trail] = {}

    def bind(self, cache: Cache) -> None:
        self.cache, self.trails = cache, {}
        self.capacity = min(self.model.context, cache.capacity)
        config = self.network.config
        # Pages of a group that keeps all tokens, if there is one.
        group = next((i for i, group in enumerate(cache.groups) if not group.window), 0)
        num_pages, dtype = cache.groups[group].pool.num_pages, cache.layers[0].k.dtype
        self.kv = self.model.ops.new_kv(num_pages, cache.page_size, config.kv_heads, config.head_dim, config.head_dim,
                                        dtype, self.model.device, group)
        for memory in (self.kv.k, self.kv.v):
            memory.zero_()  # what was not written is read in rare cases, and should not tell one run from the next

    @torch.inference_mode()
    def observe(self, spans: Sequence[tuple[Request, int, int]], h_TD: Tensor, taps: Sequence[Tensor]) -> None:
        rows = self.network.seen(h_TD, taps).split([end - start for _, start, end in spans])
        prompts = []
        for (request, start, end), x_NI in zip(spans, rows):
            trail = self.trails.get(request)
            if trail is None or trail.end != start:  # new, preempted since, or not shown while drafts rested
                trail = self.trails[request] = Trail(start)
            trail.rows += x_NI
            last = min(end, len(request.tokens) - 1)  # the token after it is known
            if start < request.num_prompt and last > trail.start:
                prompts.append((request, last))
            else:
                trail.read(max(0, len(trail.rows) - self.MOST_KEPT))
        if prompts:
            self._read(prompts)
            for request, _ in prompts:  # not to keep the whole prompt's rows for the sake of one
                trail = self.trails[request]
                trail.rows = deque(row.clone() for row in trail.rows)

    def forget(self, request: Request) -> None:
        self.trails.pop(request, None)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        chains = [Chain(request, limit) for request, limit in zip(requests, limits, strict=True)
                  if limit > 0 and self._is_ready(request, limit)]
        if not chains:
            return [NO_DRAFT] * len(requests)
        last_LD, g_LD = self._read([(chain.request, len(chain.request.tokens) - 1) for chain in chains])
        if self.shape is None:
            self._draft_chains(chains, g_LD)
            drafts = {chain.request: chain.draft for chain in chains}
        else:
            trees = [Tree(chain.request, self.shape, g_D) for chain, g_D in zip(chains, g_LD)]
            self._draft_trees(trees, dict(zip(trees, last_LD)))
            drafts = {chain.request: tree.draft(chain.limit) for chain, tree in zip(chains, trees)}
        return [drafts.get(request, NO_DRAFT) for request in requests]

    def _is_ready(self, request: Request, limit: int) -> bool:
        """Whether it has yet to read the row that the last token was drawn from (not so if that is a prompt's, and the
        rest of the prompt is read), and there are pages for what it computes."""
        trail, num_tokens = self.trails.get(request), len(request.tokens)
        end = num_tokens + max(limit, self.most_opened)
        if trail is None or not trail.rows or trail.end != num_tokens - 1 or end > self.capacity:
            return False
        if not self.cache.grow(request.lease, end):
            return False
        self.cache.reach(request.lease, num_tokens - 1, end)
        return True

    def _read(self, ends: Sequence[tuple[Request, int]]) -> tuple[Tensor, Tensor]:
        """Reads requests from the model's rows as far as place `end` of each: of each the last features, and the
        network's last row."""
        starts = [self.trails[request].start for request, _ in ends]
        tokens = [request.tokens[start + 1 : end + 1] for start, (request, end) in zip(starts, ends)]
        rows = [row for start, (request, end) in zip(starts, ends) for row in self.trails[request].read(end - start)]
        f_TD = self.network.features(torch.stack(rows))
        g_TD = self._forward([request for request, _ in ends], tokens, starts, f_TD)
        row_L = sent(id_tensor(end - 1 for end in accumulate(map(len, tokens))), g_TD.device)
        return f_TD[row_L], g_TD[row_L]

    def _forward(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], pasts: Sequence[int], f_TD: Tensor,
                 parents: Sequence[Sequence[int] | None] = ()) -> Tensor:
        batch = Batch.pack(self.cache, [request.lease.row for request in requests], tokens, pasts, (), parents=parents)
        return self.network.forward(batch, f_TD, self.kv)

    def _draft_chains(self, chains: Sequence[Chain], g_LD: Tensor) -> None:
        while True:
            going = grow(chains, self.network.logits(g_LD), self.model.ops, self.manner, self.sure)
            if not going:
                return
            chains, f_LD = [chains[i] for i in going], g_LD[sent(id_tensor(going), g_LD.device)]
            g_LD = self._forward([chain.request for chain in chains], [chain.ids[-1:] for chain in chains],
                                 [len(chain.request.tokens) + len(chain.ids) - 2 for chain in chains], f_LD)

    def _draft_trees(self, trees: Sequence[Tree], last: dict[Tree, Tensor]) -> None:
        """Level by level; `last` are the features of the text's last row."""
        for depth in range(1, self.shape.depth + 1):
            rows = [node.row for tree in trees for node in tree.level]
            grow_trees(trees, self.network.logits(torch.stack(rows)))
            trees = [tree for tree in trees if tree.level]
            if depth == self.shape.depth or not trees:
                return
            self._go_on(trees, last)

    def _go_on(self, trees: Sequence[Tree], last: dict[Tree, Tensor]) -> None:
        """Computes the rows of each tree's newest level, and with them once more the levels before it and the text's
        last row: rows of one step can be in sight of their own followers alone."""
        tokens, parents, features = [], [], []
        for tree in trees:
            places = {tree.root: 0} | {node: i for i, node in enumerate(tree.opened, 1)}
            tokens.append([node.id for node in places])
            parents.append([places[node.parent] for node in tree.opened])
            features += [last[tree], *(node.parent.row for node in tree.opened)]
        pasts = [len(tree.request.tokens) - 2 for tree in trees]
        g_TD = self._forward([tree.request for tree in trees], tokens, pasts, torch.stack(features), parents)
        for tree, end in zip(trees, accumulate(map(len, tokens))):
            for node, g_D in zip(tree.level, g_TD[end - len(tree.level) : end]):
                node.row = g_D


class Medusa:
    """Drafts by Medusa's heads, all of which read the row that the last token was drawn from."""

    name, is_free, taps, sure = "medusa", False, (), SURE

    def __init__(self, heads: Sequence[MedusaHead], model: Model, shape: TreeShape | None = None,
                 manner: Manner = Manner()):
        self.heads, self.model, self.shape, self.manner = heads, model, shape, manner
        self.rows: dict[Request, tuple[int, Tensor]] = {}  # the last that was seen of each, and the place after it

    def bind(self, cache: Cache) -> None:
        self.rows = {}

    def observe(self, spans: Sequence[tuple[Request, int, int]], h_TD: Tensor, taps: Sequence[Tensor]) -> None:
        ends = accumulate(end - start for _, start, end in spans)
        self.rows |= {request: (place, h_TD[end - 1].clone()) for (request, _, place), end in zip(spans, ends)}

    def forget(self, request: Request) -> None:
        self.rows.pop(request, None)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        chains = [Chain(request, limit) for request, limit in zip(requests, limits, strict=True)
                  if limit > 0 and self.rows.get(request, (None,))[0] == len(request.tokens) - 1]
        trees = [Tree(chain.request, self.shape) for chain in chains] if self.shape else []
        growing = list(range(len(chains)))
        for head in self.heads[: self.shape.depth if self.shape else None]:
            if not growing:
                break
            logits_LV = head(torch.stack([self.rows[chains[i].request][1] for i in growing]))
            if self.shape is None:
                going = grow([chains[i] for i in growing], logits_LV, self.model.ops, self.manner, self.sure)
                growing = [growing[i] for i in going]
            elif rows := [logits_V for tree, logits_V in zip(trees, logits_LV) for _ in tree.level]:
                grow_trees(trees, torch.stack(rows))
        drafts = {chain.request: chain.draft for chain in chains}
        drafts |= {tree.request: tree.draft(chain.limit) for tree, chain in zip(trees, chains)}
        return [drafts.get(request, NO_DRAFT) for request in requests]
