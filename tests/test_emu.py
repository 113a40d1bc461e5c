"""The CUDA kernels against their references in kernels.py: through the emulator, and on a device where there is one
(marker gpu). And the emulator against faults.

The emulator computes with the lowest thread first and with the highest first: a kernel that lacks a barrier gives other
numbers in one of them.
"""

import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import emulator
import gpu
import kernels
import quant
from kernels import DrawRules
from on_device import OnDevice
from trees import ancestors, random_paths

FORMATS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
# Where a block has its float16 scale, and its minimum.
HALVES = {"q4_0": (0,), "q5_0": (0,), "q8_0": (0,), "q3_k": (108,), "q6_k": (208,), "q2_k": (80, 82)}


@pytest.fixture(scope="module")
def emulated():
    return emulator.load()


@pytest.fixture(scope="module")
def on_device():
    return OnDevice(gpu.load())


@pytest.fixture(params=["lowest thread first", "highest thread first", pytest.param("device", marks=pytest.mark.gpu)])
def ops(request):
    if request.param == "device":
        yield request.getfixturevalue("on_device")
        return
    emulated = request.getfixturevalue("emulated")
    emulated.set_order(request.param.startswith("highest"))
    yield emulated
    emulated.set_order(0)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(out: torch.Tensor, exact: torch.Tensor, same_precision: torch.Tensor) -> None:
    """An error of at most twice that of torch in the same precision, and not nothing but zeros."""
    error, allowed = (out - exact).abs().max(), (same_precision - exact).abs().max()
    assert error <= 2 * allowed + 1e-7 * exact.abs().max() and exact.abs().max() > 0


# Rows ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("T, D", [(1, 64), (3, 100), (40, 577), (5, 2048), (0, 64)])
def test_rms_norm(ops, T, D):
    x_TD, weight_D = 3 * rand(T, D), rand(D, seed=1)
    out_TD = ops.rms_norm(x_TD, weight_D, 1e-5)
    if T:
        assert_close(out_TD, kernels.rms_norm(x_TD.double(), weight_D.double(), 1e-5),
                     kernels.rms_norm(x_TD, weight_D, 1e-5))
        assert torch.equal(out_TD[-1:], ops.rms_norm(x_TD[-1:].clone(), weight_D, 1e-5))


@pytest.mark.parametrize("T, F", [(1, 96), (7, 101), (40, 1540)])
def test_silu_mul(ops, T, F):
    x_T2F = 4 * rand(T, 2 * F)
    assert_close(ops.silu_mul(x_T2F), kernels.silu_mul(x_T2F.double()), kernels.silu_mul(x_T2F))


