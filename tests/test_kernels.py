"""kernels.py: each operation against a slow, obvious computation in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import KV


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


def paged(lengths, G, A, B, seed=0, num_spare=3):
    """A cache of NaN with the keys and values of `lengths` tokens a request scattered over pages in random order."""
    counts = [-(-length // B) for length in lengths]
    P = sum(counts) + num_spare
    order = torch.randperm(P, generator=torch.Generator().manual_seed(seed)).tolist()
    kv = KV(torch.full((P, B, G, A), math.nan, dtype=torch.float64),
            torch.full((P, B, G, A), math.nan, dtype=torch.float64), 0)
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
    batch = SimpleNamespace(starts_S1=[sum(new[:s]) for s in range(len(new) + 1)], lengths_S=lengths,
                            tables_SM=(table_SM,))
    out = kernels.attention(q_THA, kv, batch, A**-0.5, window)
    assert torch.allclose(out, naive_attention(q_THA, keys, values, new, A**-0.5, window), atol=1e-12)


def test_store_touches_only_its_slots():
    kv, _, _, _ = paged([5], 2, 8, 8)
    before = kv.k_PBGA.clone(), kv.v_PBGA.clone()
    k_TGA, v_TGA = random(2, 2, 8, seed=3), random(2, 2, 8, seed=4)
    kernels.store_kv_(kv, k_TGA, v_TGA, torch.tensor([9, 26]))
    for tensor, old, new in ((kv.k_PBGA, before[0], k_TGA), (kv.v_PBGA, before[1], v_TGA)):
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
    batch = SimpleNamespace(starts_S1=[0, 4], lengths_S=[6], tables_SM=(table_SM,))
    assert torch.equal(kernels.attention(view, kv, batch, 0.25), kernels.attention(view.contiguous(), kv, batch, 0.25))
