"""Other engines, measured beside this one: each in a process and an environment of its own, driven by an adapter.

Owns the conversation with an adapter, whose words peers/serve.py describes, and what becomes of one that fails. Knows
nothing of workloads. An engine that has nothing to do is stopped: its threads may spin while they wait, and would take
the cores from the one whose turn it is. Start at `Peer.run`.
"""

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PATIENCE_S = 300  # a start or a task that takes longer has failed


@dataclass(frozen=True)
class Adapter:
    """A script in peers/, and the words before it that put its engine into its best known configuration."""

    script: str
    settings: tuple[str, ...] = ()


# Threads that stay on their cores and keep watching for work; not what run.py has set for torch here.
ACTIVE = ("-u", "GOMP_SPINCOUNT", "OMP_PROC_BIND=true", "OMP_WAIT_POLICY=active")
ADAPTERS = {
    "llama.cpp": Adapter("llama_cpp_peer.py", (*ACTIVE, "GLIBC_TUNABLES=glibc.malloc.hugetlb=1")),
    "transformers": Adapter("transformers_peer.py", (*ACTIVE, "HF_HUB_OFFLINE=1")),
    "openvino": Adapter("openvino_peer.py", ACTIVE),
}


@dataclass(frozen=True)
class Run:
    """What prompts that were answered together took, in seconds from their submission: until each had its first token,
    and until the end; and how many tokens were drawn between these two moments."""

    prompt_tokens: int
    answer_tokens: int
    decoded_tokens: int
    first_token_s: float
    finished_s: float


class Peer:
    """An engine that runs when `run` is called and is stopped otherwise. Whatever goes wrong is a ValueError, again in
    every later call if the process is lost."""

    def __init__(self, name: str, model: str):
        self.name, self.model = name, model
        self.process: subprocess.Popen | None = None
        self.failure: str | None = None
        self.complaints = tempfile.TemporaryFile()  # the process's stderr

    def run(self, prompts: Sequence[Sequence[int]], generate: int, threads: int) -> Run:
        """Answers all prompts together, each with `generate` tokens."""
        if self.process is None and self.failure is None:
            self._start()
        if self.failure is not None:
            raise ValueError(self.failure)
        self.process.send_signal(signal.SIGCONT)
        answer = self._ask(json.dumps({"prompts": prompts, "generate": generate, "threads": threads}) + "\n")
        return Run(sum(len(prompt) for prompt in prompts), len(prompts) * generate, answer["decoded"],
                   answer["first_token_s"], answer["finished_s"])

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.complaints.close()

    def _start(self) -> None:
        python = ROOT / ".venv-peers" / self.name / "bin" / "python"
        if not python.exists():
            log = ROOT / ".venv-peers" / f"{self.name}.log"
            self.failure = "not installed: " + (f"make bench-peers failed, {log} says why" if log.exists() else
                                                 "make bench-peers does it")
            return
        adapter = ADAPTERS[self.name]
        command = ["env", *adapter.settings, python, ROOT / "peers" / adapter.script, self.model]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.complaints,
                                        text=True, bufsize=1)
        try:
            self._ask("")
        except ValueError as error:  # it cannot do anything, now or later
            self.failure = str(error)

    def _ask(self, words: str) -> dict:
        """Sends the words, waits for the answer and stops the process."""
        watchdog, start_s = threading.Timer(PATIENCE_S, self.process.kill), time.monotonic()
        watchdog.start()
        try:
            self.process.stdin.write(words)
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            self.failure = self._how_it_ended(time.monotonic() - start_s)
            raise ValueError(self.failure)
        self.process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _how_it_ended(self, seconds: float) -> str:
        if seconds >= PATIENCE_S:
            return f"no answer within {PATIENCE_S} s"
        status = self.process.wait()
        end = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.complaints.seek(0)
        last_words = self.complaints.read().decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([end, *last_words])
