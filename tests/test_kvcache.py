"""kvcache.py: every page is free, held or cached, exactly once, whatever is done to the cache."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kernels
from kvcache import Cache, KVSpec, Lease

FULL, WINDOW = KVSpec(1, 8, 8), KVSpec(1, 8, 8, window=16)


def test_bytes_of_a_token_are_those_of_the_memory(native_ops):
    spec = KVSpec(heads=3, k_dim=32, v_dim=32)
    for new_kv in (kernels.new_kv, native_ops.new_kv):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            kv = new_kv(5, 16, spec.heads, spec.k_dim, spec.v_dim, dtype, "cpu", 0)
            memory = [tensor for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale) if tensor is not None]
            assert sum(tensor.nbytes for tensor in memory) == 5 * 16 * spec.bytes_per_token(dtype)


def make_cache(num_pages=6, specs=(FULL,), **options):
    return Cache(specs, num_pages, page_size=8, dtype=torch.float32, **options)


def open_lease(cache, tokens):
    lease = Lease()
    cache.open(lease)
    return lease, cache.match(lease, tokens)


def fill(cache, tokens):
    """What a request does that computes all of `tokens`, and ends."""
    lease, num_cached = open_lease(cache, tokens)
    assert cache.grow(lease, len(tokens))
    cache.reach(lease, num_cached, len(tokens))
    cache.publish(lease, tokens, len(tokens))
    cache.release(lease)


def test_a_prefix_is_found_page_by_page_and_the_last_token_is_left():
    cache = make_cache()
    tokens = list(range(20))
    fill(cache, tokens)
    assert open_lease(cache, tokens)[1] == 16
    assert open_lease(cache, tokens[:16])[1] == 8  # the logits of the last token have to be computed
    assert open_lease(cache, tokens[:17])[1] == 16
    assert open_lease(cache, tokens[:8] + [99] + tokens[9:])[1] == 8
    assert open_lease(cache, [99] + tokens[1:])[1] == 0  # the second page equals, its parent does not
    assert open_lease(cache, [])[1] == open_lease(cache, [1])[1] == 0


def test_without_prefix_caching_nothing_is_found():
    cache = make_cache(prefix=False)
    fill(cache, list(range(20)))
    assert open_lease(cache, list(range(20)))[1] == 0
    assert not cache.groups[0].pool.cached


def test_grow_is_all_or_nothing():
    cache = make_cache(specs=(FULL, WINDOW))
    lease, _ = open_lease(cache, [])
    other, _ = open_lease(cache, [])
    assert cache.grow(lease, 33) and cache.num_available == 1
    assert not cache.grow(other, 9) and other.pages == [[], []] and cache.num_available == 1
    assert cache.grow(other, 8) and cache.num_available == 0
    assert cache.grow(lease, 40)


def test_tails_are_evicted_before_the_prefixes_they_follow():
    cache = make_cache(num_pages=4)
    fill(cache, list(range(32)))
    lease, _ = open_lease(cache, [])
    assert cache.grow(lease, 16)
    assert cache.groups[0].pool.num_evictions == 2
    assert open_lease(cache, list(range(33)))[1] == 16


def test_two_hold_one_page_and_it_outlives_the_first():
    cache = make_cache()
    tokens = list(range(17))
    fill(cache, tokens)
    first, _ = open_lease(cache, tokens)
    second, _ = open_lease(cache, tokens)
    assert first.pages == second.pages and cache.groups[0].pool.holders[first.pages[0][0]] == 2
    cache.release(first)
    assert cache.groups[0].pool.holders[second.pages[0][0]] == 1 and not cache.groups[0].pool.cached
    cache.release(second)
    assert len(cache.groups[0].pool.cached) == 2


def test_page_tables_follow_the_lease():
    cache = make_cache(num_pages=9, max_leases=2, max_tokens=40)
    lease, _ = open_lease(cache, list(range(9)))
    for num_tokens in (8, 9, 40):
        cache.grow(lease, num_tokens)
        assert cache.groups[0].table[lease.row, : len(lease.pages[0])].tolist() == lease.pages[0]


class Operations(RuleBasedStateMachine):
    """Random requests over a small cache of two groups; each page's owner writes the tokens it stands for into it."""

    def __init__(self):
        super().__init__()
        self.cache = make_cache(num_pages=7, specs=(FULL, WINDOW), max_leases=4)
        self.content = [[None] * 7 for _ in self.cache.groups]  # what was last written to each page
        self.open: list[tuple[Lease, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def start(self, tokens):
        if len(self.open) == 4:
            return
        lease, num_cached = open_lease(self.cache, tokens)
        assert num_cached < len(tokens)
        for group, pages in enumerate(lease.pages):
            for i, page_id in enumerate(pages):  # a hit holds exactly the prefix it stands for
                assert page_id is None or self.content[group][page_id] == tokens[: (i + 1) * 8]
        if not self.cache.grow(lease, len(tokens)):
            self.cache.release(lease)
            return
        self.cache.reach(lease, num_cached, len(tokens))
        for group, pages in enumerate(lease.pages):
            for i, page_id in list(enumerate(pages))[num_cached // 8 :]:
                assert self.cache.groups[group].pool.holders[page_id] == 1  # nobody else sees a page that is written
                self.content[group][page_id] = tokens[: (i + 1) * 8]
        self.open.append((lease, tokens))

    @rule(which=st.integers(0, 3), share=st.floats(0, 1))
    def publish(self, which, share):
        if self.open:
            lease, tokens = self.open[which % len(self.open)]
            self.cache.publish(lease, tokens, int(share * len(tokens)))

    @rule(which=st.integers(0, 3))
    def finish(self, which):
        if self.open:
            lease, _ = self.open.pop(which % len(self.open))
            self.cache.release(lease)

    @invariant()
    def every_page_is_in_one_place(self):
        for group, pool in enumerate(group.pool for group in self.cache.groups):
            held = [page_id for lease, _ in self.open for page_id in lease.pages[group] if page_id is not None]
            assert sorted(pool.free + list(pool.cached) + list(set(held))) == list(range(7))
            assert [held.count(page_id) for page_id in range(7)] == pool.holders
            assert all(pool.keys[page_id] == key for key, page_id in pool.index.items())
            assert all(pool.keys[page_id] is None for page_id in pool.free)

    def teardown(self):
        for lease, _ in self.open:
            self.cache.release(lease)
        assert self.cache.num_available == 7 and len(self.cache.free_rows) == 4


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
