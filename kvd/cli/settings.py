"""The configuration table as flags, and flags as configuration."""

from __future__ import annotations

import argparse

from kvd.config import Config, load
from kvd.settings import SECTIONS, settings

_DEST = "setting:"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per key, in a group per section."""
    groups = {section: parser.add_argument_group(f"[{section}]") for section in SECTIONS}
    for setting in settings():
        kind = setting.key.kind
        default = "" if setting.key.secret else f" (default: {kind.show(setting.default) or 'none'})"
        groups[setting.section].add_argument(
            setting.flag,
            dest=_DEST + setting.path,
            metavar=kind.name.replace(" ", "").upper() if "|" not in kind.name else kind.name.replace(" ", ""),
            help=(setting.key.doc + default).replace("%", "%%"),
        )


def config_of(args: argparse.Namespace) -> Config:
    """Resolve what was parsed by a parser with `--home`, `--config` and `add_flags`."""
    return load(args.home, args.config, _given(args))


def flags_of(args: argparse.Namespace) -> list[str]:
    """The same as words for `kvd serve`, but for the home."""
    given = _given(args)
    flags = [f"{setting.flag}={given[setting.path]}" for setting in settings() if setting.path in given]
    return [f"--config={args.config}", *flags] if args.config else flags


def _given(args: argparse.Namespace) -> dict[str, str]:
    settings_of = {name.removeprefix(_DEST): text for name, text in vars(args).items() if name.startswith(_DEST)}
    return {path: text for path, text in settings_of.items() if text is not None}
