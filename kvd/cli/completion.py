"""Completion scripts for bash, zsh and fish: verbs, their flags, fixed words and models."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvclient.completions import command
from kvclient.parser import USAGE

SHELLS = ("bash", "zsh", "fish")
OWN_NAME = ("rm", "calibrate")
"""verbs that take no alias"""


@dataclass(frozen=True, slots=True)
class Verb:
    """`words` are its flags and fixed words, each with what it means. `model` is where a model goes: behind that flag,
    "first" behind the verb, "any" word; "" nowhere. `asked` is what lists them."""

    summary: str
    words: list[tuple[str, str]]
    model: str
    asked: str


def print_script(words: list[str]) -> int:
    """`kvd --completion SHELL`. What it prints runs `kvd --completion names`, see `kvclient.names`."""
    if len(words) != 1 or words[0] not in SHELLS:
        print("usage: kvd --completion bash|zsh|fish", file=sys.stderr)
        return USAGE
    print({"bash": bash, "zsh": zsh, "fish": fish}[words[0]](), end="")
    return 0


def _verbs() -> dict[str, Verb]:
    from kvd.cli.main import VERBS

    return {verb: _verb(verb, summary) for verb, summary in VERBS.items()}


def _verb(verb: str, summary: str) -> Verb:
    from kvd.cli.main import parser_of

    words: list[tuple[str, str]] = []
    model = ""
    for action in parser_of(verb)._actions:  # argparse has no public list of what was added
        about = (action.help or "").replace("%%", "%").partition(" (default")[0]
        words += [(flag, about) for flag in action.option_strings if flag.startswith("--")]
        if not action.option_strings and action.choices:
            words += [(str(word), "") for word in action.choices]
        if action.dest in ("model", "models"):
            model = action.option_strings[0] if action.option_strings else "any" if action.nargs else "first"
    return Verb(summary, words, model, command("kvd", "models" if verb in OWN_NAME else "names"))


def bash() -> str:
    verbs = _verbs()
    cases = "\n".join(f"        {verb}) {_bash(of)} ;;" for verb, of in verbs.items())
    return f"""_kvd() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='{" ".join(verbs)} --version --completion --help'
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


def _bash(verb: Verb) -> str:
    words = f"words='{' '.join(word for word, _ in verb.words)}'"
    match verb.model:
        case "":
            return words
        case "any":
            when = "[[ $word != -* ]]"
        case "first":
            when = "[[ $COMP_CWORD -eq 2 && $word != -* ]]"
        case flag:
            return f"{words}; [[ $before == {flag} ]] && words=$({verb.asked})"
    return f"{words}; {when} && words+=\" $({verb.asked})\""


def _quoted(text: str) -> str:
    return text.replace("'", "").replace(":", " -").replace("[", "(").replace("]", ")")


def zsh() -> str:
    verbs = _verbs()
    summaries = "\n".join(f"        '{verb}:{_quoted(of.summary)}'" for verb, of in verbs.items())
    cases = "\n".join(f"        {verb}) {_zsh(of)} ;;" for verb, of in verbs.items())
    return f"""#compdef kvd
_kvd() {{
    local -a verbs
    verbs=(
{summaries}
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


def _zsh(verb: Verb) -> str:
    words = " ".join(f"'{word}[{_quoted(about)}]'" for word, about in verb.words)
    models = f"compadd -- ${{(f)\"$({verb.asked})\"}}"
    plain = f"_values -w 'word' {words}; _files"
    match verb.model:
        case "":
            return plain
        case "any":
            return f"{models}; {plain}"
        case "first":
            return f"(( CURRENT == 3 )) && {models}; {plain}"
        case flag:
            return f"if [[ $words[CURRENT-1] == {flag} ]]; then {models}; else {plain}; fi"


def fish() -> str:
    lines = []
    for verb, of in _verbs().items():
        lines.append(f"complete -c kvd -n __fish_use_subcommand -a {verb} -d '{_quoted(of.summary)}'")
        here = f"complete -c kvd -n '__fish_seen_subcommand_from {verb}'"
        for word, about in of.words:
            model = f" -x -a '({of.asked})'" if word == of.model else ""
            what = f"-l {word[2:]}{model}" if word.startswith("--") else f"-a {word}"
            lines.append(f"{here} {what} -d '{_quoted(about)}'")
        if of.model in ("first", "any"):
            lines.append(f"{here} -a '({of.asked})' -d model")
    return "\n".join(lines) + "\n"
