"""Native attention, its paged cache, and the small operations: against the torch bodies in float64, and bit for bit
against themselves in other company."""

import ctypes
import math
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import kernels
from instructions import BEST, PARAMS, Library
from trees import ancestors, in_window, random_paths

FORMATS = {torch.float32: 0, torch.bfloat16: 30, torch.int8: 24}
OK, BAD_FORMAT, BAD_SIZE, BAD_INDEX = range(4)
POISON = math.nan


@pytest.fixture(scope="module")
def library():
    library = Library()
    yield library
    library.set_isa_cpu(ctypes.c_int64(BEST))


@pytest.fixture(scope="module", params=PARAMS)
def native(library, request):
    """The library with one instruction set."""
    call(library.set_isa_cpu, request.param)
    call(library.set_threads_cpu, 2)
    library.kv_head_bytes_cpu.restype = ctypes.c_int64
    return library


def status(function, *args) -> int:
    def convert(arg):
        if isinstance(arg, torch.Tensor):
            assert arg.is_contiguous()
            return ctypes.c_void_p(arg.data_ptr())
        if arg is None:
            return ctypes.c_void_p()
        return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg)

    return function(*map(convert, args))


def call(function, *args) -> None:
    assert status(function, *args) == OK


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(got, exact):
    return float((got.double() - exact).abs().max())