@pytest.mark.slow
def test_more_rows_than_a_grid_has_in_its_second_dimension(ops):
    """65,535; the last row against the same alone. (Attention looks through all requests for every one: too slow.)"""
    T, A, last = 65_540, 32, slice(65_539, 65_540)
    x_TD, slot_T = rand(T, A), torch.arange(T)
    for work in (ops.silu_mul, lambda x_TD: ops.rms_norm(x_TD, torch.ones(A), 1e-5)):
        assert torch.equal(work(x_TD)[last], work(x_TD[last].clone()))
    table = ops.pack([("q8_0", (16, A), random_blocks("q8_0", 16, A))])
    token_T = slot_T % 16
    assert torch.equal(ops.embed(table, token_T)[last], ops.embed(table, token_T[last].clone()))
    assert torch.equal(ops.linear(x_TD, table)[last], ops.linear(x_TD[last].clone(), table))
    angles = ops.rope_angles(slot_T, kernels.rope_frequencies(10000.0, A), 1.0, torch.float32)
    kv, alone_kv = (ops.new_kv(T // 4, 4, 1, A, A, torch.bfloat16, "cpu", 0) for _ in range(2))
    qkv_TX = rand(T, 3 * A, seed=1)
    q_THA = ops.rope_store_(kv, qkv_TX, angles, slot_T, A)
    own = qkv_TX[last].clone(), tuple(angle[last].clone() for angle in angles), slot_T[last].clone()
    assert torch.equal(q_THA[last], ops.rope_store_(alone_kv, *own, A))
    assert torch.equal(kv.k[-1, :, 3], alone_kv.k[-1, :, 3]) and torch.equal(kv.v[-1, :, 3], alone_kv.v[-1, :, 3])


def test_tensors_with_gaps_or_of_another_type_are_refused(emulated):
    x_TD = rand(4, 64)
    for bad in (x_TD[:, :32], x_TD.t(), x_TD.double(), x_TD[:, :32].expand(4, 32)):
        with pytest.raises(ValueError, match="contiguous"):
            emulated.rms_norm(bad, torch.ones(bad.shape[1]), 1e-5)
    with pytest.raises(ValueError, match="shape|weights"):
        emulated.rms_norm(x_TD, torch.ones(32), 1e-5)


@pytest.mark.parametrize("T, E", [(0, 3), (1, 1), (300, 7), (700, 3)])
def test_group_by_expert(ops, T, E):
    expert_T = torch.randint(-1, E + 1, (T,), generator=torch.Generator().manual_seed(T))
    order_T, starts = ops.group_by_expert(expert_T, E)
    groups = [(expert_T == expert).nonzero().flatten().tolist() for expert in range(E)]
    assert [order_T[a:b].tolist() for a, b in zip(starts, starts[1:])] == groups


# Matrices ------------------------------------------------------------------------------------------------------------

def random_blocks(name: str, num_rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A matrix's bytes: every bit pattern of quants and small scales, float16 scales of a sensible size."""
    generator, format = torch.Generator().manual_seed(seed), quant.FORMATS[name]
    num_blocks = num_rows * columns // format.block
    raw = torch.randint(0, 256, (num_blocks, format.nbytes), dtype=torch.uint8, generator=generator)
    for offset in HALVES.get(name, (0, 2)):
        scale = torch.rand(num_blocks, 1, generator=generator) * 0.1 - 0.03
        raw[:, offset : offset + 2] = scale.half().view(torch.uint8)
    return raw.view(num_rows, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_are_the_numbers_of_quant(ops, name):
    raw, tokens = random_blocks(name, 37, 512), torch.tensor([0, 36, 17, 17, 8])
    table = ops.pack([(name, (37, 512), raw)])
    weight_VD = quant.dequantize(raw.flatten(), name, (37, 512), torch.float32)
    assert torch.equal(ops.embed(table, tokens), weight_VD[tokens])


@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_same_bits_for_few_and_many_rows(ops, name):
    """Over several segments of the inputs; the last panel of outputs and the last tile of rows are not full."""
    raw = random_blocks(name, 150, 768)
    weights, bias_O = ops.pack([(name, (150, 768), raw)]), rand(150, seed=2)
    x_TI = rand(70, 768, seed=1)
    y_TO = ops.linear(x_TI, weights, bias_O)
    for num in (1, 2, 8, 9, 16, 17, 65):
        assert torch.equal(ops.linear(x_TI[:num].clone(), weights, bias_O), y_TO[:num])
    exact_TO = kernels.linear(x_TI.double(), quant.dequantize(raw.flatten(), name, (150, 768), torch.float64))
    error = (y_TO - bias_O - exact_TO).abs().max() / exact_TO.abs().max()
    assert error < 0.01  # what rounding x to 8 bits costs


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns, num_rows", [(256, 5), (256, 20)])
def test_products_have_the_bits_of_the_cpu(emulated, native_ops, name, columns, num_rows):
    """As far as one segment reaches: beyond it, sums are taken in another order."""
    parts = [(name, (33, columns), random_blocks(name, 33, columns, seed)) for seed in range(2)]
    x_TI, bias_O = rand(num_rows, columns), rand(66, seed=1)
    ours_TO, theirs_TO = (ops.linear(x_TI, ops.pack(parts), bias_O) for ops in (emulated, native_ops))
    assert torch.equal(ours_TO, theirs_TO)
    for ops, y_TO in ((emulated, ours_TO), (native_ops, theirs_TO)):
        ops.linear_add_(y_TO, x_TI, ops.pack(parts))
    assert torch.equal(ours_TO, theirs_TO)


def test_products_of_several_formats_and_of_inputs_that_fill_no_step(ops):
    names, columns = ("q4_0", "q8_0", "q4_0"), 96
    parts = [(name, (20, columns), random_blocks(name, 20, columns, i)) for i, name in enumerate(names)]
    x_TI = rand(18, columns)
    together = ops.linear(x_TI, ops.pack(parts))
    assert torch.equal(together, torch.cat([ops.linear(x_TI, ops.pack([part])) for part in parts], 1))
    assert torch.equal(ops.linear(x_TI, ops.first_outputs(ops.pack(parts[:1]), 16)), together[:, :16])


def test_what_is_not_finite_spoils_its_own_row_alone(ops):
    weights = ops.pack([("q4_k", (40, 512), random_blocks("q4_k", 40, 512))])
    x_TI = rand(20, 512)
    clean_TO = ops.linear(x_TI, weights)
    x_TI[3, 100], x_TI[19, 511], x_TI[0, 0] = math.nan, math.inf, 1e-42
    y_TO = ops.linear(x_TI, weights)
    assert y_TO[3].isnan().all() and y_TO[19].isnan().all()
    rest = [row for row in range(1, 19) if row != 3]
    assert torch.equal(y_TO[rest], clean_TO[rest]) and y_TO[0].isfinite().all()


@pytest.mark.parametrize("name, dtype", [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_plain_weights_through_torch(emulated, name, dtype):
    weight_OI, x_TI = rand(48, 64, seed=1).to(dtype), rand(17, 64)
    weights = emulated.pack([(name, (48, 64), weight_OI.view(torch.uint8))])
    assert torch.equal(emulated.linear(x_TI, weights), kernels.linear(x_TI.to(dtype), weight_OI).float())
    assert torch.equal(emulated.embed(weights, torch.tensor([3, 0])), weight_OI[[3, 0]].float())


@pytest.mark.parametrize("O, I", [(33, 64), (16, 1000), (70, 2056)])
def test_few_rows_on_plain_weights(ops, O, I):
    weight_OI, x_TI, bias_O = rand(O, I, seed=1).bfloat16(), rand(16, I), rand(O, seed=2)
    weights = ops.pack([("bf16", (O, I), weight_OI.view(torch.uint8))])
    y_TO = ops.linear(x_TI, weights, bias_O)
    exact_TO = kernels.linear(x_TI.double(), weight_OI.double(), bias_O.double())
    assert_close(y_TO, exact_TO, kernels.linear(x_TI.bfloat16(), weight_OI, bias_O.bfloat16()).double())
    for num in (1, 2, 8, 9):
        assert torch.equal(ops.linear(x_TI[:num].clone(), weights, bias_O), y_TO[:num])


@pytest.fixture
def small_blocks(emulated):
    """Whose blocks may share 99 KB, as those of capability 8.6 and 8.9."""
    emulated.set_block_bytes(99 << 10)
    yield emulated
    emulated.set_block_bytes(227 << 10)


@pytest.mark.parametrize("name", ["bf16", "q4_0"])
def test_many_inputs_fit_a_small_gpu(small_blocks, name):
    """Whose segments' sums would take more, all together; many rows, which keep theirs in registers, have the bits."""
    I = 65536
    raw = random_blocks(name, 16, I) if name != "bf16" else rand(16, I, seed=1).bfloat16().view(torch.uint8)
    weights, x_TI = small_blocks.pack([(name, (16, I), raw)]), rand(20, I)
    y_TO = small_blocks.linear(x_TI[:16].clone(), weights)
    weight_OI = quant.dequantize(raw.flatten(), name, (16, I), torch.float64)
    exact_TO = kernels.linear(x_TI[:16].double(), weight_OI)
    assert (y_TO - exact_TO).abs().max() < 0.01 * exact_TO.abs().max()
    assert torch.equal(small_blocks.linear(x_TI[:5].clone(), weights), y_TO[:5])
    if name != "bf16":
        assert torch.equal(small_blocks.linear(x_TI, weights)[:16], y_TO)


# The cache -----------------------------------------------------------------------------------------------------------

def test_heads_that_a_small_gpu_cannot_serve(emulated, monkeypatch):
    """One whose blocks may share 99 KB, as those of capability 8.6 and 8.9."""
    monkeypatch.setattr(emulated, "block_bytes", 99 << 10)
    with pytest.raises(ValueError, match="heads are 160 wide.*163 KB a block, but the GPU has 99"):
        emulated.new_kv(1, 16, 1, 160, 160, torch.bfloat16, "cpu", 0)
    assert emulated.new_kv(1, 16, 1, 128, 128, torch.bfloat16, "cpu", 0).k.shape == (1, 1, 16, 128)


@pytest.mark.parametrize("H, G, A, half, B", [(4, 2, 64, 32, 16), (3, 3, 20, 10, 8), (8, 1, 128, 32, 32)])
def test_rope_and_store(ops, H, G, A, half, B):
    T, num_pages = 9, 3
    qkv_TX, position_T = rand(T, (H + 2 * G) * A), torch.randint(0, 100_000, (T,))
    slot_T = torch.randperm(num_pages * B)[:T]
    slot_T[4] = -1  # of a padded token
    inv_freq = kernels.rope_frequencies(10000.0, 2 * half)
    angles = ops.rope_angles(position_T, inv_freq, 1.5, torch.float32)
    exact = kernels.rope_angles(position_T, inv_freq, 1.5, torch.float64)
    assert all((ours - theirs.squeeze(1)).abs().max() < 1e-6 for ours, theirs in zip(angles, exact))
    kv = ops.new_kv(num_pages, B, G, A, A, torch.bfloat16, "cpu", 0)
    reference = kernels.new_kv(num_pages, B, G, A, A, torch.bfloat16, "cpu", 0)
    for tensor in (kv.k, kv.v, reference.k, reference.v):
        tensor.fill_(7)
    q_THA = ops.rope_store_(kv, qkv_TX, angles, slot_T, A)
    rows = slot_T >= 0
    column_angles = tuple(angle.unsqueeze(1) for angle in angles)
    want_THA = kernels.rope_store_(reference, qkv_TX[rows], tuple(a[rows] for a in column_angles), slot_T[rows], A)
    assert torch.equal(q_THA[rows], want_THA)
    for ours, theirs in ((kv.k, reference.k), (kv.v, reference.v)):
        assert torch.equal(ours.transpose(1, 2)[..., :A], theirs)
    from_T, to_T = slot_T[rows][:3], slot_T[rows][3:6]
    ops.move_kv_(kv, from_T, to_T)
    kernels.move_kv_(reference, from_T, to_T)
    assert torch.equal(kv.k.transpose(1, 2)[..., :A], reference.k)


def filled_cache(ops, lengths, G: int, A: int, B: int, seed: int = 0):
    """Both kinds of cache, of requests of these lengths in pages at random; NaN where no token lies."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-length // B) for length in lengths) + 1
    num_pages = len(lengths) * width + 2
    table = torch.randperm(num_pages, generator=generator)[: len(lengths) * width].view(len(lengths), width).int()
    kv = ops.new_kv(num_pages, B, G, A, A, torch.bfloat16, "cpu", 0)
    reference = kernels.new_kv(num_pages, B, G, A, A, torch.bfloat16, "cpu", 0)
    for tensor in (kv.k, kv.v, reference.k, reference.v):
        tensor.fill_(math.nan)
    for s, length in enumerate(lengths):
        place = torch.arange(length)
        page = table[s, place // B].long()
        for ours, theirs in ((kv.k, reference.k), (kv.v, reference.v)):
            numbers = torch.randn(length, G, A, generator=generator).bfloat16()
            theirs[page, place % B] = numbers
            ours[page, :, place % B] = torch.nn.functional.pad(numbers, (0, ours.shape[3] - A))
    return kv, reference, table


def batch_of(table, lengths, new, ancestors=None, rows=None):
    starts = [0]
    for num in new:
        starts.append(starts[-1] + num)
    return SimpleNamespace(tables=(table,), lease_S=torch.tensor(rows if rows is not None else range(len(new))),
                           starts_S1=torch.tensor(starts), lengths_S=torch.tensor(lengths), ancestors_T=ancestors)


def alone(ops, q_THA, kv, table, lengths, new, scale, window):
    """Each token's attention as a request of its own that decodes it."""
    rows, t = [], 0
    for s, (length, num) in enumerate(zip(lengths, new)):
        for i in range(num):
            batch = batch_of(table, [length - num + i + 1], [1], rows=[s])
            rows.append(ops.attention(q_THA[t : t + 1].clone(), kv, batch, scale, window))
            t += 1
    return torch.cat(rows)


CASES = [  # H, G, A, B, lengths, new tokens, window
    (4, 2, 64, 16, [1, 40, 300], [1, 1, 1], 0),
    (4, 2, 64, 16, [1, 33, 300], [1, 33, 3], 0),
    (4, 4, 80, 8, [150, 40], [33, 40], 20),
    (6, 1, 96, 32, [200, 290], [33, 1], 150),
    (20, 1, 128, 16, [140], [18], 0),
    (2, 2, 256, 16, [150], [18], 0),
    (2, 1, 20, 64, [70], [70], 7),
]


def random_case(seed: int):
    """Up to 20 requests of 0 to 40 new tokens, in the same form."""
    numbers = random.Random(seed)
    G, R, A, B = (numbers.choice(some) for some in ((1, 2, 3), (1, 2, 3, 7), (64, 80, 96, 128, 256), (8, 16, 32, 128)))
    new = [numbers.choice((0, 1, 1, 2, numbers.randint(1, 40))) for _ in range(numbers.randint(1, 20))]
    while sum(new) > 60:
        new.pop(new.index(max(new)))
    new = new if sum(new) else [1, *new]
    lengths = [num and num + numbers.choice((0, numbers.randint(0, 40), numbers.randint(100, 300))) for num in new]
    return G * R, G, A, B, lengths, new, numbers.choice((0, numbers.randint(1, 200)))


@pytest.mark.parametrize("H, G, A, B, lengths, new, window", [*CASES, *map(random_case, range(12))])
def test_attention(ops, H, G, A, B, lengths, new, window):
    kv, reference, table = filled_cache(ops, lengths, G, A, B)
    q_THA, scale, batch = rand(sum(new), H, A, seed=1), A**-0.5, batch_of(table, lengths, new)
    out_THA = ops.attention(q_THA, kv, batch, scale, window)
    in_float64 = replace(reference, k=reference.k.double(), v=reference.v.double())
    exact_THA = kernels.attention(q_THA.double(), in_float64, batch, scale, window)
    assert_close(out_THA, exact_THA, kernels.attention(q_THA.bfloat16(), reference, batch, scale, window).double())
    assert torch.equal(out_THA, alone(ops, q_THA, kv, table, lengths, new, scale, window))


@pytest.mark.parametrize("A", [80, 72, 20])
def test_requests_beyond_half_a_warp_that_share_out_their_chunks(ops, A):
    """A width of no whole warps must not cost the last ones the requests that a warp looks through together."""
    lengths, new = [130 + i for i in range(20)], [1] * 20
    kv, _, table = filled_cache(ops, lengths, 1, A, 16)
    q_THA = rand(20, 2, A, seed=1)
    out_THA = ops.attention(q_THA, kv, batch_of(table, lengths, new), 0.1, 0)
    assert torch.equal(out_THA, alone(ops, q_THA, kv, table, lengths, new, 0.1, 0))


@pytest.mark.parametrize("new", [[17, 0], [40] + [0] * 30, [0, 20, 0], [0, 0], [0, 3, 0]])
def test_requests_without_new_tokens_stand_beside_others(ops, new):
    lengths = [50] * len(new)
    kv, _, table = filled_cache(ops, lengths, 1, 64, 16)
    q_THA = rand(sum(new), 2, 64, seed=1)
    out_THA = ops.attention(q_THA, kv, batch_of(table, lengths, new), 0.1, 0)
    want = alone(ops, q_THA, kv, table, lengths, new, 0.1, 0) if any(new) else q_THA
    assert torch.equal(out_THA, want)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("past", [0, 120, 250])
def test_a_tree_has_the_bits_of_its_paths(ops, past, window):
    """Each row of a tree, as if its ancestors alone stood before it."""
    H, G, A, B, num = 4, 2, 32, 16, 24
    paths = random_paths(num, torch.Generator().manual_seed(past))
    kv, _, table = filled_cache(ops, [past + num, 40], G, A, B)
    q_THA = rand(num + 1, H, A, seed=3)
    batch = batch_of(table, [past + num, 40], [num, 1], torch.cat((ancestors(paths), torch.tensor([-1]))))
    out_THA = ops.attention(q_THA, kv, batch, 0.2, window)
    slots = [int(table[0, place // B]) * B + place % B for place in range(past + num)]
    for row, path in enumerate(paths):
        moved = replace(kv, k=kv.k.clone(), v=kv.v.clone())
        for place, j in enumerate(path, past):
            ops.move_kv_(moved, torch.tensor([slots[past + j]]), torch.tensor([slots[place]]))
        plain = batch_of(table, [past + len(path)], [1])
        want_THA = ops.attention(q_THA[row : row + 1].clone(), moved, plain, 0.2, window)
        assert torch.equal(out_THA[row : row + 1], want_THA)


@pytest.mark.parametrize("new", [[3, 1], [40, 1]])
def test_damage_stays_with_those_who_see_it(ops, new):
    H, G, A, B, lengths = 4, 2, 64, 16, [90, 30]
    kv, _, table = filled_cache(ops, lengths, G, A, B)
    q_THA, batch = rand(sum(new), H, A), batch_of(table, lengths, new)
    clean_THA = ops.attention(q_THA, kv, batch, 0.1)
    page, place = int(table[0, 88 // B]), 88 % B
    kv.v[page, 1, place, 5] = math.inf  # the last token but one, in the second group's heads
    q_THA[0, 0, 0] = math.nan
    out_THA = ops.attention(q_THA, kv, batch, 0.1)
    assert out_THA[0, 0].isnan().all() and out_THA[new[0] - 2 : new[0], 2:, 5].isnan().all()
    assert torch.equal(out_THA[0, 1:], clean_THA[0, 1:]) or new[0] == 2
    assert torch.equal(out_THA[1 : new[0] - 2], clean_THA[1 : new[0] - 2])
    assert torch.equal(out_THA[new[0] - 2 :, :2], clean_THA[new[0] - 2 :, :2])
    assert torch.equal(out_THA[new[0] :], clean_THA[new[0] :])


def test_padded_requests_see_nothing_and_read_no_page(ops):
    kv, _, table = filled_cache(ops, [20], 2, 64, 16)
    q_THA = rand(6, 4, 64)
    alone_THA = ops.attention(q_THA[:2].clone(), kv, batch_of(table, [20], [2]), 0.1)
    padded = batch_of(table, [20, 0, 0], [2, 1, 3], rows=[0, 10**6, 10**6])
    out_THA = ops.attention(q_THA, kv, padded, 0.1)
    assert torch.equal(out_THA[:2], alone_THA) and (out_THA[2:] == 0).all()


@pytest.mark.slow
@pytest.mark.soak
def test_more_chunks_than_the_workspace_holds_are_not_shared_out(emulated):
    """2 x 8300 chunks are more than 16384: the second request is then computed whole. All pages are the same one."""
    kv = emulated.new_kv(1, 256, 1, 32, 32, torch.bfloat16, "cpu", 0)
    kv.k.copy_(rand(*kv.k.shape)), kv.v.copy_(rand(*kv.v.shape, seed=1))
    length = 8300 * 128
    q_THA, table = rand(2, 1, 32), torch.zeros(2, length // 256, dtype=torch.int32)
    both_THA = emulated.attention(q_THA, kv, batch_of(table, [length, length], [1, 1]), 0.3)
    second_THA = emulated.attention(q_THA[1:].clone(), kv, batch_of(table, [length], [1]), 0.3)
    assert torch.equal(both_THA[1:], second_THA)


# The draw ------------------------------------------------------------------------------------------------------------

def some_rules(vocab: int) -> list[DrawRules]:
    seen, count = torch.rand(vocab) < 0.3, torch.randint(0, 3, (vocab,)).double()
    ids = torch.tensor([1, 5, 5])
    return [
        DrawRules(vocab), DrawRules(vocab, 0.7), DrawRules(vocab, 1.3, top_k=5), DrawRules(vocab, 1.0, top_p=0.9),
        DrawRules(vocab, 0.8, min_p=0.05), DrawRules(vocab, 2.0, top_k=50, top_p=0.8, min_p=0.01),
        DrawRules(vocab, 1.0, top_p=1e-9), DrawRules(vocab, 1e-300, top_k=3), DrawRules(vocab, 5.0, top_k=vocab + 9),
        DrawRules(vocab, 0.9, top_p=0.95, repetition_penalty=1.3, seen_V=seen),
        DrawRules(vocab, presence_penalty=0.5, frequency_penalty=0.2, count_V=count),
        DrawRules(vocab, 1.0, bias_ids=ids, biases=torch.tensor([3.0, 1.0, -math.inf]).double()),
        DrawRules(vocab, bias_ids=ids, biases=torch.tensor([30.0, 100.0, 2.0]).double()),
    ]


@pytest.mark.parametrize("V, spread", [(40, 3.0), (3000, 3.0), (3000, 0.05)])
def test_draws_are_those_of_the_reference(ops, V, spread):
    torch.manual_seed(V)
    for vocab in (V, V - 7):
        rules = some_rules(vocab) * 2
        x_LV = spread * torch.randn(len(rules), V)
        x_LV[1::3] = (2 * x_LV[1::3]).round() / 2  # many equal logits
        keys = [hash((V, n)) % 2**64 for n in range(len(rules))]
        assert ops.draw(x_LV, rules, keys).tolist() == kernels.draw(x_LV, rules, keys).tolist()
        assert torch.equal(ops.argmax(x_LV), kernels.argmax(x_LV))


def test_nothing_is_drawn_from_rows_that_are_not_finite_or_banned(ops):
    x_LV = rand(5, 100)
    x_LV[0, 99], x_LV[1, 3] = math.nan, -math.inf
    all_ids = torch.arange(90)
    banned = DrawRules(90, 1.0, bias_ids=all_ids, biases=torch.full((90,), -math.inf).double())
    infinite = DrawRules(90, 1.0, bias_ids=all_ids[70:71], biases=torch.tensor([math.inf]).double())
    rules = [DrawRules(90, 1.0), DrawRules(90), banned, infinite, DrawRules(90, 1.0)]
    drawn = ops.draw(x_LV, rules, list(range(5))).tolist()
    assert drawn[:4] == [-1] * 4 and drawn == kernels.draw(x_LV, rules, list(range(5))).tolist()
    assert ops.argmax(x_LV).tolist()[:2] == [-1, -1]


# The emulator --------------------------------------------------------------------------------------------------------

PROGRAM = """
#include "common.cuh"
using namespace quire;
struct Shared {{ int numbers[64]; }};
__global__ void kernel(int* out, const int4* from) {{
    auto& shared = dynamic_shared<Shared>();
    const int thread = int(threadIdx.x);
    (void)out, (void)from, (void)shared;
{body}
}}
int main() {{
    int out[64] = {{}};
    alignas(16) int from[64];
    for (int i = 0; i < 64; i++) from[i] = i + 1;
    for (int order = 0; order < 2; order++) {{
        emu_set_order(order);
        const int status = launch(kernel, dim3(1), dim3(64), sizeof(Shared), nullptr, out, (const int4*)from);
        if (status != OK) return printf("%d %s\\n", status, emu_error()), 0;
        for (int number : out) printf("%d ", number);
        printf("\\n");
    }}
}}
"""
NEIGHBOUR = "shared.numbers[thread] = thread + 1; {barrier} out[thread] = shared.numbers[63 - thread];"


def said(folder, body: str, *flags: str):
    return emulator.run_program(folder, PROGRAM.format(body=body), *flags)


def numbers(line: str) -> list[int]:
    return [int(number) for number in line.split()]


def test_a_barrier_makes_threads_meet(tmp_path):
    lines = said(tmp_path, NEIGHBOUR.format(barrier="__syncthreads();")).stdout.splitlines()
    assert [numbers(line) for line in lines] == [list(range(64, 0, -1))] * 2


def test_a_missing_barrier_gives_other_numbers_by_order(tmp_path):
    lines = said(tmp_path, NEIGHBOUR.format(barrier="")).stdout.splitlines()
    assert len(lines) == 2 and lines[0] != lines[1] and -1 in numbers(lines[0])  # shared memory begins as ones


@pytest.mark.parametrize("body, message", [
    ("if (thread < 40) __syncthreads();", "thread 0 waits at .*program.cu:9, thread 40 has ended"),
    ("if (thread < 32) __syncthreads();\n    else\n        __syncthreads();",
     "thread 0 waits at .*program.cu:9, thread 32 waits at .*program.cu:11"),
    ("if (thread % 2) __syncwarp();", "waits at .*program.cu:9 for its warp"),
    ("if (thread < 33) out[0] = __shfl_xor_sync(ALL_LANES, thread, 1);",
     "thread 32 waits at .*:9 for its warp, thread 33"),
])
def test_a_divergent_barrier_is_told_with_its_line(tmp_path, body, message):
    done = said(tmp_path, body)
    assert done.returncode == 0 and done.stdout.startswith("6 divergent barrier in block (0, 0, 0)")
    assert re.search(message, done.stdout), done.stdout


@pytest.mark.parametrize("grid, block, shared_bytes", [
    ("0", "64", "0"), ("1, 0", "64", "0"), ("1, 65536", "64", "0"), ("1, 1, 65536", "64", "0"), ("1", "0", "0"),
    ("1", "1025", "0"), ("1", "64", "(227 << 10) + 1"),
])
@pytest.mark.slow
def test_a_launch_that_a_device_refuses_is_refused_with_its_sizes(tmp_path, grid, block, shared_bytes):
    launched = "launch(kernel, dim3({}), dim3({}), {},"
    text = PROGRAM.format(body="    out[0] = thread;")
    text = text.replace(launched.format("1", "64", "sizeof(Shared)"), launched.format(grid, block, shared_bytes))
    done = emulator.run_program(tmp_path, text)
    assert done.stdout.startswith("6 a grid of ") and "but there are at most" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("call", ["__shfl_sync({}, thread, 0)", "__shfl_xor_sync({}, thread, 1)",
                                  "__shfl_up_sync({}, thread, 1)", "int(__ballot_sync({}, true))",
                                  "(__syncwarp({}), 1)"])
def test_a_mask_of_lanes_that_are_not_there_is_told(tmp_path, call):
    def said_by_80_threads(mask: str) -> str:
        text = PROGRAM.format(body=f"    if (thread >= 64) out[thread - 64] = {call.format(mask)};")
        return emulator.run_program(tmp_path, text.replace("dim3(64)", "dim3(80)")).stdout

    assert re.match(r"6 the mask ffffffff at .*program.cu:9 names lanes that a warp of 16 does not have",
                    said_by_80_threads("ALL_LANES"))
    assert len(said_by_80_threads("0xffffu").splitlines()) == 2


COPY = ("cp_async_16(shared.numbers + thread % 16 * 4, from + thread % 16); cp_async_commit(); {wait} "
        "__syncthreads(); out[thread] = shared.numbers[thread]; cp_async_wait<0>();")


def test_copies_arrive_when_they_are_waited_for(tmp_path):
    right = said(tmp_path, COPY.format(wait="cp_async_wait<0>();")).stdout.splitlines()
    assert [numbers(line) for line in right] == [list(range(1, 65))] * 2
    wrong = said(tmp_path, COPY.format(wait="cp_async_wait<1>();")).stdout.splitlines()
    assert len(wrong) == 2 and -1 in numbers(wrong[0])  # in the other order they arrive at once
    never = said(tmp_path, COPY.format(wait="").replace(" cp_async_wait<0>();", ""))
    assert "ended before its cp.async arrived" in never.stdout


def test_a_write_beyond_shared_memory_is_seen_by_the_sanitizer(tmp_path):
    body = "shared.numbers[thread + {}] = 1; out[thread] = 0;"
    assert said(tmp_path, body.format(0), "-fsanitize=address").returncode == 0
    done = said(tmp_path, body.format(1), "-fsanitize=address")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def test_an_address_that_a_device_refuses_stops_the_program(tmp_path):
    done = said(tmp_path, "cp_async_16(shared.numbers + thread % 8, from); cp_async_wait<0>(); out[0] = 1;")
    assert done.returncode != 0 and "no multiple of 16" in done.stderr


def test_without_assembly_fibers_switch_through_ucontext(tmp_path):
    body = NEIGHBOUR.format(barrier="__syncthreads();")
    lines = said(tmp_path, body, "-DEMULATOR_UCONTEXT").stdout.splitlines()
    assert [numbers(line) for line in lines] == [list(range(64, 0, -1))] * 2
