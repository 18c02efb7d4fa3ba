"""The tour: questions on one document, cold, repeated, varied, through the shell, after a restart and after a kill."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.rows import Row, ratio_text, row, save
from kvclient.errors import KvdError
from kvd.home import Home, holder
from rig.daemon import Daemon, demo_models, short_home
from tour import document
from tour.ask import Asked, ask, ask_shell
from tour.document import Counter, Exam

MODEL = "demo"
REPEATS = 9
FAILED, INTERRUPTED = 1, 130
Say = Callable[[str], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/quickstart", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    try:
        with home_of_tour() as home:
            say(f"home is {home}")
            rows, asked = tour(home, say)
    except KeyboardInterrupt:
        say("interrupted; what was started is stopped")
        return INTERRUPTED
    except (KvdError, RuntimeError) as problem:
        say(f"failed: {problem}")
        return FAILED
    show(rows, asked)
    if args.json:
        save(rows, args.json)
    missed = [r.name for r in rows if r.ok is False]
    say(f"missed: {', '.join(missed)}" if missed else "every expectation held; the daemon is stopped")
    pull = "" if os.environ.get("KVD_HOME") else "kvd pull demo; "
    say(f'go on with:  . .venv/bin/activate; {pull}kvd start; kv "three names for a cat"')
    return FAILED if missed else 0


def say(line: str) -> None:
    print(f"quickstart: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def home_of_tour() -> Iterator[Path]:
    """KVD_HOME if it is set (no daemon may run there: this one is going to be killed), else a private one."""
    if not os.environ.get("KVD_HOME"):
        say("the demo model (fetched once, 98 MB)")
        with short_home(demo_models()) as home:
            yield home
        return
    own = Home.default()
    own.create()
    if pid := holder(own):
        raise RuntimeError(f"process {pid} uses {own.root}; stop it, or unset KVD_HOME")
    if not (own.models / MODEL / "kvd.json").exists():
        from kvd.models.pull import pull

        pull(MODEL, own.root, say=say)
    yield own.root


def tour(home: Path, say: Say) -> tuple[list[Row], dict[str, Asked]]:
    private = not os.environ.get("KVD_HOME")
    exam, shell = Exam.fresh(document.ROLE, private), Exam.fresh(document.SHELL_ROLE, private)
    counter = Counter(home / "models" / MODEL)
    size = len(counter.ids(exam.messages(document.FIRST)))
    say(f"the document is {document.DOCUMENT.name}; with the question it has {size:,} tokens")
    asked: dict[str, Asked] = {}
    with Daemon(home) as daemon:
        with daemon.client() as client:
            say("loading the model")
            client.load(MODEL)
            say(f"cold: {document.FIRST}")
            asked["cold"] = ask(client, MODEL, exam, document.FIRST)
            say(f"  {asked['cold'].text}")
            say(f"the same again, {REPEATS} times, up to its first token; the median counts")
            repeats = [ask(client, MODEL, exam, document.FIRST, tokens=1) for _ in range(REPEATS)]
            asked["repeated"] = sorted(repeats, key=lambda one: one.ttft)[REPEATS // 2]
            say(f"another question: {document.OTHER}")
            asked["other question"] = ask(client, MODEL, exam, document.OTHER)
            say(f"kv {document.SHELL_FIRST!r} < {document.DOCUMENT.name}")
            asked["kv, question 1"] = ask_shell(home, MODEL, shell, document.SHELL_FIRST)
            say(f"kv {document.SHELL_SECOND!r} < {document.DOCUMENT.name}")
            asked["kv, question 2"] = ask_shell(home, MODEL, shell, document.SHELL_SECOND)
        say("restarting the daemon")
        daemon.restart()
        with daemon.client() as client:
            client.load(MODEL)
            asked["after restart"] = ask(client, MODEL, exam, document.FIRST)
            say(f"a new question: {document.KILLED}")
            ask(client, MODEL, exam, document.KILLED)
            daemon.kill()
        say("daemon and worker killed with -9 at its last word; starting again")
        daemon.start()
        with daemon.client() as client:
            client.load(MODEL)
            asked["after kill -9"] = ask(client, MODEL, exam, document.KILLED)
    expected = {
        "repeated": 1,
        "other question": counter.beyond(exam.messages(document.OTHER), exam.messages(document.FIRST)),
        "kv, question 2": counter.beyond(
            shell.messages(document.SHELL_SECOND), shell.messages(document.SHELL_FIRST)
        ),
        "after restart": 1,
        "after kill -9": 1,
    }
    return rows(asked, expected), asked


def rows(asked: dict[str, Asked], expected: dict[str, int]) -> list[Row]:
    """Two rows each: the time with its bar, and the computed tokens with theirs."""
    bars = {"repeated": f"<= {1 / 60:.6f}", "after restart": f"<= {1 / 40:.6f}"}
    cold = asked["cold"].ttft
    found = []
    for name, one in asked.items():
        baseline = None if name == "cold" else cold
        found.append(row(f"{name}: time to first token", one.ttft, "s", baseline=baseline, bar=bars.get(name, ""),
                         stats=[one.stats]))  # fmt: skip
        if name in expected:
            found.append(row(f"{name}: computed", one.computed, "tokens", bar=f"== {expected[name]}", of="value"))
    return found


def show(rows: list[Row], asked: dict[str, Asked]) -> None:
    """One line per question; a missed expectation is named behind it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "first token", "of cold", "from memory", "from SSD", "computed", "expected"):
        table.add_column(column, justify="left" if column in ("", "expected") else "right")
    for name, one in asked.items():
        mine = [r for r in rows if r.name.startswith(name + ": ")]
        bars = [f"{'computed' if r.unit == 'tokens' else 'of cold'} {bar_text(r)}" for r in mine if r.bar]
        verdict = "[red]MISSED[/]  " if any(r.ok is False for r in mine) else "[green]ok[/]  " if bars else ""
        table.add_row(
            name, f"{one.ttft * 1000:,.0f} ms", ratio_text(mine[0].ratio), f"{one.stats['cached_memory_tokens']:,}",
            f"{one.stats['cached_ssd_tokens']:,}", f"{one.computed:,}", verdict + ", ".join(bars),
        )  # fmt: skip
    Console(width=120, highlight=False).print(table)


def bar_text(row: Row) -> str:
    _, sign, number = row.bar.split()
    value = float(number)
    return f"{sign} {ratio_text(value)}" if row.unit == "s" else f"{sign.replace('==', '=')} {value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
