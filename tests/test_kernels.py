"""kernels.py: each operation against a slow, obvious computation in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from trees import ancestors, in_window, random_paths


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(got, exact):
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3),
                                          (torch.float16, 1e-3)])
def test_elementwise_operations(dtype, bound):
    x, weight = random(5, 64, dtype=dtype), random(64, seed=1, dtype=dtype)
    exact, w = x.double(), weight.double()
    norm = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    assert relative_error(kernels.rms_norm(x, weight, 1e-5), norm) < bound
    gate, up = exact[:, :32], exact[:, 32:]
    assert relative_error(kernels.silu_mul(x), gate / (1 + (-gate).exp()) * up) < bound * 2
    table = random(9, 64, seed=2, dtype=dtype)
    assert torch.equal(kernels.embed(table, torch.tensor([8, 0, 8])), table[[8, 0, 8]])
    matrix, bias = random(16, 64, seed=3, dtype=dtype), random(16, seed=4, dtype=dtype)
    assert relative_error(kernels.linear(x, matrix, bias), exact @ matrix.double().T + bias.double()) < bound


def test_rope_rotates_pairs_by_position_times_frequency():
    x = random(3, 2, 10)  # three tokens, two heads, 6 of 10 entries rotated
    positions, frequencies = torch.tensor([0, 5, 1000]), torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    cos, sin = kernels.rope_angles(positions, frequencies, 1.5, torch.float64)
    rotated = kernels.rope(x, cos, sin)
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for i, frequency in enumerate(frequencies.tolist()):
                pair = complex(x[t, head, i], x[t, head, i + 3])
                turn = 1.5 * complex(math.cos(position * frequency), math.sin(position * frequency))
                assert complex(rotated[t, head, i], rotated[t, head, i + 3]) == pytest.approx(pair * turn, abs=1e-12)
    assert torch.equal(rotated[..., 6:], x[..., 6:])


def test_rope_is_exact_at_far_positions():
    cos, _ = kernels.rope_angles(torch.tensor([1_000_003]), torch.tensor([0.7], dtype=torch.float64), 1, torch.float32)
    assert cos.item() == pytest.approx(math.cos(1_000_003 * 0.7), abs=1e-6)


def paged(lengths, G, A, B, seed=0, num_spare=3, dtype=torch.float64):
    """A cache of NaN with the keys and values of `lengths` tokens a request scattered over pages in random order."""
    counts = [-(-length // B) for length in lengths]
    P = sum(counts) + num_spare
    order = torch.randperm(P, generator=torch.Generator().manual_seed(seed)).tolist()
    kv = kernels.new_kv(P, B, G, A, A, dtype, "cpu", 0)
    for memory in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if memory is not None:
            memory.fill_(-1 if memory.dtype == torch.int8 else math.nan)
    table_SM = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    keys, values = [], []
    for s, (length, count) in enumerate(zip(lengths, counts)):
        pages = [order.pop() for _ in range(count)]
        table_SM[s, :count] = torch.tensor(pages, dtype=torch.int32)
        keys.append(random(length, G, A, seed=seed + 10 * s))
        values.append(random(length, G, A, seed=seed + 10 * s + 1))
        slot_T = torch.tensor([pages[i // B] * B + i % B for i in range(length)])
        kernels.store_kv_(kv, keys[-1], values[-1], slot_T)
    return kv, table_SM, keys, values


def batch_of(starts, lengths, table_SM, ancestors_T=None):
    """What attention reads of a model.Batch."""
    return SimpleNamespace(starts_S1=torch.tensor(starts), lengths_S=torch.tensor(lengths), tables=(table_SM,),
                           lease_S=torch.arange(len(lengths)), ancestors_T=ancestors_T)


def naive_attention(q_THA, keys, values, new, scale, window):
    out, row = torch.empty_like(q_THA), 0
    for k_LGA, v_LGA, num_new in zip(keys, values, new):
        for i in range(num_new):
            place = len(k_LGA) - num_new + i
            first = max(0, place + 1 - window) if window else 0
            for head in range(q_THA.shape[1]):
                group = head // (q_THA.shape[1] // k_LGA.shape[1])
                scores = k_LGA[first : place + 1, group] @ q_THA[row, head] * scale
                out[row, head] = torch.softmax(scores, 0) @ v_LGA[first : place + 1, group]
            row += 1
    return out


@given(st.integers(0, 2**30), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5),
       st.sampled_from([(1, 1), (4, 2), (6, 1), (7, 7)]), st.sampled_from([8, 16, 20, 40]),
       st.sampled_from([8, 16, 32]), st.sampled_from([0, 0, 1, 5, 64]))
def test_attention_over_pages_equals_loops(seed, requests, heads, A, B, window):
    """Ragged queries, grouped heads, windows; pages hold NaN wherever nothing was stored."""
    H, G = heads
    new = [num_new for _, num_new in requests]
    lengths = [past + num_new for past, num_new in requests]
    kv, table_SM, keys, values = paged(lengths, G, A, B, seed)
    q_THA = random(sum(new), H, A, seed=seed + 5)
    batch = batch_of([sum(new[:s]) for s in range(len(new) + 1)], lengths, table_SM)
    out = kernels.attention(q_THA, kv, batch, A**-0.5, window)
    assert torch.allclose(out, naive_attention(q_THA, keys, values, new, A**-0.5, window), atol=1e-12)


@given(st.integers(0, 2**30), st.integers(0, 40), st.integers(1, 20), st.sampled_from([0, 1, 3, 6, 30]),
       st.sampled_from([8, 16]))
def test_attention_in_a_tree_equals_loops(seed, past, num_new, window, B):
    """Beside a chain. A window is measured along a token's path; what is not finite on another does not matter."""
    paths = random_paths(num_new, torch.Generator().manual_seed(seed))
    kv, table_SM, keys, values = paged([past + num_new, 20], 2, 16, B, seed)
    q_THA = random(num_new + 3, 4, 16, seed=seed + 5)
    ancestors_T = torch.cat([ancestors(paths), torch.tensor([-1, -1, -1])])
    batch = batch_of([0, num_new, num_new + 3], [past + num_new, 20], table_SM, ancestors_T)
    seen = [in_window([*range(past), *(past + j for j in path)], window) for path in paths]

    def expected():
        rows = [naive_attention(q_HA[None], [keys[0][place_L]], [values[0][place_L]], [1], 0.25, 0)
                for q_HA, place_L in zip(q_THA, seen)]
        return torch.cat([*rows, naive_attention(q_THA[num_new:], keys[1:], values[1:], [3], 0.25, window)])

    whole = kernels.attention(q_THA, kv, batch, 0.25, window)
    assert torch.allclose(whole, expected(), atol=1e-12)
    place = past + seed % num_new
    keys[0][place, 1, 3] = math.nan
    slot_T = table_SM[0, place // B].long()[None] * B + place % B
    kernels.store_kv_(kv, keys[0][place : place + 1], values[0][place : place + 1], slot_T)
    sees = torch.tensor([place in place_L for place_L in seen] + [False] * 3)
    out = kernels.attention(q_THA, kv, batch, 0.25, window)
    assert out[sees].isnan().all() and torch.allclose(out[~sees], whole[~sees], atol=1e-12)


@given(st.integers(0, 2**30), st.sampled_from(["q", "k", "v"]), st.sampled_from([math.nan, math.inf, -math.inf]),
       st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]),
       st.sampled_from([0, 3, 64]))
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(seed, part, bad, dtype, window):
    """Rows before it keep their bits, as do other requests: other prompts may find their keys in the prefix cache."""
    picks = torch.Generator().manual_seed(seed)
    new = torch.randint(1, 12, (3,), generator=picks).tolist()
    lengths = [num_new + int(torch.randint(0, 30, (), generator=picks)) for num_new in new]
    starts = [sum(new[:s]) for s in range(4)]
    kv, table_SM, keys, values = paged(lengths, 2, 16, 8, seed, dtype=dtype)
    batch = batch_of(starts, lengths, table_SM)
    q_THA = random(sum(new), 4, 16, seed=seed, dtype=torch.float32 if dtype == torch.int8 else dtype)
    whole = kernels.attention(q_THA, kv, batch, 0.25, window)
    assert whole.isfinite().all()

    past = lengths[1] - new[1]
    place = int(torch.randint(past if part == "q" else 0, lengths[1], (), generator=picks))
    if part == "q":
        q_THA[starts[1] + place - past, 1, 3] = bad
    else:
        row = {"k": keys, "v": values}[part][1][place : place + 1]
        row[0, 1, 3] = bad
        slot_T = table_SM[1, place // 8].long()[None] * 8 + place % 8
        kernels.store_kv_(kv, keys[1][place : place + 1], values[1][place : place + 1], slot_T)
    out = kernels.attention(q_THA, kv, batch, 0.25, window)
    sees = torch.zeros(sum(new), dtype=torch.bool)
    for i in range(past, lengths[1]):
        in_sight = place <= i and (not window or place > i - window)
        sees[starts[1] + i - past] = i == place if part == "q" else in_sight
    assert out[sees].isnan().all() and torch.equal(out[~sees], whole[~sees])


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_an_int8_cache_is_cells_times_scales(dtype, bound):
    """The greatest number is 127 of them, the others are off by half a scale at most; attention reads just that."""
    kv, table_SM, keys, values = paged([40, 9], 2, 16, 8, dtype=torch.int8)
    stored = []
    for cells, scales, given in ((kv.k, kv.k_scale, keys), (kv.v, kv.v_scale, values)):
        for s, x_LGA in enumerate(given):
            c, scale = (cached[table_SM[s]].flatten(0, 1)[: len(x_LGA)].double() for cached in (cells, scales))
            assert torch.allclose(127 * scale, x_LGA.abs().amax(-1), rtol=1e-6) and (c.abs().amax(-1) == 127).all()
            stored.append(c * scale[..., None])
            assert ((stored[-1] - x_LGA).abs() <= scale[..., None] * 0.5001).all()
    q_THA = random(13, 4, 16, seed=5, dtype=dtype)
    out = kernels.attention(q_THA, kv, batch_of([0, 4, 13], [40, 9], table_SM), 0.25)
    exact = naive_attention(q_THA.double(), stored[:2], stored[2:], [4, 9], 0.25, 0)
    assert torch.allclose(out.double(), exact, atol=bound)


def test_store_touches_only_its_slots():
    kv, _, _, _ = paged([5], 2, 8, 8)
    before = kv.k.clone(), kv.v.clone()
    k_TGA, v_TGA = random(2, 2, 8, seed=3), random(2, 2, 8, seed=4)
    kernels.store_kv_(kv, k_TGA, v_TGA, torch.tensor([9, 26]))
    for tensor, old, new in ((kv.k, before[0], k_TGA), (kv.v, before[1], v_TGA)):
        flat, old = tensor.flatten(0, 1), old.flatten(0, 1).clone()
        old[[9, 26]] = new
        assert torch.equal(flat.nan_to_num(7), old.nan_to_num(7))


def test_strided_inputs_equal_contiguous_ones():
    """Slices of a fused projection reach these operations as they are."""
    fused = random(4, 3, 40)
    cos, sin = kernels.rope_angles(torch.arange(4), kernels.rope_frequencies(1e4, 16), 1, torch.float64)
    view = fused[:, :2, :16]
    assert torch.equal(kernels.rope(view, cos, sin), kernels.rope(view.contiguous(), cos, sin))
    kv, table_SM, _, _ = paged([6], 2, 16, 8)
    batch = batch_of([0, 4], [6], table_SM)
    assert torch.equal(kernels.attention(view, kv, batch, 0.25), kernels.attention(view.contiguous(), kv, batch, 0.25))
