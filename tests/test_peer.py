"""peer.py: the conversation with fake engines, and every way in which one can fail."""

import json
import os
import sys
import time

import pytest

import peer
from peer import Peer, Run

FAKE = '''
import json, os, sys, time
from serve import serve

def load(path):
    if path == "broken":
        raise ValueError("no such model")
    if path == "crashes":
        print("out of luck", file=sys.stderr)
        os._exit(3)
    if path == "aborts":
        os.abort()
    print("loaded, says the engine on stdout")
    return task

def task(prompts, generate, threads):
    if generate == 7:
        raise RuntimeError("seven\\nis not served")
    if generate == 8:
        os._exit(0)
    if generate == 9:
        time.sleep(60)
    print(json.dumps({"threads": threads, "OMP": os.environ.get("OMP_WAIT_POLICY")}), file=sys.stderr, flush=True)
    return {"first_token_s": 0.5, "finished_s": 1.5, "decoded": len(prompts) * (generate - 1)}

serve(load)
'''


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(model) -> a Peer named "fake", closed at the end."""
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "fake.py").write_text(FAKE)
    (tmp_path / "peers" / "serve.py").symlink_to(peer.ROOT / "peers" / "serve.py")
    (tmp_path / ".venv-peers" / "fake" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-peers" / "fake" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    monkeypatch.setitem(peer.ADAPTERS, "fake", peer.Adapter("fake.py", peer.ACTIVE))
    made = []
    yield lambda model="model", name="fake": made.append(Peer(name, model)) or made[-1]
    for each in made:
        each.close()


def test_a_run(make):
    fake = make()
    assert fake.run([[1, 2, 3], [4, 5, 6]], 5, 2) == Run(6, 10, 8, 0.5, 1.5)
    assert fake.run([[1]], 1, 2) == Run(1, 1, 0, 0.5, 1.5)
    fake.complaints.seek(0)
    said = fake.complaints.read().decode().splitlines()
    assert said[0] == "loaded, says the engine on stdout"  # which is for answers alone
    assert json.loads(said[1]) == {"threads": 2, "OMP": "active"}


def test_it_stands_still_between_its_turns(make):
    fake = make()
    fake.run([[1]], 2, 1)
    if not os.path.exists(f"/proc/{fake.process.pid}/stat"):
        pytest.skip("no /proc")

    def state() -> str:
        with open(f"/proc/{fake.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    deadline_s = time.monotonic() + 10
    while state() != "T" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert state() == "T"
    fake.run([[1]], 2, 1)
    fake.close()
    assert fake.process.returncode == -9


@pytest.mark.parametrize("model, reason", [
    ("broken", "ValueError: no such model"), ("crashes", "ended with status 3: out of luck"),
    ("aborts", "killed by SIGABRT")])
def test_one_that_does_not_start_says_why_each_time(make, model, reason):
    fake = make(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            fake.run([[1]], 2, 1)


def test_a_task_that_fails_is_not_the_end(make):
    fake = make()
    with pytest.raises(ValueError, match="^RuntimeError: seven is not served$"):
        fake.run([[1]], 7, 1)
    assert fake.run([[1]], 2, 1).decoded_tokens == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="^ended with status 0"):
            fake.run([[1]], 8, 1)


@pytest.mark.slow
def test_patience_ends(make, monkeypatch):
    monkeypatch.setattr(peer, "PATIENCE_S", 3)
    with pytest.raises(ValueError, match="^no answer within 3 s$"):
        make().run([[1]], 9, 1)


def test_one_that_is_not_installed(make):
    with pytest.raises(ValueError, match="^not installed: make bench-peers does it$"):
        make(name="llama.cpp").run([[1]], 2, 1)
    (peer.ROOT / ".venv-peers" / "llama.cpp.log").write_text("no compiler")
    with pytest.raises(ValueError, match="make bench-peers failed, .*llama.cpp.log says why"):
        make(name="llama.cpp").run([[1]], 2, 1)
