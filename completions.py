"""Shell completion: scripts that offer commands, flags and their values where the Tab key is pressed.

Owns how each shell wants to be told; what there is to tell is in the tables of run.py and flags.py. No torch. Start at
`completion_script`.
"""
from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

NAMES = ("run.py", "quire")  # what people call it: the script, or an alias for it
FILES = ("FILE", "PATH", "IN", "OUT", "MODEL", "DIR")  # metavars of what may be a file


@dataclass(frozen=True)
class Option:
    """A flag as shells need to know it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]  # if they are known
    is_file: bool


def completion_script(shell: str, commands: Mapping[str, tuple[str, Iterable[tuple[tuple[str, ...], dict]]]]) -> str:
    """`commands`: of each its help, and its flags as argparse's add_argument takes them."""
    table = {name: (help, [option_of(names, options) for names, options in flags
                           if names[0].startswith("-") and options.get("help") != argparse.SUPPRESS])
             for name, (help, flags) in commands.items()}
    return SHELLS[shell](table)


def option_of(names: tuple[str, ...], options: dict) -> Option:
    values = options.get("choices") or getattr(options.get("type"), "choices", ())
    return Option(names, options["help"].replace("%%", "%"), options.get("action") in (None, "append"),
                  tuple(values), options.get("metavar") in FILES)


def bash(table: Mapping[str, tuple[str, list[Option]]]) -> str:
    def patterns(options: Iterable[Option]) -> str:
        return "|".join(dict.fromkeys(name for option in options for name in option.names))

    takers = [option for _, options in table.values() for option in options if option.takes_value]
    cases = [f"        {name}) flags={shlex.quote(' '.join(name for option in options for name in option.names))} ;;"
             for name, (_, options) in table.items()]
    values = [f"        {'|'.join(option.names)}) values={shlex.quote(' '.join(option.values))} ;;"
              for option in dict.fromkeys(takers) if option.values]
    return "\n".join([
        "# quire's completion for bash: source <(run.py --completions bash)",
        "_quire() {",
        "    local command=generate flags= values= takes_file= takes_value=1",
        '    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}',
        f"    local commands={shlex.quote(' '.join(table))}",
        '    case " $commands " in *" ${COMP_WORDS[1]} "*) [ "$COMP_CWORD" -gt 1 ] && command=${COMP_WORDS[1]} ;; esac',
        '    case $command in', *cases, "    esac",
        '    case $previous in', *values,
        f"        {patterns(option for option in takers if option.is_file)}) takes_file=1 ;;",
        f"        {patterns(option for option in takers if not option.is_file and not option.values)}) ;;",
        "        *) takes_value= ;;", "    esac",
        "    COMPREPLY=()",
        '    if [ -n "$values" ]; then',
        '        COMPREPLY=($(compgen -W "$values" -- "$current"))',
        '    elif [ -z "$takes_value" ] && [ "${current#-}" != "$current" ]; then',
        '        COMPREPLY=($(compgen -W "$flags" -- "$current"))',
        '    elif [ "$COMP_CWORD" -eq 1 ]; then',
        '        COMPREPLY=($(compgen -W "$commands" -- "$current"))',
        '    elif [ -z "$takes_value" ] || [ -n "$takes_file" ]; then',
        "        local IFS=$'\\n'  # names of files may have blanks",
        '        COMPREPLY=($(compgen -f -- "$current"))',
        "    fi",
        "}",
        f"complete -o filenames -F _quire {' '.join(NAMES)}"])


def zsh(table: Mapping[str, tuple[str, list[Option]]]) -> str:
    def quoted(text: str) -> str:
        return "".join(f"\\{char}" if char in "[]:\\" else char for char in text)

    def specs(options: list[Option]) -> list[str]:
        made = []
        for option in options:
            action = f"({' '.join(option.values)})" if option.values else "_files" if option.is_file else " "
            for name in option.names:
                made.append(f"*{name}[{quoted(option.help)}]" + f":value:{action}" * option.takes_value)
        return [f"            {shlex.quote(spec)} \\" for spec in made]

    cases = [line for name, (_, options) in table.items()
             for line in (f"        {name}) _arguments -s \\", *specs(options), "            '*:file:_files' ;;")]
    commands = [f"        {shlex.quote(f'{name}:{quoted(help)}')}" for name, (help, _) in table.items()]
    return "\n".join([
        f"#compdef {' '.join(NAMES)}",
        "# quire's completion for zsh: source <(run.py --completions zsh), after compinit",
        "_quire() {",
        "    local command=generate",
        "    local -a commands=(", *commands, "    )",
        '    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then',
        "        _describe command commands",
        "        return",
        "    fi",
        f"    case $words[2] in {'|'.join(table)}) command=$words[2]; shift words; (( CURRENT-- )) ;; esac",
        "    case $command in", *cases, "    esac",
        "}",
        f"compdef _quire {' '.join(NAMES)}"])


def fish(table: Mapping[str, tuple[str, list[Option]]]) -> str:
    lines = ["# quire's completion for fish: run.py --completions fish | source"]
    names = " ".join(table)
    for program in NAMES:
        start = f"complete -c {program}"
        for name, (help, options) in table.items():
            lines.append(f"{start} -n 'not __fish_seen_subcommand_from {names}' -a {name} -d {fish_quoted(help)}")
            here = f"__fish_seen_subcommand_from {name}"
            if name == "generate":  # which is meant where no command is named
                here += f"; or not __fish_seen_subcommand_from {names}"
            for option in options:
                flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                                 for name in option.names)
                value = ""
                if option.takes_value:
                    value = f" -x -a {fish_quoted(' '.join(option.values))}" if option.values else " -r"
                    value += " -f" * (not option.values and not option.is_file)
                lines.append(f"{start} -n {fish_quoted(here)} {flags} -d {fish_quoted(option.help)}{value}")
    return "\n".join(lines)


def fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Mapping], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
