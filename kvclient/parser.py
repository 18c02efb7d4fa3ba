"""The command lines of `kvd`, `kv` and `kv-gateway`: a mistake is one line that names the flag probably meant."""

from __future__ import annotations

import argparse
from typing import Final, NoReturn

USAGE: Final = 2
"""exit code of a command line that makes no sense"""


class Parser(argparse.ArgumentParser):
    """argparse's, without the pages of usage before each error."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}{self._meant(message)}; see `{self.prog} --help`\n")

    def _meant(self, message: str) -> str:
        """`, did you mean --memory-limit?` for a flag that nearly exists."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        flag = words.split(" ")[0].partition("=")[0]
        if not (unknown and flag.startswith("-")):
            return ""
        import difflib

        flags = [name for action in self._actions for name in action.option_strings]  # argparse has no public list
        near = difflib.get_close_matches(flag, flags, n=1)
        return f", did you mean {near[0]}?" if near else ""