def new_cache(native, num_pages, G, A, B, dtype):
    """A layer's keys or values, all NaN: in int8 the scales, and all cells -1."""
    nbytes = native.kv_head_bytes_cpu(*map(ctypes.c_int64, (A, B, FORMATS[dtype])))
    return torch.full((num_pages, G, nbytes // dtype.itemsize), -1 if dtype == torch.int8 else POISON, dtype=dtype)


def cached(x_TGA, dtype):
    """What a cache of `dtype` makes of keys or values, in float64."""
    if dtype != torch.int8:
        return x_TGA.to(dtype).double()
    scale_TG1 = x_TGA.abs().amax(-1, keepdim=True) / 127
    return (x_TGA / scale_TG1).round().double() * scale_TG1.double()


class Requests:
    """Requests with keys, values and queries for every one of their tokens, and a poisoned cache of scattered pages."""

    def __init__(self, native, lengths, H, G, A, B, dtype, seed=0):
        self.native, self.lengths, self.H, self.G, self.A, self.B, self.dtype = native, lengths, H, G, A, B, dtype
        counts = [-(-length // B) for length in lengths]
        self.num_pages, self.width = sum(counts) + 3, max(counts) + 2
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.table = torch.full((len(lengths), self.width), -1, dtype=torch.int32)
        for s, count in enumerate(counts):
            self.table[s, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.k, self.v = (new_cache(native, self.num_pages, G, A, B, dtype) for _ in range(2))
        self.keys, self.values = ([random(n, G, A, seed=seed + 9 * s + i) for s, n in enumerate(lengths)]
                                  for i in (1, 2))
        self.queries = [random(n, H, A, seed=seed + 9 * s + 3) for s, n in enumerate(lengths)]
        for s, length in enumerate(lengths):
            self.store(s, 0, length)

    def store(self, s, first, end):
        place = torch.arange(first, end)
        slot_T = self.table[s, place // self.B].long() * self.B + place % self.B
        call(self.native.store_kv_cpu, self.k, self.v, self.keys[s][first:end], self.values[s][first:end], slot_T,
             end - first, self.G, self.A, self.B, self.num_pages, FORMATS[self.dtype])

    def attend(self, pieces, window=0, ancestors_T=None):
        """Results for `pieces` (request, first, end), all in one call."""
        q_THA = torch.cat([self.queries[s][first:end] for s, first, end in pieces])
        out_THA = torch.full_like(q_THA, POISON)
        starts_S1 = torch.tensor([0, *accumulate(end - first for _, first, end in pieces)])
        row_S, lengths_S = (torch.tensor(x) for x in ([s for s, _, _ in pieces], [end for _, _, end in pieces]))
        call(self.native.attention_cpu, out_THA, q_THA, self.k, self.v, self.table, row_S, starts_S1, lengths_S,
             ancestors_T, len(q_THA), len(pieces), self.H, self.G, self.A, self.B, self.num_pages, self.width,
             self.A**-0.5, window, FORMATS[self.dtype])
        return [out_THA[a:b] for a, b in pairwise(starts_S1.tolist())]

    def alone(self, s, chunk, window=0):
        """All of one request, `chunk` tokens a call."""
        length = self.lengths[s]
        return torch.cat([self.attend([(s, i, min(i + chunk, length))], window)[0] for i in range(0, length, chunk)])

    def expected(self, s, window, dtype):
        """torch's attention on what the cache holds."""
        q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (
            self.queries[s], cached(self.keys[s], self.dtype), cached(self.values[s], self.dtype)))
        place = torch.arange(self.lengths[s])
        mask = (place <= place[:, None]) & (place > place[:, None] - (window or math.inf))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.A**-0.5, enable_gqa=True)
        return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize("H, G, A, B", [(9, 3, 64, 32), (6, 1, 128, 16), (7, 7, 20, 8), (14, 2, 64, 256),
                                        (20, 1, 2, 64), (2, 2, 512, 128), (5, 1, 22, 32)])
def test_attention_is_as_exact_as_torch_in_float32(native, H, G, A, B, window, dtype):
    requests = Requests(native, [1, 400, 33], H, G, A, B, dtype)
    for s, out in enumerate(requests.attend([(s, 0, n) for s, n in enumerate(requests.lengths)], window)):
        exact = requests.expected(s, window, torch.float64)
        torch_error = error(requests.expected(s, window, torch.float32), exact)
        assert error(out, exact) <= max(2 * torch_error, 1e-6), (s, torch_error)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [0, 1, 37, 256, 300])
def test_the_bits_do_not_depend_on_chunks_pages_threads_or_company(native, window, dtype):
    lengths = [600, 257, 256, 1] + [(37 * i) % 290 + 1 for i in range(28)]
    whole = None
    for B in (8, 32, 256):
        requests = Requests(native, lengths, 6, 2, 48, B, dtype)
        together = requests.attend([(s, 0, n) for s, n in enumerate(lengths)], window)
        whole = whole or together
        assert all(torch.equal(a, b) for a, b in zip(whole, together))
        last = requests.attend([(s, n - 1, n) for s, n in enumerate(lengths)], window)
        assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last))
        for threads in (1, 2):
            call(native.set_threads_cpu, threads)
            for s, chunk in [(0, 64), (0, 600), (1, 7), (2, 100), (1, 1), (8, 1)]:
                assert torch.equal(requests.alone(s, chunk, window), whole[s]), (s, chunk)


@given(seed=st.integers(0, 2**30), part=st.sampled_from(["queries", "keys", "values"]),
       bad=st.sampled_from([math.nan, math.inf, -math.inf]), dtype=st.sampled_from(list(FORMATS)),
       window=st.sampled_from([0, 3, 64, 270]), heads=st.sampled_from([(4, 2), (3, 3), (8, 1)]),
       B=st.sampled_from([8, 16, 64]))
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(native, seed, part, bad, dtype, window, heads,
                                                                       B):
    picks = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=picks))

    lengths = [pick(1, 30), pick(1, 600), pick(1, 30)]
    pieces = [(s, max(0, n - pick(1, 300)), n) for s, n in enumerate(lengths)]
    requests = Requests(native, lengths, *heads, 32, B, dtype, seed)
    whole = requests.attend(pieces, window)
    assert all(out.isfinite().all() for out in whole)

    first, end = pieces[1][1:]
    place = pick(first if part == "queries" else 0, end)
    row = getattr(requests, part)[1][place]
    row[pick(0, len(row)), pick(0, 32)] = bad
    requests.store(1, place, place + 1)
    out = requests.attend(pieces, window)
    i = torch.arange(first, end)
    sees = i == place if part == "queries" else (place <= i) & ((place > i - window) if window else True)
    assert torch.equal(out[0], whole[0]) and torch.equal(out[2], whole[2])
    assert out[1][sees].isnan().all() and torch.equal(out[1][~sees], whole[1][~sees])


# ---- trees of drafts


