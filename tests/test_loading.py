"""loading.py: what a machine has is found out, and what it lacks is told before anything large is read."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvcache
import loading
import run
import tiny
from checkpoint import open_checkpoint
from engine import EngineConfig
from flags import UsageError


@pytest.mark.parametrize("cpus, quota, cores", [
    ({0, 1, 2, 3}, float("inf"), 2), ({0, 2}, float("inf"), 2), ({0, 1}, float("inf"), 1), ({0, 1, 2, 3}, 1.5, 1),
    ({0, 1, 2, 3}, 0.5, 1), ({0, 1, 2, 3}, 8.0, 2),
])
def test_threads_are_the_physical_cores_it_may_use(monkeypatch, tmp_path, cpus, quota, cores):
    """Four CPUs, of which 0 and 1, 2 and 3 share a core."""
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu & 2}-{cpu | 1}\n")
    monkeypatch.setattr(loading, "Path", lambda path: Path(str(path).replace("/sys/devices/system/cpu", str(tmp_path))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
    monkeypatch.setattr(loading, "cpu_quota", lambda: quota)
    assert loading.usable_cores() == cores


@pytest.mark.parametrize("files, quota", [
    ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "max 100000\n"}, float("inf")), ({}, float("inf")),
    ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
])
def test_a_containers_quota(monkeypatch, tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(loading, "Path", lambda path: Path(str(path).replace("/sys/fs/cgroup", str(tmp_path))))
    assert loading.cpu_quota() == quota


@pytest.fixture
def checkpoint(tmp_path):
    with open_checkpoint(tiny.tiny_llama(tmp_path, max_position_embeddings=256)) as opened:
        yield opened


def check(checkpoint, free_bytes, monkeypatch, *drafts, context=None, **config) -> None:
    for module in ("kvcache", "engine"):
        monkeypatch.setattr(f"{module}.free_memory_bytes", lambda device="cpu": free_bytes)
    loading.check_memory([checkpoint, *drafts], [torch.float32, torch.bfloat16][:1 + len(drafts)],
                         EngineConfig(**config), SimpleNamespace(device="cpu", context=context))


def test_weights_that_do_not_fit_are_refused_with_what_would(checkpoint, monkeypatch):
    num_weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) // 4
    check(checkpoint, 4 * num_weights + 10**6, monkeypatch)
    with pytest.raises(ValueError, match="float32 take .* free: --dtype float16 takes"):
        check(checkpoint, 3 * num_weights, monkeypatch)
    with pytest.raises(ValueError, match="a smaller model"):
        check(checkpoint, num_weights, monkeypatch)


def test_the_weights_of_a_draft_model_count(checkpoint, monkeypatch):
    num_weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) // 4
    check(checkpoint, 6 * num_weights + 10**6, monkeypatch, checkpoint)
    with pytest.raises(ValueError, match="of the model and of --draft in float32 take .* free: --dtype float16 takes"):
        check(checkpoint, 6 * num_weights - 1, monkeypatch, checkpoint)
    page_bytes = 8 * 2 * 4 * sum(layer.mixer == "full" for layer in checkpoint.config.layers) * (
        checkpoint.config.kv_heads * checkpoint.config.head_dim)
    with pytest.raises(ValueError, match="a cache of 2 pages .*--num-pages 1 "):
        check(checkpoint, 6 * num_weights + page_bytes, monkeypatch, checkpoint, num_pages=2, page_size=8)


WITH_KERNELS, THROUGH_TORCH = SimpleNamespace(pack=None), SimpleNamespace()


def matrix_dtype(dtype: str, ops, device: str = "cpu", head_dim: int = 64) -> torch.dtype | None:
    args = SimpleNamespace(dtype="auto", cache_dtype="auto", kernels="auto", device=device)
    return loading.matrix_dtype(SimpleNamespace(dtype=dtype, head_dim=head_dim), ops, args)


def test_a_draft_model_keeps_its_own_type_where_the_models_kernels_serve_it():
    assert matrix_dtype("quantized", WITH_KERNELS) is None
    assert [matrix_dtype(dtype, WITH_KERNELS) for dtype in ("bfloat16", "float16", "float32")] == [
        torch.bfloat16, torch.float32, torch.float32]
    assert [matrix_dtype(dtype, THROUGH_TORCH) for dtype in ("quantized", "bfloat16", "float16")] == [
        torch.bfloat16, torch.bfloat16, torch.float16]


def test_a_draft_model_that_the_models_kernels_do_not_serve_is_refused():
    for device, widest in (("cpu", 512), ("cuda", 256)):
        matrix_dtype("bfloat16", WITH_KERNELS, device, widest)
        with pytest.raises(UsageError, match=f"--draft has heads {widest + 2} wide .* at most {widest}:"):
            matrix_dtype("bfloat16", WITH_KERNELS, device, widest + 2)


def test_a_cache_that_does_not_fit_is_refused_with_what_would(checkpoint, monkeypatch):
    """What the message says fits, fits, and a page more does not."""
    c = checkpoint.config
    page_bytes = 8 * 2 * len(c.layers) * c.kv_heads * c.head_dim * 4
    weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    free_bytes = weights + 10 * page_bytes + 1
    with pytest.raises(ValueError, match=r"cache of 11 pages .*--num-pages 10 .*, 80 tokens.* or .*int8"):
        check(checkpoint, free_bytes, monkeypatch, num_pages=11, page_size=8)
    check(checkpoint, free_bytes, monkeypatch, num_pages=10, page_size=8)
    with pytest.raises(ValueError, match="--num-pages 10 "):
        check(checkpoint, free_bytes, monkeypatch, cache_memory_gb=11 * page_bytes / 1e9, page_size=8)
    check(checkpoint, free_bytes, monkeypatch, cache_memory_gb=1, max_requests=1, page_size=8, context=80)


def test_a_command_says_so_before_it_loads(tmp_path, monkeypatch, capsys):
    path = tiny.tiny_llama(tmp_path / "model")
    monkeypatch.setattr("kvcache.free_memory_bytes", lambda device="cpu": 1000)
    monkeypatch.setattr("model.load_model", lambda *args, **options: pytest.fail("it was loaded"))
    assert run.main(["generate", "-m", str(path), "-p", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("run.py: error: the weights in float32 take") and error.count("\n") == 1


@pytest.mark.parametrize("files, free", [
    ({"memory.max": "1000", "memory.current": "300", "memory.stat": "anon 1\ninactive_file 100\n"}, 800),
    ({"memory.max": "max", "memory.current": "300", "memory.stat": "inactive_file 100\n"}, None),
    ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "300",
      "memory/memory.stat": "total_inactive_file 100\n"}, 800), ({}, None)])
def test_a_containers_memory(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [limit - used for limit, used in kvcache.group_memory(tmp_path)] == ([free] if free else [])
