"""Completion scripts for shells, written from the parser itself so that they cannot fall behind it."""

from __future__ import annotations

import argparse
import shlex

from kvclient.options import parser


def script(shell: str) -> str:
    """For `eval "$(kv --completion bash)"`, the same with zsh, `kv --completion fish | source`."""
    options = [action for action in parser()._actions if action.option_strings]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](options)


def command(program: str, asked: str) -> str:
    """The shell command that lists what a model may be called, see `kvclient.names`."""
    return f"{program} --completion {asked} 2>/dev/null"


NAMES = command("kv", "names")


def _choices(option: argparse.Action) -> list[str]:
    return [str(one) for one in option.choices or ()]


def _is_model(option: argparse.Action) -> bool:
    return option.dest == "model"


def _bash(options: list[argparse.Action]) -> str:
    cases = []
    for option in options:
        flags = "|".join(option.option_strings)
        if _is_model(option):
            cases.append(f'    {flags}) COMPREPLY=($(compgen -W "$({NAMES})" -- "$word")); return;;')
        elif option.choices:
            words = " ".join(_choices(option))
            cases.append(f'    {flags}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return;;')
        elif option.nargs != 0:
            cases.append(f"    {flags}) return;;")
    every = " ".join(flag for option in options for flag in option.option_strings)
    return "\n".join([
        "_kv() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}"',
        "  COMPREPLY=()",
        '  case "${COMP_WORDS[COMP_CWORD-1]}" in',
        *cases,
        "  esac",
        f'  [[ $word == -* ]] && COMPREPLY=($(compgen -W "{every}" -- "$word"))',
        "}",
        "complete -o default -F _kv kv",
        "",
    ])  # fmt: skip


def _zsh(options: list[argparse.Action]) -> str:
    lines = []
    for option in options:
        what = (option.help or "").replace("[", "(").replace("]", ")").replace(":", "\\:")
        names = option.option_strings
        many = "\\*" if isinstance(option, argparse._AppendAction) else ""
        head = f"'({' '.join(names)})'" if not many else ""
        flags = f"{{{','.join(many + name for name in names)}}}" if len(names) > 1 else many + names[0]
        value = ""
        if _is_model(option):
            value = ":model:_kv_models"
        elif option.choices:
            value = f":{option.dest}:({' '.join(_choices(option))})"
        elif option.nargs != 0:
            value = f":{(option.metavar or option.dest)}:"
        lines.append(f"    {head}{flags}{shlex.quote(f'[{what}]{value}')} \\")
    return "\n".join([
        f"_kv_models() {{ compadd -- ${{(f)\"$({NAMES})\"}} }}",
        "_kv() {",
        "  _arguments -s \\",
        *lines,
        "    '*:prompt:'",
        "}",
        "compdef _kv kv",
        "",
    ])  # fmt: skip


def _fish(options: list[argparse.Action]) -> str:
    lines = ["complete -c kv -f"]
    for option in options:
        names = "".join(
            f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.option_strings
        )
        value = ""
        if _is_model(option):
            value = f" -x -a '({NAMES})'"
        elif option.choices:
            value = f" -x -a {shlex.quote(' '.join(_choices(option)))}"
        elif option.nargs != 0:
            value = " -x"
        lines.append(f"complete -c kv{names}{value} -d {shlex.quote(option.help or '')}")
    return "\n".join([*lines, ""])