class Trees(Requests):
    """The same, whose last `num` tokens form a tree: paths[s][i] are those of them that the i-th sees. And of every
    token of a tree the text that it sees as a request of its own, on pages of its own."""

    def __init__(self, native, pasts, paths, *args):
        super().__init__(native, [past + len(tree) for past, tree in zip(pasts, paths)], *args)
        self.pieces = [(s, past, length) for s, (past, length) in enumerate(zip(pasts, self.lengths))]
        self.ancestors_T = torch.cat([ancestors(tree) if len(tree) <= 64 else -torch.ones(len(tree)).long()
                                      for tree in paths])
        texts = [(s, past, torch.cat([torch.arange(past), past + torch.tensor(path)]))
                 for s, (past, tree) in enumerate(zip(pasts, paths)) for path in tree]
        self.alone = Requests(native, [len(place_L) for _, _, place_L in texts], *args)
        for own, (s, past, place_L) in enumerate(texts):
            for name in ("keys", "values", "queries"):
                getattr(self.alone, name)[own] = getattr(self, name)[s][place_L].contiguous()
            self.alone.store(own, 0, len(place_L))

    def paths_alone(self, window):
        """What the tokens of all trees get in plain decoding."""
        return torch.cat(self.alone.attend([(s, n - 1, n) for s, n in enumerate(self.alone.lengths)], window))


PASTS = [0, 1, 5, 8, 13, 16, 31, 100, 193, 200, 240, 249, 255, 256, 258, 500, 511]


@pytest.mark.slow
@given(seed=st.integers(0, 2**30), dtype=st.sampled_from(list(FORMATS)), B=st.sampled_from([8, 16, 32, 128]),
       window=st.sampled_from([0, 1, 2, 5, 40, 260]), heads=st.sampled_from([(4, 2), (3, 3), (8, 1), (14, 2)]),
       A=st.sampled_from([16, 20, 64]), near=st.sampled_from([1, 3, 64]))
def test_a_token_of_a_tree_has_the_bits_of_its_path(native, seed, dtype, B, window, heads, A, near):
    picks = torch.Generator().manual_seed(seed)

    def pick(numbers):
        return numbers[int(torch.randint(len(numbers), (), generator=picks))]

    pasts, sizes = [pick(PASTS) for _ in range(3)], [pick([1, 2, 7, 20, 64]), pick([2, 9, 33, 64]), pick([1, 70])]
    paths = [random_paths(num, picks, near) for num in sizes[:2]] + [[list(range(i + 1)) for i in range(sizes[2])]]
    trees = Trees(native, pasts, paths, *heads, A, B, dtype, seed)
    call(native.set_threads_cpu, pick([1, 2]))
    together = trees.attend(trees.pieces, window, trees.ancestors_T)
    assert torch.equal(torch.cat(together), trees.paths_alone(window))
    for s, out in enumerate(together):
        [alone] = trees.attend(trees.pieces[s : s + 1], window, trees.ancestors_T.split(sizes)[s].contiguous())
        assert torch.equal(alone, out)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("past, B", [(3, 8), (0, 16), (20, 32), (300, 256)])
def test_trees_are_as_exact_as_torch_in_float32(native, past, B, dtype):
    paths = random_paths(60, torch.Generator().manual_seed(past))
    trees = Trees(native, [past], [paths], 6, 2, 48, B, dtype)
    for window in (0, 4, 100):
        [out] = trees.attend(trees.pieces, window, trees.ancestors_T)
        exact, rounded = (expected_in_tree(trees, past, window, t) for t in (torch.float64, torch.float32))
        assert error(out, exact) <= max(2 * error(rounded, exact), 1e-6)


