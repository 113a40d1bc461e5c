"""completions.py: what each shell offers where the Tab key is pressed, asked of the shell itself where it is here."""

import os
import shutil
import subprocess

import pexpect
import pytest

import run

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def script(capsys):
    def script(shell: str) -> str:
        assert run.main(["--completions", shell]) == 0
        return capsys.readouterr().out

    return script


def has(shell: str):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell} here")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_known(script, shell):
    text = script(shell)
    for name, command in run.COMMANDS.items():
        assert name in text
        for names, options in command.all_flags:
            for flag in names:
                if flag.startswith("--") and options.get("help") != "==SUPPRESS==":
                    assert flag in text or f"-l {flag[2:]} " in text
    for value in ("coupled", "bfloat16", "pair"):
        assert value in text


def test_another_shell_is_bad_usage(capsys):
    assert run.main(["--completions", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


WORDS = [("ba", {"batch"}), ("batch --over", {"--overwrite"}),
         ("generate --verify ", {"coupled", "rejection", "block"}),
         ("batch --cache-dtype i", {"int8"}), ("chat --show-t", set()), ("generate --show-t", {"--show-tokens"}),
         ("batch fi", {"file one", "file two"}), ("batch in -o file", {"file one", "file two"}),
         ("generate --top-k ", set())]


@pytest.fixture
def folder(tmp_path):
    for name in ("file one", "file two"):
        (tmp_path / name).touch()
    return tmp_path


@has("bash")
@pytest.mark.parametrize("typed, offered", [*WORDS, ("--show-t", {"--show-tokens"})])
def test_bash(script, folder, typed, offered):
    (folder / "script").write_text(script("bash"))
    code = ('source ./script; read -ra COMP_WORDS <<< "quire $1"; [[ $1 == *" " ]] && COMP_WORDS+=("");'
            'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _quire; printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", code, "bash", typed], cwd=folder, capture_output=True, text=True, timeout=20)
    assert (set(filter(None, done.stdout.split("\n"))), done.stderr) == (offered, "")


@has("fish")
def test_fish(script, folder):
    (folder / "script").write_text(script("fish"))
    home = str(folder / ".home")
    environment = os.environ | {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_DATA_HOME": home}
    for typed, offered in WORDS:
        done = subprocess.run(["fish", "-c", "source ./script; complete -C $argv[1]", f"quire {typed}"], cwd=folder,
                              env=environment, capture_output=True, text=True, timeout=20)
        found = {line.split("\t")[0].replace("\\ ", " ") for line in done.stdout.splitlines()}
        assert (found, done.stderr) == (offered, ""), typed


@has("zsh")
def test_zsh(script, folder):
    (folder / "script").write_text(script("zsh"))
    shell = pexpect.spawn("zsh", ["-f", "-i"], cwd=folder, encoding="utf-8", timeout=20, dimensions=(24, 200),
                          env=os.environ | {"TERM": "dumb", "HOME": str(folder)})
    shell.sendline("PS1='ready> '; autoload -U compinit; compinit -u -D; source ./script; echo g''o")
    shell.expect("go\r")
    shell.expect("ready> ")
    for typed, shown in [("ba", "quire batch "), ("batch --over", "quire batch --overwrite "),
                         ("chat --verify rej", "quire chat --verify rejection "), ("--show-t", "quire --show-tokens "),
                         ("batch file\\ o", "quire batch file\\ one ")]:
        shell.send(f"\x15quire {typed}\t")
        shell.expect_exact(shown)
    shell.close(force=True)
