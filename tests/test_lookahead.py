"""Drafters that read the model's hidden rows: what they propose against a drafter that computes everything anew, heads
that are always right, and tokens against those of plain decoding."""

from collections import Counter

import pytest
import tiny
import torch
from tiny_heads import eagle_tensors, mtp_tensors, write_eagle, write_medusa

import kernels
import native
from checkpoint import open_checkpoint
from engine import Engine, EngineConfig
from heads import open_eagle, open_medusa, open_mtp
from kvcache import Cache, Lease
from lookahead import Follower, Medusa, TreeShape
from model import Batch, load_model
from sampling import Draft, SamplingParams
from speculative import Manner, Trial

CONFIG = tiny.tiny_config("llama", num_hidden_layers=3)
PROMPTS = [[(7 * i + 3 * j * j) % 256 for j in range(n)] for i, n in enumerate((1, 7, 8, 30, 64))]
PROMPTS.append(PROMPTS[4][:48] + [9] * 5)  # a prefix of six pages is cached, or being computed
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.2,
                         frequency_penalty=0.3, min_tokens=4, logprobs=1)
METHODS = ("eagle1", "eagle3", "mtp", "medusa")
SLOW = pytest.mark.slow
SOME_METHODS = [pytest.param(method, marks=SLOW if method in ("eagle1", "mtp") else ()) for method in METHODS]