def expected_in_tree(trees, past, window, dtype):
    """The reference's attention of the first request on what the cache holds."""
    length, page_size = trees.lengths[0], 16
    num_pages = -(-length // page_size)
    kv = kernels.new_kv(num_pages, page_size, trees.G, trees.A, trees.A, dtype, "cpu", 0)
    k_TGA, v_TGA = (cached(x[0], trees.dtype) for x in (trees.keys, trees.values))
    kernels.store_kv_(kv, k_TGA, v_TGA, torch.arange(length))
    batch = SimpleNamespace(starts_S1=torch.tensor([0, length - past]), lengths_S=torch.tensor([length]),
                            tables=(torch.arange(num_pages)[None],), lease_S=torch.tensor([0]),
                            ancestors_T=trees.ancestors_T)
    return kernels.attention(trees.queries[0][past:].to(dtype), kv, batch, trees.A**-0.5, window)


@given(seed=st.integers(0, 2**30), part=st.sampled_from(["queries", "keys", "values"]),
       bad=st.sampled_from([math.nan, math.inf, -math.inf]), dtype=st.sampled_from(list(FORMATS)),
       window=st.sampled_from([0, 3, 64, 270]), heads=st.sampled_from([(4, 2), (3, 3), (8, 1)]),
       B=st.sampled_from([8, 16, 64]), past=st.sampled_from(PASTS))
def test_in_a_tree_what_is_not_finite_reaches_those_that_see_it(native, seed, part, bad, dtype, window, heads, B, past):
    picks = torch.Generator().manual_seed(seed)
    paths = random_paths(int(torch.randint(2, 65, (), generator=picks)), picks)
    trees = Trees(native, [past], [paths], *heads, 32, B, dtype, seed)
    [whole] = trees.attend(trees.pieces, window, trees.ancestors_T)
    place = int(torch.randint(past if part == "queries" else 0, past + len(paths), (), generator=picks))
    getattr(trees, part)[0][place][0, 5] = bad
    trees.store(0, place, place + 1)
    [out] = trees.attend(trees.pieces, window, trees.ancestors_T)
    seen = [in_window([*range(past), *(past + j for j in path)], window) for path in paths]
    sees = torch.tensor([past + i == place if part == "queries" else place in seen[i] for i in range(len(paths))])
    assert out[sees].isnan().all() and torch.equal(out[~sees], whole[~sees])


@pytest.mark.parametrize("dtype", FORMATS)
def test_pages_out_of_a_windows_sight_are_not_looked_up(native, dtype):
    requests = Requests(native, [1000], 4, 2, 32, 16, dtype)
    whole = requests.alone(0, 1000, window=40)
    requests.table[0, : (900 - 39) // 16] = -1
    assert torch.equal(requests.attend([(0, 900, 1000)], window=40)[0], whole[900:])


def test_no_rows_are_no_error(native):
    nothing = torch.empty(0)
    zero = torch.zeros(1, dtype=torch.int64)
    assert status(native.attention_cpu, nothing, nothing, nothing, nothing, nothing, nothing, zero, nothing, None, 0, 0,
                  4, 2, 32, 16, 0, 0, 1.0, 0, 0) == OK
    assert status(native.store_kv_cpu, *[nothing] * 5, 0, 2, 32, 16, 0, 0) == OK
    assert status(native.argmax_cpu, nothing, nothing, 0, 9) == OK
    assert status(native.rms_norm_cpu, nothing, nothing, nothing, 0, 9, 1e-5) == OK
    assert status(native.silu_mul_cpu, nothing, nothing, 0, 9) == OK


def test_impossible_arguments_are_refused(native):
    requests = Requests(native, [40], 4, 2, 32, 16, torch.float32)
    q_THA, out_THA = requests.queries[0][-3:], torch.empty(3, 4, 32)

    def attend(row=0, end=3, length=40, H=4, A=32, B=16, num_pages=requests.num_pages, window=0, cache_format=0,
               tree=(-1, -1, -1)):
        return status(native.attention_cpu, out_THA, q_THA, requests.k, requests.v, requests.table,
                      torch.tensor([row]), torch.tensor([0, end]), torch.tensor([length]), torch.tensor(tree), 3, 1, H,
                      2, A, B, num_pages, requests.width, 1.0, window, cache_format)

    assert attend() == OK
    assert attend(cache_format=8) == BAD_FORMAT
    assert {attend(H=5), attend(A=31), attend(B=24), attend(window=-1)} == {BAD_SIZE}
    assert {attend(row=-1), attend(end=2), attend(length=2), attend(length=100), attend(num_pages=1)} == {BAD_INDEX}
    assert {attend(tree=tree) for tree in ((1, 3, 5), (1, 2, 4), (1, 3, 7), (1, 2, 6), (-1, -2, ~2))} == {OK}
    # The second does not see itself; nor the third; it sees two that are not one path; it misses what its parent sees.
    assert {attend(tree=tree) for tree in ((1, 1, 5), (1, 3, 3), (1, 2, 7), (1, 3, 6))} == {BAD_INDEX}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("A, half", [(64, 32), (20, 4), (8, 0)])
def test_rope_and_store_in_one_call_equal_the_reference(native, A, half, dtype):
    T, H, G, B = 70, 6, 2, 16
    qkv_TX = random(T, (H + 2 * G) * A)
    q_THA, k_TGA, v_TGA = (x.contiguous() for x in qkv_TX.view(T, -1, A).split((H, G, G), dim=1))
    cos, sin = kernels.rope_angles(torch.arange(T) * 50, kernels.rope_frequencies(1e4, max(2 * half, 2)), 1.1,
                                   torch.float32)
    cos, sin = cos[..., :half].contiguous(), sin[..., :half].contiguous()
    slot_T = torch.randperm(8 * B, generator=torch.Generator().manual_seed(1))[:T]
    caches = [new_cache(native, 8, G, A, B, dtype).fill_(7) for _ in range(4)]
    got = torch.empty_like(q_THA)
    call(native.rope_store_cpu, got, *caches[:2], qkv_TX, cos, sin, slot_T, T, H, G, A, half, B, 8, FORMATS[dtype])
    assert torch.equal(got, kernels.rope(q_THA, cos, sin))
    turned = torch.empty_like(k_TGA)
    call(native.rope_cpu, turned, k_TGA, cos, sin, T, G, A, half)
    assert torch.equal(turned, kernels.rope(k_TGA, cos, sin))
    call(native.store_kv_cpu, *caches[2:], turned, v_TGA, slot_T, T, G, A, B, 8, FORMATS[dtype])
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
    # Every number is there, rounded as torch does, and nothing else was touched.
    for cache, x in ((caches[0], turned), (caches[1], v_TGA)) if dtype != torch.int8 else ():
        stored = cache[cache != 7].flatten().sort().values
        assert torch.equal(stored, x.to(dtype).flatten().sort().values)
    assert status(native.store_kv_cpu, *caches[2:], turned, v_TGA, slot_T, T, G, A, B, 7, FORMATS[dtype]) == BAD_INDEX


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("A, B", [(64, 32), (20, 8), (6, 16)])
def test_moving_copies_all_bits_of_a_slot_and_touches_no_others(native, A, B, dtype):
    G, num_pages = 3, 4
    picks = torch.Generator().manual_seed(1)
    before = [torch.randint(-128, 128, (new_cache(native, num_pages, G, A, B, dtype).nbytes,), dtype=torch.int8,
                            generator=picks) for _ in range(2)]
    from_T, to_T = torch.tensor([B + 5, 7, B - 1, 2 * B, 3 * B + 3]), torch.tensor([3 * B, B + 5, 7, 2 * B, 1])
    after = [x.clone() for x in before]
    call(native.move_kv_cpu, *after, from_T, to_T, len(to_T), G, A, B, num_pages, FORMATS[dtype])
    for i in range(2):
        expected = before[i].clone()
        for source, target in zip(from_T.tolist(), to_T.tolist()):
            expected[bytes_of(native, target, G, A, B, num_pages, dtype)[i]] = before[i][
                bytes_of(native, source, G, A, B, num_pages, dtype)[i]]
        assert torch.equal(after[i], expected) and not torch.equal(expected, before[i])
    for bad in (-1, num_pages * B):
        for slots in ((from_T, from_T.index_fill(0, torch.tensor(1), bad)),
                      (from_T.index_fill(0, torch.tensor(4), bad), to_T)):
            assert status(native.move_kv_cpu, *after, *slots, len(to_T), G, A, B, num_pages,
                          FORMATS[dtype]) == BAD_INDEX
    assert status(native.move_kv_cpu, *after, from_T, to_T, -1, G, A, B, num_pages, FORMATS[dtype]) == BAD_SIZE
    assert status(native.move_kv_cpu, *after, from_T, to_T, 5, G, A, B, num_pages, 8) == BAD_FORMAT


def bytes_of(native, slot, G, A, B, num_pages, dtype):
    """Which bytes of keys, and of values, a slot has: none of those that are stored is 0."""
    caches = [new_cache(native, num_pages, G, A, B, dtype).zero_() for _ in range(2)]
    bits = torch.tensor([0x3F818181 if dtype != torch.int8 else 0x3F800000], dtype=torch.int32).view(torch.float32)
    x_TGA = bits.expand(1, G, A).contiguous()
    call(native.store_kv_cpu, *caches, x_TGA, x_TGA, torch.tensor([slot]), 1, G, A, B, num_pages, FORMATS[dtype])
    return [cache.view(torch.int8).flatten() != 0 for cache in caches]


def test_bfloat16_rounds_as_in_torch(native):
    bits = torch.cat([torch.randint(-(2**31), 2**31, (60000,), generator=torch.Generator().manual_seed(2)),
                      torch.arange(0x3F7F0000, 0x3F810000), torch.arange(0x7F7EFFF0, 0x7F800000)])
    values = bits.to(torch.int32).view(torch.float32)
    values = values[: len(values) // 16 * 16].view(-1, 1, 16).contiguous()
    keys, T = torch.zeros_like(values), len(values)
    k, v = torch.zeros(2, -(-T // 16), 1, 256, dtype=torch.bfloat16)
    call(native.store_kv_cpu, k, v, keys, values, torch.arange(T), T, 1, 16, 16, len(k), FORMATS[torch.bfloat16])
    got = v.view(-1, 8, 16, 2).transpose(2, 3).reshape(-1, 1, 16)[:T]
    assert torch.equal(got.nan_to_num(3), values.bfloat16().nan_to_num(3))
    assert torch.equal(got.isnan(), values.isnan())


@pytest.mark.parametrize("B", [16, 64])
def test_int8_rounds_as_the_reference(native, B):
    T, G, A, num_pages = 70, 2, 48, 8
    keys, values = (random(T, G, A, seed=seed) * torch.logspace(-30, 30, T)[:, None, None] for seed in (1, 2))
    for x in (keys, values):
        x[0], x[1, :, 7] = 0, 3e38
        x[2] *= 1e-10  # subnormal scales
        x[3] = (torch.arange(A) - 20.5) / 8  # halves of the greatest, 127 eighths
        x[3, :, 0] = -127 / 8
    keys[4, 1, 5], keys[5, 0, 3], values[6, 1, 0], values[7, 0, 9] = math.nan, math.inf, -math.inf, math.nan
    reference = kernels.new_kv(num_pages, B, G, A, A, torch.int8, "cpu", 0)
    for cells, scale in ((reference.k, reference.k_scale), (reference.v, reference.v_scale)):
        cells.fill_(-1), scale.fill_(math.nan)
    k, v = (new_cache(native, num_pages, G, A, B, torch.int8) for _ in range(2))
    slot_T = torch.randperm(num_pages * B, generator=torch.Generator().manual_seed(1))[:T]
    kernels.store_kv_(reference, keys, values, slot_T)
    call(native.store_kv_cpu, k, v, keys, values, slot_T, T, G, A, B, num_pages, FORMATS[torch.int8])
    k_cells = k[..., : A * B].view(num_pages, G, B // 16, A // 4, 16, 4).permute(0, 2, 4, 1, 3, 5)
    v_cells = v[..., : A * B].view(num_pages, G, A // 16, B // 4, 16, 4).permute(0, 3, 5, 1, 2, 4)
    for cells, expected in ((k_cells, reference.k), (v_cells, reference.v)):
        assert torch.equal(cells.reshape(expected.shape), expected)
    for cache, expected in ((k, reference.k_scale), (v, reference.v_scale)):
        scale_PBG = cache[..., A * B :].contiguous().view(torch.float32).transpose(1, 2)
        assert torch.equal(scale_PBG.nan_to_num(-1), expected.nan_to_num(-1))
    assert reference.v_scale.flatten(0, 1)[slot_T[4:8]].isnan().tolist() == [[False, True], [True, False]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("A", [64, 128])
def test_attention_errs_with_an_int8_cache_as_theory_says(native, A):
    """Rounding adds to each number of a key or value an error that is spread evenly over its scale s, of variance
    s^2 / 12. With p the softmax and o the result, that of number a is then the sum over the places of
    p^2 (s_v^2 / 12 + (v_a - o_a)^2 |scale q|^2 s_k^2 / 12), and no more than s_v / 2 + (e^(2 e) - 1) max |v| where
    no score is off by more than e = max |scale q|_1 s_k / 2."""
    length = 400
    requests = Requests(native, [length], 4, 2, A, 32, torch.int8)
    [out] = requests.attend([(0, 0, length)])
    q, keys, values = requests.queries[0].double() * A**-0.5, requests.keys[0].double(), requests.values[0].double()
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))  # (H, L, A)
    s_k, s_v = (x.abs().amax(-1) / 127 for x in (k, v))
    scores = (q.transpose(0, 1) @ k.mT).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    p = scores.softmax(-1)
    exact = p @ v
    wrong = out.double().transpose(0, 1) - exact
    score_error = q.abs().sum(-1).T[..., None] * s_k.amax(-1)[:, None, None] / 2
    most = s_v.amax(-1)[:, None, None] / 2 + torch.expm1(2 * score_error) * v.abs().amax()
    assert (wrong.abs() <= most).all()
    spread = (v[:, None] - exact[:, :, None]).square() * (q.square().sum(-1).T[..., None] * s_k.square()[:, None] / 12)[
        ..., None]
    variance = (p.square()[..., None] * (s_v.square()[:, None, :, None] / 12 + spread)).sum(2)
    assert 0.9 < (wrong.square().mean() / variance.mean()).sqrt() < 1.1


@pytest.mark.parametrize("T, D", [(1, 576), (70, 1536), (3, 1), (2, 16384), (5, 37)])
def test_rms_norm(native, T, D):
    x_TD, weight_D = random(T, D) * 10, random(D, seed=1)
    out = torch.full_like(x_TD, POISON)
    call(native.rms_norm_cpu, out, x_TD, weight_D, T, D, 1e-5)
    exact = kernels.rms_norm(x_TD.double(), weight_D.double(), 1e-5)
    assert error(out, exact) <= max(2 * error(kernels.rms_norm(x_TD, weight_D, 1e-5), exact), 5e-7)
    alone = torch.empty(1, D)
    call(native.rms_norm_cpu, alone, x_TD[-1:], weight_D, 1, D, 1e-5)
    assert torch.equal(alone, out[-1:])
    for bad in (math.nan, math.inf):
        x_TD[0, D // 2] = bad
        damaged = torch.empty_like(out)
        call(native.rms_norm_cpu, damaged, x_TD, weight_D, T, D, 1e-5)
        assert not damaged[0].isfinite().all() and torch.equal(damaged[1:], out[1:])


@pytest.mark.parametrize("T, F", [(1, 8960), (70, 1536), (3, 1), (2, 16389)])
def test_silu_mul(native, T, F):
    x_T2F = random(T, 2 * F) * 8
    x_T2F[0, 0] = -200
    out = torch.full((T, F), POISON)
    call(native.silu_mul_cpu, out, x_T2F, T, F)
    exact = kernels.silu_mul(x_T2F.double())
    wrong = (out.double() - exact).abs() / exact.abs().clamp(min=1e-30)
    assert wrong.max() < 5e-7
    alone = torch.empty(1, F)
    call(native.silu_mul_cpu, alone, x_T2F[-1:], 1, F)
    assert torch.equal(alone, out[-1:])
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, F, F - 1):
            damaged, x = torch.empty_like(out), x_T2F.clone()
            x[0, place] = bad
            call(native.silu_mul_cpu, damaged, x, T, F)
            assert not damaged[0].isfinite().all() and torch.equal(damaged[1:], out[1:])


@given(seed=st.integers(0, 2**30), V=st.sampled_from([1, 15, 16, 8191, 8193, 49152]))
def test_argmax(native, seed, V):
    x_LV = random(6, V, seed=seed).mul(3).round()  # many ties
    x_LV[1] = -5
    x_LV[2, V // 2] = math.nan
    x_LV[3, V - 1] = -math.inf
    x_LV[4, 0] = math.inf
    id_L = torch.zeros(6, dtype=torch.int64)
    call(native.argmax_cpu, id_L, x_LV, 6, V)
    best_L = (x_LV == x_LV.max(-1, keepdim=True).values).long().argmax(-1)
    best_L[2:5] = -1
    assert id_L.tolist() == best_L.tolist()
