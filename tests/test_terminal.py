"""terminal.py: what appears only in a terminal, and signals that wait."""

import os
import signal
import sys
from pathlib import Path

import pytest

import terminal

ROOT = Path(__file__).resolve().parent.parent


def test_only_a_terminal_gets_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.dim("x") == "x"
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    assert terminal.dim("x") == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.dim("x") == "x"


def test_a_download_has_a_bar_in_a_terminal(monkeypatch):
    pexpect = pytest.importorskip("pexpect")
    code = ("from terminal import Download\nwith Download() as show:\n"
            "  for i in range(3): show('fetching it', i * 10**6, 2 * 10**6)")
    child = pexpect.spawn(sys.executable, ["-c", code], cwd=str(ROOT), env=os.environ | {"TERM": "xterm"}, timeout=30)
    child.expect("fetching it")
    child.expect("2.0/2.0 MB")
    child.expect(pexpect.EOF)


def test_signals_wait_for_the_end_of_the_block():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with terminal.held_signals() as signals:
            signal.raise_signal(signal.SIGINT)
            steps.append(list(signals))
        steps.append("never")
    assert steps == [[signal.SIGINT]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(KeyError), terminal.replacing(tmp_path / "link") as file:
        file.write(b"half")
        raise KeyError
    assert (tmp_path / "real").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["link", "real"]
    for name in ("link", "new"):
        with terminal.replacing(tmp_path / name) as file:
            file.write(b"whole")
    assert (tmp_path / "real").read_text() == (tmp_path / "new").read_text() == "whole"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    with pytest.raises(NotADirectoryError, match="/new/deeper'"), terminal.replacing(tmp_path / "new" / "deeper"):
        pass


def test_text_is_utf8_or_its_place_is_named():
    assert terminal.decode_utf8("é".encode(), "here") == "é"
    with pytest.raises(ValueError, match="here is not UTF-8: byte 0x96 at offset 12"):
        terminal.decode_utf8(b"ab\x96", "here", offset=10)
