"""The configuration: every key, its value and where it comes from.

  kvd config show           all keys with value and source (default, file, env, flag)
  kvd config show --json
  kvd config doc            what every key means, with its default, as kvd.toml to start from
  kvd config doc --write    writes that kvd.toml into the home, if there is none
  kvd config reload         let the running daemon read kvd.toml again; streams go on
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvclient import Client
from kvclient.errors import BadRequest
from kvd.cli.output import console, print_json, table
from kvd.cli.usage import Usage
from kvd.config import Config, load
from kvd.home import Home
from kvd.settings import Setting, settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="show", choices=["show", "doc", "reload"], help="default: show")
    parser.add_argument("--config", type=Path, metavar="FILE", help="show: another file than kvd.toml in the home")
    parser.add_argument("--json", action="store_true", help="show, reload: as JSON")
    parser.add_argument("--markdown", action="store_true", help="doc: the table of the README")
    parser.add_argument("--write", action="store_true", help="doc: into kvd.toml in the home; none is overwritten")


def run(args: argparse.Namespace) -> int:
    takers = {"config": ("show",), "json": ("show", "reload"), "markdown": ("doc",), "write": ("doc",)}
    for option, verbs in takers.items():
        if getattr(args, option) and args.what not in verbs:
            raise Usage(f"config {args.what} takes no --{option}")
    if args.write and args.markdown:
        raise Usage("config doc takes one of --write and --markdown")
    if args.write:
        print(f"wrote {_write(Home.default())}")
        return 0
    if args.what == "doc":
        print(markdown() if args.markdown else document(), end="")
        return 0
    if args.what == "reload":
        return _reload(args.json)
    config = load(file=args.config)
    rows = shown(config)
    if args.json:
        print_json(rows)
    else:
        cells = [[row["key"], row["value"], row["source"]] for row in rows]
        console().print(table(["KEY", "VALUE", "SOURCE"], cells))
    return 0


def shown(config: Config) -> list[dict[str, str]]:
    """Home, socket and every key: {key, value, source}; secrets as stars."""
    rows = [
        {"key": name, "value": str(getattr(config, name)), "source": str(config.source(name))}
        for name in ("home", "socket")
    ]
    for setting in settings():
        rows.append({"key": setting.path, "value": _value(config, setting), "source": str(config.source(setting.path))})
    return rows


def _value(config: Config, setting: Setting) -> str:
    value = config.value(setting)
    return "********" if setting.key.secret and value else setting.key.kind.show(value)


def document() -> str:
    """Every key with meaning and default, commented out: a kvd.toml that changes nothing."""
    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            lines += ["", f"[{setting.section}]"] if lines else [f"[{setting.section}]"]
            section = setting.section
        note = "" if setting.key.live else " (restart)"
        lines.append(f"# {setting.key.doc}{note}")
        lines.append(f"#{setting.name} = {toml_value(setting)}")
    return "\n".join(lines) + "\n"


def _write(home: Home) -> Path:
    """`document` as the home's kvd.toml, for the user alone. Raises BadRequest if there is one."""
    home.create()
    try:
        file = os.open(home.config, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise BadRequest(f"cannot write {home.config}: {problem.strerror}", path=str(home.config)) from None
    with open(file, "w", encoding="utf-8") as out:
        out.write(document())
    return home.config


def markdown() -> str:
    """The same as a table; keys that a reload applies are marked."""
    lines = ["| key | values | default | live | meaning |", "|---|---|---|---|---|"]
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines.append(f"| **[{section}]** | | | | |")
        values = setting.key.kind.name.replace("|", "\\|")
        live = "yes" if setting.key.live else ""
        lines.append(f"| `{setting.name}` | {values} | `{toml_value(setting)}` | {live} | {setting.key.doc} |")
    return "\n".join(lines) + "\n"


def toml_value(setting: Setting) -> str:
    """The default as one would write it in TOML."""
    kind = setting.key.kind.name
    if kind in ("number", "share") or (isinstance(setting.default, bool | int) and kind != "size"):
        return setting.key.kind.show(setting.default)
    if isinstance(setting.default, tuple):
        return "{}" if kind == "table" else "[]"
    return f'"{setting.key.kind.show(setting.default)}"'


def _reload(as_json: bool) -> int:
    with Client(autostart=False) as client:
        answer: dict[str, Any] = client.reload()
    if as_json:
        print_json(answer)
        return 0
    for path in answer.get("applied", []):
        print(f"{path} changed")
    for path in answer.get("restart", []):
        print(f"{path} needs a restart")
    if not (answer.get("applied") or answer.get("restart")):
        print("nothing changed")
    return 0
