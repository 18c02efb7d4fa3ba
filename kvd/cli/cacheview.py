"""Answers of `kvd cache` as people read them. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvd.cli.output import table
from kvd.store.preview import plain
from kvd.units import format_age, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

Answer = Mapping[str, Any]
DAMAGED = 70
COUNTERS = {"lookups": "prompts looked up", "lookup_hits": "blocks found", "committed": "blocks written"}
"""of the store, since it was opened, where their names say too little"""
DEEPEST = 16
"""levels that are indented; a long conversation goes straight down from there"""


def exit_code(verb: str, answer: Answer) -> int:
    """70 when `verify` found damage, so that scripts notice."""
    return DAMAGED if verb == "verify" and answer.get("damaged") else 0


def stats(answer: Answer) -> RenderableType:
    used = f"{format_size(answer['used'])} of {format_size(answer['limit'])}"
    if answer.get("off"):
        used = f"{format_size(answer['used'])}; the store is off (store.limit is 0)"
    today, total = format_size(answer["written_today_bytes"]), format_size(answer["written_total_bytes"])
    rows = [
        ["used", used],
        ["blocks", f"{answer['blocks']:,} with {answer['tokens']:,} tokens"],
        ["pins", pins(answer)],
        ["written", f"{today} today, {total} in all"],
        ["at", f"{answer['path']}{'' if answer['durable'] else ' (not durable: store.durable is off)'}"],
    ]
    if answer.get("endurance_per_year") is not None:
        rows.append(["endurance", f"{100 * answer['endurance_per_year']:.1f} % of the drive's per year at this rate"])
    if said := trimmed(answer):
        rows.append(["dropped", said])
    if answer.get("foreign_files"):
        rows.append(["foreign", f"{answer['foreign_files']} files, {format_size(answer['foreign_bytes'])}"])
    if answer.get("quarantined_files"):
        rows.append(["damaged", f"{answer['quarantined_files']} set aside, {format_size(answer['quarantined_bytes'])}"])
    rows += [[f"  {model}", format_size(size)] for model, size in sorted(answer.get("models", {}).items())]
    rows += [[COUNTERS.get(name) or _plain(name), f"{count:,}"] for name, count in answer.get("counters", {}).items()]
    return table(["", ""], rows)


def names(models: Sequence[str]) -> str:
    """a; a and b; a, b and c"""
    return " and ".join(filter(None, [", ".join(models[:-1]), models[-1]]))


def pins(answer: Answer) -> str:
    waiting = answer.get("pins_waiting")
    more = f" ({waiting:,} more wait for their block to be stored again)" if waiting else ""
    return f"{answer['pins']:,}{more}"


def trimmed(answer: Answer) -> str:
    """What a lower limit took since the store was opened; "" for nothing."""
    gone = answer.get("trimmed")
    if not gone:
        return ""
    pinned = f"{gone['pinned']:,}" if gone["pinned"] else "none"
    return (
        f"{gone['blocks']:,} blocks ({format_size(gone['bytes'])}), {pinned} of them pinned: "
        f"the store held more than store.limit ({format_size(answer['limit'])}) allows"
    )


def tree(answer: Answer) -> RenderableType:
    """One line per stretch of blocks without a branch or the end of a pin, what continues it indented below."""
    rows = [node_row(node) for node in answer["prefixes"]]
    if not rows:
        return "nothing is stored"
    columns = ["MODEL", "PREFIX", "TOKENS", "BYTES", "HITS", "LAST USE", "PIN", "CHAIN"]
    return table(columns, rows, right=["TOKENS", "BYTES", "HITS"])


def node_row(node: Answer) -> list[str]:
    now, depth = time.time(), int(node["depth"])
    pin = ""
    if node["pinned"]:
        pin = f"{format_age(node['expires'] - now)} left" if node.get("expires") else "pinned"
    text = prefix(node)
    return [
        str(node["model"]) if depth == 0 else "",
        "  " * min(depth, DEEPEST) + (text if len(text) <= 48 else text[:47] + "…"),
        f"{node['tokens']:,}",
        format_size(node["bytes"]),
        f"{node['hits']:,}",
        f"{format_age(now - node['last_use'])} ago",
        pin,
        str(node["chain"]),
    ]


def prefix(node: Answer) -> str:
    """The words that tell a prefix from its siblings (behind "…"), else its first."""
    if node["words"]:
        return f"…{node['words']}"
    return plain(str(node["preview"])) or f"(from token {node['start']:,})"


def verified(answer: Answer) -> str:
    found = (
        (answer.get("damaged", 0), "damaged and set aside"),
        (answer.get("counts", {}).get("unreadable", 0), "could not be read"),
    )
    said = ", ".join(f"{count} {what}" for count, what in found if count) or "all sound"
    return f"{answer['checked']:,} blocks read: {said}{_counts(answer)}"


def collected(answer: Answer) -> str:
    return f"{format_size(answer['freed'])} given back{_counts(answer)}"


def cleared(answer: Answer) -> str:
    said = f"{answer['checked']:,} blocks dropped, {format_size(answer['freed'])} given back"
    if writing := answer.get("counts", {}).get("being_written"):
        said += f" ({writing:,} more are being written and stay)"
    if "memory_blocks" not in answer:
        return said
    said += f"; {answer['memory_blocks']:,} blocks ({format_size(answer['memory_bytes'])}) forgotten in memory"
    if in_use := answer["memory_blocks_in_use"]:
        said += f", {in_use:,} are in use and stay"
    return said


def rebuilt(answer: Answer) -> str:
    return f"index made anew from {answer['checked']:,} blocks{_counts(answer)}"


def exported(answer: Answer) -> str:
    return f"{answer['tokens']:,} tokens in {answer['blocks']:,} blocks written to {answer['file']}"


def imported(answer: Answer) -> str:
    new, already = answer["stored"], answer["already"]
    return f"{answer['blocks']:,} blocks read: {new:,} taken in, {already:,} were here"


def pinned(answer: Answer) -> str:
    ends = answer.get("expires")
    return f"pinned{f' for {format_age(ends - time.time())}' if ends else ' for good'}"


def unpinned(answer: Answer) -> str:
    return "unpinned" if answer.get("unpinned") else "it was not pinned"


def _counts(answer: Answer) -> str:
    counts = answer.get("counts") or {}
    return f" ({', '.join(f'{_plain(name)} {count}' for name, count in sorted(counts.items()))})" if counts else ""


def _plain(name: str) -> str:
    """A counter's name as people write: "refused.free_space" is "refused: free space"."""
    return name.replace(".", ": ").replace("_", " ")