@pytest.fixture(autouse=True)
def drafts_never_rest(monkeypatch):
    """Whatever they cost."""
    monkeypatch.setattr(Trial, "LOSS", 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = tiny.tiny_tensors(CONFIG) | mtp_tensors(CONFIG)
    return tiny.write_safetensors(tmp_path_factory.mktemp("model"), "llama", tensors=tensors, num_hidden_layers=3,
                                  num_nextn_predict_layers=1)


def load(folder, where, ops=kernels):
    """The model, and for each method its network, or the list of heads."""
    with open_checkpoint(folder) as checkpoint:
        dtype = torch.float64 if ops is kernels else torch.float32
        model = load_model(checkpoint, dtype, ops=ops)
        eagle3 = write_eagle(where / "3", CONFIG, 3, draft_vocab=200, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        return model, {"eagle1": open_eagle(write_eagle(where / "1", CONFIG, 1), model),
                       "eagle3": open_eagle(eagle3, model), "mtp": open_mtp(checkpoint, model),
                       "medusa": open_medusa(write_medusa(where / "m", CONFIG, 8), model)}


@pytest.fixture(scope="module")
def loaded(folder, tmp_path_factory):
    return load(folder, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def loaded_native(folder, tmp_path_factory, native_ops):
    return load(folder, tmp_path_factory.mktemp("heads"), native_ops)


def engine_with(model, network, shape=None, **config):
    """An engine with a drafter that goes on however unsure it is, as random heads are."""
    engine = Engine(model, EngineConfig(**({"num_pages": 64, "page_size": 8} | config)))
    is_coupled = engine.config.verify == "coupled"
    manner = Manner(is_coupled, keeps_probs=not is_coupled)
    drafter = (Medusa(network, model, shape, manner) if isinstance(network, list)
               else Follower(network, model, shape, manner))
    drafter.sure = 0
    engine.draft_with(drafter)
    return engine


def tokens_of(completions):
    return [(c.token_ids, [entry["logprob"] for entry in c.logprobs or ()]) for c in completions]


def answers_of(model):
    return {params: tokens_of(Engine(model, EngineConfig(num_pages=64, page_size=8)).generate(PROMPTS, params))
            for params in (GREEDY, SAMPLED)}


@pytest.fixture(scope="module")
def plain(loaded):
    return answers_of(loaded[0])


@pytest.fixture(scope="module")
def plain_native(loaded_native):
    return answers_of(loaded_native[0])


# ---- what is proposed


class Anew:
    """Drafts of one text by computing all of it anew: the model's rows, then the network over all of them."""

    def __init__(self, model, network):
        self.model, self.network = model, network

    def rows(self, tokens):
        """What the network keeps of the model's rows; for Medusa the last row."""
        cache = Cache(self.model.kv_specs(), 32, 8, torch.float64)
        lease = Lease()
        cache.open(lease)
        cache.grow(lease, len(tokens))
        taps = () if isinstance(self.network, list) else self.network.taps
        h_TD, taps = self.model.forward(Batch.pack(cache, [lease.row], [tokens], [0], (), taps=taps), cache)
        return h_TD if isinstance(self.network, list) else self.network.features(
            self.network.seen(h_TD, taps)).clone()

    def after(self, tokens, f_TD):
        """The network's row after each of `tokens[1:]`, joined with f_TD."""
        cache, config = Cache(self.model.kv_specs(), 32, 8, torch.float64), self.network.config
        lease = Lease()
        cache.open(lease)
        cache.grow(lease, len(tokens))
        kv = self.model.ops.new_kv(32, 8, config.kv_heads, config.head_dim, config.head_dim, torch.float64, "cpu", 0)
        return self.network.forward(Batch.pack(cache, [lease.row], [tokens[1:]], [0], ()), f_TD, kv)

    def logits(self, tokens, path, f_TD=None):
        """Of the token after `tokens` and a path of drafts."""
        f_TD = self.rows(tokens[:-1]) if f_TD is None else f_TD
        if isinstance(self.network, list):
            return self.network[len(path)](f_TD[-1:])[0]
        g_TD = self.after(tokens, f_TD)
        if not path:
            return self.network.logits(g_TD[-1:])[0]
        return self.logits([*tokens, path[0]], path[1:], torch.cat((f_TD, g_TD[-1:])))

    def chain(self, tokens, num):
        ids = []
        for _ in range(num):
            ids.append(int(self.logits(tokens, ids).argmax()))
        return ids

    def tree(self, tokens, shape, num):
        """The likeliest of all paths whose every beginning is among the likeliest of its level."""
        level, found = [((), 0.0)], []
        for _ in range(shape.depth):
            new = []
            for path, score in level:
                log_V = torch.log_softmax(self.logits(tokens, list(path)), -1)
                new += [((*path, int(id)), score + float(log_V[id])) for id in log_V.topk(shape.width).indices]
            found += new
            level = sorted(new, key=lambda item: -item[1])[: shape.width]
        return {path for path, _ in sorted(found, key=lambda item: -item[1])[:num]}


def watched(engine, check, answers=None):
    """Every draft that is proposed is given to `check`; with `answers`, what is proposed then is the known answer, with
    every fifth token wrong. Returns the list that drafts come to."""
    drafter, seen = engine.drafting.drafter, []
    propose = drafter.propose

    def checked(requests, limits):
        drafts = propose(requests, limits)
        for request, limit, draft in zip(requests, limits, drafts):
            if draft.ids:
                check(request, limit, draft)
                seen.append(draft)
        return drafts if answers is None else [prophecy(*pair) for pair in zip(requests, limits)]

    def prophecy(request, limit):
        start = request.num_output
        ids = answers[tuple(request.prompt_ids)][start : start + limit]
        return Draft(tuple((id + ((start + j) % 5 == 4)) % 256 for j, id in enumerate(ids)))

    drafter.propose = checked
    return seen


CONFIGS = [pytest.param({"draft_tokens": 3}, marks=SLOW), {"draft_tokens": 2, "max_step_tokens": 12},
           pytest.param({"draft_tokens": 3, "num_pages": 14, "max_requests": 3, "max_step_tokens": 20}, marks=SLOW)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("method", SOME_METHODS)
def test_drafts_are_those_of_a_drafter_that_forgets(loaded, plain, method, config):
    """However the prompts were cut, whatever was preempted: rows of tokens that stand are the model's own. Without a
    prefix cache, whose pages may end with what followed another text."""
    model, heads = loaded
    anew, engine = Anew(model, heads[method]), engine_with(model, heads[method], prefix_cache=False, **config)
    answers = {tuple(prompt): ids for prompt, (ids, _) in zip(PROMPTS, plain[GREEDY])}

    def check(request, limit, draft):
        assert list(draft.ids) == anew.chain(request.tokens, limit)

    drafts = watched(engine, check, answers)
    reports = [completion.request.draft_report for completion in engine.generate(PROMPTS, GREEDY)]
    assert len(drafts) > 6 and sum(report["accepted"] for report in reports) > 6
    assert bool(engine.stats.preemptions) == ("num_pages" in config)


@SLOW
@pytest.mark.parametrize("method", METHODS)
def test_trees_are_those_of_a_drafter_that_forgets(loaded, method):
    model, heads = loaded
    shape = TreeShape(3, 3)
    anew = Anew(model, heads[method])
    engine = engine_with(model, heads[method], shape, prefix_cache=False, draft_tokens=7)

    def check(request, limit, draft):
        paths = [()]
        for id, parent in zip(draft.ids, draft.parents):
            paths.append((*paths[parent], id))
        assert set(paths[1:]) == anew.tree(request.tokens, shape, limit)

    drafts = watched(engine, check)
    engine.generate(PROMPTS[:4], GREEDY)
    assert len(drafts) > 10 and all(len(draft.ids) == 7 for draft in drafts[:10])
    assert any(draft.parents != tuple(range(7)) for draft in drafts)


# ---- heads that are always right


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A model in which each token is followed by one other, and its width: token i is the unit vector i."""
    folder = tmp_path_factory.mktemp("cyclic")
    follower = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tiny.scripted(folder, {i: {int(follower[i]): 1.0} for i in range(256)})
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, torch.float64), follower


def permutation(follower, width=320):
    """The matrix that sends unit vector i to that of the token after i."""
    matrix = torch.eye(width)
    matrix[:, :256] = 0
    matrix[follower, torch.arange(256)] = 1
    return matrix


def right_heads(cyclic, tmp_path, method):
    """Heads that are right by the token that came last, or by the hidden row before it alone."""
    model, follower = cyclic
    c = model.config
    config = {"hidden_size": c.hidden, "intermediate_size": c.ffn, "num_attention_heads": c.heads,
              "head_dim": c.head_dim, "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab,
              "rms_norm_eps": c.norm_eps, "rope_theta": 10000.0}
    step = permutation(follower)
    if method == "medusa":
        tensors, ahead = {}, step
        for i in range(5):
            ahead = ahead @ step
            tensors |= {f"medusa_head.{i}.0.linear.weight": torch.zeros(320, 320),
                        f"medusa_head.{i}.0.linear.bias": torch.zeros(320), f"medusa_head.{i}.1.weight": 9 * ahead}
        return open_medusa(write_medusa(tmp_path, config, tensors=tensors), model)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in eagle_tensors(config, 1).items()}
    scale = (1 / 320 + c.norm_eps) ** -0.5  # of the model's hidden rows
    tensors["fc.weight"] = torch.cat((scale * torch.eye(320), torch.zeros(320, 320)) if method == "by token"
                                     else (torch.zeros(320, 320), step), 1)
    return open_eagle(write_eagle(tmp_path, config, 1, tensors=tensors), model)


@pytest.mark.parametrize("shape", [None, TreeShape(2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("method", ["by token", "by row", "medusa"])
def test_right_heads_bring_all_their_tokens(cyclic, tmp_path, method, shape):
    """In every step but the first and the plain ones that tell what a step takes; prompts long and short."""
    model, follower = cyclic
    num = 4 if shape is None else 8
    engine = engine_with(model, right_heads(cyclic, tmp_path, method), shape, draft_tokens=num, max_step_tokens=50)
    prompts = [[5], [int(follower[9])], list(range(70))]
    for completion in engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True)):
        last = completion.request.prompt_ids[-1]
        for id in completion.token_ids:
            last = int(follower[last])
            assert id == last
        report = completion.request.draft_report
        places = report["by_place"]
        assert len(places) == 4 and places[0] >= 3, report
        if shape is None:
            assert report["accepted"] == report["proposed"]


# ---- tokens


MANY, ONE, CHUNKED = {"draft_tokens": 8}, {"draft_tokens": 1}, {"draft_tokens": 5, "max_step_tokens": 7}
CROWDED = {"draft_tokens": 5, "num_pages": 14, "max_requests": 3}
NARROW, WIDE = TreeShape(3, 3), TreeShape(8, 2)
CASES = [(kernels, *case) for case in (
    (MANY, None, SAMPLED), (MANY, NARROW, SAMPLED), (MANY, None, GREEDY), (MANY, NARROW, GREEDY), (MANY, WIDE, SAMPLED),
    (ONE, None, SAMPLED), (CHUNKED, NARROW, SAMPLED), (CROWDED, None, GREEDY), (CROWDED, NARROW, SAMPLED))]
CASES += [(native, *case) for case in ((MANY, None, SAMPLED), (MANY, NARROW, SAMPLED), (CROWDED, NARROW, GREEDY),
                                       (CROWDED, None, SAMPLED))]


def name_of(case):
    ops, config, shape, params = case
    return f"{ops.__name__}-{config}-{shape and f'{shape.width}x{shape.depth}'}-{params.temperature}"


@pytest.mark.parametrize("method", SOME_METHODS)
@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(case, marks=SLOW) for case in CASES[2:])], ids=name_of)
def test_drafts_change_no_token(request, case, method):
    """Natively not a bit of a logit either."""
    ops, config, shape, params = case
    suffix = "" if ops is kernels else "_native"
    (model, heads), plain = (request.getfixturevalue(name + suffix) for name in ("loaded", "plain"))
    engine = engine_with(model, heads[method], shape, **config)
    got = tokens_of(engine.generate(PROMPTS, params))
    for (ids, logprobs), (expected_ids, expected) in zip(got, plain[params]):
        assert ids == expected_ids
        assert logprobs == (expected if ops is native else pytest.approx(expected, abs=1e-9))
    assert engine.sums["drafted_tokens"] > 0
    assert engine.cache.num_available == engine.cache.num_pages
    drafter = engine.drafting.drafter
    assert not (drafter.rows if method == "medusa" else drafter.trails)


@SLOW
@pytest.mark.parametrize("method, verify", [("eagle1", "block"), ("eagle3", "rejection"), ("mtp", "block"),
                                            ("medusa", "rejection")])
def test_drafts_that_are_drawn_come_with_their_distribution(loaded, method, verify):
    """Requests all have the same prompt; how often each second token follows is within what chance allows of plain
    decoding's. (test_verify.py sums over all that can happen.)"""
    model, heads = loaded
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.5, top_k=4, num_samples=300, seed=1)
    counts = []
    for drafted in (False, True):
        engine = (engine_with(model, heads[method], draft_tokens=2, verify=verify, max_step_tokens=300) if drafted
                  else Engine(model, EngineConfig(num_pages=256, page_size=8)))
        counts.append(Counter(tuple(c.token_ids[:3]) for c in engine.generate([PROMPTS[2]], params)))
    plain, drafted = counts
    distance = sum(abs(plain[ids] - drafted[ids]) for ids in {*plain, *drafted}) / 600
    assert distance < 0.5 * (len({*plain, *drafted}) / 300) ** 0.5 * 1.6


class Oracle:
    """Proposes trees in which the known answer lies among wrong tokens, with gaps: of four tokens of it at most, and a
    wrong follower of each."""

    name, is_free, taps = "oracle", False, None

    def __init__(self, answers):
        self.answers = answers

    def propose(self, requests, limits):
        return [self.draft(request).cut(limit) for request, limit in zip(requests, limits)]

    def draft(self, request):
        start = request.num_output
        right = self.answers[tuple(request.prompt_ids)][start : start + (1, 4, 2, 3)[start % 4]]
        ids, parents, row = [], [], 0
        for id in right:
            ids += [(id + 1) % 256, id, (id + 2) % 256]
            parents += [row, row, len(ids) - 2]  # the last one follows the first, which is wrong
            row = len(ids) - 1
        return Draft(tuple(ids), None, tuple(parents))

    def forget(self, request):
        pass


WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [{"draft_tokens": 12}, pytest.param(
    {"draft_tokens": 12, "num_pages": 18, "max_requests": 3}, marks=SLOW)], ids=str)
@pytest.mark.parametrize("cache_dtype", [pytest.param(None, marks=SLOW), pytest.param(torch.float32, marks=SLOW),
                                         torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("family, overrides", [("llama", {}), ("qwen2", WINDOWED), ("qwen2", WINDOWED | {
    "max_window_layers": 0, "sliding_window": 3})], ids=["llama", "windows", "windows alone"])
def test_what_stands_of_a_tree_lies_where_the_text_does(request, tmp_path, family, overrides, cache_dtype, config,
                                                        params):
    """Its keys and values are those of plain decoding, in other layers' windows too, and in what is shared. Without a
    type of the cache in float64 through torch, else natively, where no bit may differ."""
    is_native = cache_dtype is not None
    path = tiny.write_safetensors(tmp_path, family, **overrides)
    with open_checkpoint(path) as checkpoint:
        dtype = torch.float32 if is_native else torch.float64
        model = load_model(checkpoint, dtype, ops=request.getfixturevalue("native_ops") if is_native else kernels)
    sizes = {"page_size": 8, "cache_dtype": cache_dtype}
    plain = tokens_of(Engine(model, EngineConfig(num_pages=64, **sizes)).generate(PROMPTS, params))
    answers = {tuple(prompt): ids for prompt, (ids, _) in zip(PROMPTS, plain)}
    engine = Engine(model, EngineConfig(**({"num_pages": 64} | sizes | config)), drafter=Oracle(answers))
    completions = [engine.generate(PROMPTS, params) for _ in range(2)]  # the second finds pages of the first
    assert sum(c.request.draft_report["accepted"] for c in completions[0] + completions[1]) > 30
    for got in map(tokens_of, completions):
        for (ids, logprobs), (expected_ids, expected) in zip(got, plain):
            assert ids == expected_ids
            assert logprobs == (expected if is_native else pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize("shape", [None, TreeShape(2, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("method", SOME_METHODS)
def test_a_prompt_that_lacks_its_last_token_alone(loaded, method, shape):
    """Of chunks of twelve: it is asked like those that decode, and has no row to go on from."""
    model, heads = loaded
    prompts = [PROMPTS[3][:n] for n in (5, 13, 25)]
    expected = tokens_of(Engine(model, EngineConfig(num_pages=64, page_size=8)).generate(prompts, GREEDY))
    for verify in ("coupled", "rejection"):
        engine = engine_with(model, heads[method], shape, draft_tokens=2, max_step_tokens=12, verify=verify,
                             max_requests=1)
        assert [ids for ids, _ in tokens_of(engine.generate(prompts, GREEDY))] == [ids for ids, _ in expected]


@pytest.mark.parametrize("shape", [None, TreeShape(4, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("method", SOME_METHODS)
def test_drafts_end_where_the_context_does(folder, tmp_path, method, shape):
    """A context of 32 tokens and a cache of no more; answers that end with it, after one token, or are aborted."""
    with open_checkpoint(folder) as checkpoint:
        small = load_model(checkpoint, torch.float64, context=32)
    _, heads = load(folder, tmp_path)
    if method != "medusa":
        heads[method].model = small
    sizes = {"num_pages": 4, "page_size": 8}
    plain = Engine(small, EngineConfig(**sizes))
    drafted = engine_with(small, heads[method], shape, draft_tokens=5, **sizes)
    middle, long = PROMPTS[3][:20], PROMPTS[4][:31]
    for prompt, num in ((middle, 12), (middle, 1), (middle, 2), (long, 9), ([7], 31)):
        params = SamplingParams(max_tokens=num, ignore_eos=True)
        [expected], [got] = plain.generate([prompt], params), drafted.generate([prompt], params)
        assert (got.token_ids, got.finish_reason) == (expected.token_ids, "length")
    request = drafted.submit(PROMPTS[3][:20], SamplingParams(ignore_eos=True))
    for _ in range(6):
        drafted.step()
    drafted.abort(request)
    assert drafted.cache.num_available == 4 and not drafted.has_work
