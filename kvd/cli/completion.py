"""Completion scripts for bash, zsh and fish: verbs, their flags and fixed words."""

from __future__ import annotations

import argparse
import sys

from kvclient.parser import USAGE

SHELLS = ("bash", "zsh", "fish")


def print_script(words: list[str]) -> int:
    """`kvd --completion SHELL`."""
    if len(words) != 1 or words[0] not in SHELLS:
        print("usage: kvd --completion bash|zsh|fish", file=sys.stderr)
        return USAGE
    print({"bash": bash, "zsh": zsh, "fish": fish}[words[0]](), end="")
    return 0


def _verbs() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """verb -> (summary, [(word, help)]): its flags and fixed words."""
    from kvd.cli.main import VERBS, parser_of

    return {verb: (summary, _words(parser_of(verb))) for verb, summary in VERBS.items()}


def _words(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    words: list[tuple[str, str]] = []
    for action in parser._actions:  # argparse has no public list of what was added
        about = (action.help or "").replace("%%", "%").partition(" (default")[0]
        words += [(flag, about) for flag in action.option_strings if flag.startswith("--")]
        if not action.option_strings and action.choices:
            words += [(str(word), "") for word in action.choices]
    return words


def bash() -> str:
    cases = "\n".join(
        f"        {verb}) words='{' '.join(word for word, _ in words)}' ;;" for verb, (_, words) in _verbs().items()
    )
    return f"""_kvd() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{" ".join(_verbs())} --version --completion --help'
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        *) words='' ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kvd kvd
"""


def _quoted(text: str) -> str:
    return text.replace("'", "").replace(":", " -").replace("[", "(").replace("]", ")")


def zsh() -> str:
    verbs = "\n".join(f"        '{verb}:{_quoted(summary)}'" for verb, (summary, _) in _verbs().items())
    cases = "\n".join(
        f"        {verb}) _values -w 'word' "
        + " ".join(f"'{word}[{_quoted(about)}]'" for word, about in words)
        + "; _files ;;"
        for verb, (_, words) in _verbs().items()
    )
    return f"""#compdef kvd
_kvd() {{
    local -a verbs
    verbs=(
{verbs}
    )
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
        return
    fi
    case $words[2] in
{cases}
    esac
}}
compdef _kvd kvd
"""


def fish() -> str:
    lines = []
    for verb, (summary, words) in _verbs().items():
        lines.append(f"complete -c kvd -n __fish_use_subcommand -a {verb} -d '{_quoted(summary)}'")
        for word, about in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c kvd -n '__fish_seen_subcommand_from {verb}' {what} -d '{_quoted(about)}'")
    return "\n".join(lines) + "\n"
