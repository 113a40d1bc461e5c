"""What every test may use: the modules, the real models (or a reason to skip them), and no more than two cores."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Read by torch when a test module first imports it, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
# A waiting thread sleeps. By default it spins, and on a busy machine keeps the core from the thread it waits for: a
# small matmul then takes 7 ms instead of 0.5.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if os.environ.get("EMULATE_AMX"):
    import instructions  # noqa: F401 (before anything loads the kernels)

import hub  # noqa: E402 (it needs the path above)
import tokens  # noqa: E402

# The same few inputs in every run, so that a failure is the change's and not the day's; `make soak` looks further.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", max_examples=50, derandomize=True, database=None, **COMMON)
settings.register_profile("soak", max_examples=5000, **COMMON)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def untimed(request, monkeypatch):
    """How much of a prompt a step reads depends on how long steps took. A test's must not, unless it states the times
    itself."""
    if request.module.__name__ not in ("test_scheduler", "test_traces"):
        monkeypatch.setattr("scheduler.Scheduler.observe", lambda self, chunks, ms: None)


def pytest_collection_modifyitems(items):
    """Tests for a device are skipped where torch finds none."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="no NVIDIA GPU here")
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(skip)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder of downloaded models. It need not exist."""
    return Path(os.environ.get("QUIRE_MODELS") or "~/.cache/quire").expanduser()


@pytest.fixture(scope="session")
def smollm2(models_dir) -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model."""
    return _model(models_dir, hub.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def qwen_05b(models_dir) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M."""
    return _model(models_dir, hub.PAIR[0])


@pytest.fixture(scope="session")
def qwen_15b(models_dir) -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: shares its tokenizer with the smaller one."""
    return _model(models_dir, hub.PAIR[1])


def _model(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}: `make models` fetches it")
    return folder / name


@pytest.fixture(scope="session")
def native_ops():
    """The native kernels, compiled if they are not, on two threads."""
    import native

    ops = native.load()
    ops.set_threads(2)
    return ops


@pytest.fixture
def tb(tmp_path):
    """A tokenizer of the 256 bytes, without merges."""
    return tokens.byte_tokenizer(tmp_path / "tb")


@pytest.fixture(scope="session")
def spm(tmp_path_factory):
    """A small sentencepiece model with byte fallback, and its pieces as (text, score, type)."""
    return tokens.train_sentencepiece(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny llama with a context of 256 tokens, for batch files."""
    import tiny

    return tiny.tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture
def engine(folder):
    """An engine on it that nobody has used."""
    import batches

    return batches.load(folder)
