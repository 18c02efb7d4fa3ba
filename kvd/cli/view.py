"""`status` as people read it: one page of tables, shared by `kvd status` and `kvd top`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvd.cli import cacheview
from kvd.cli.output import table
from kvd.units import format_age, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Mapping[str, Any]


def page(status: Status, rates: Mapping[str, float] | None = None) -> RenderableType:
    """The whole view. `rates`: rows fed per second by model, known only between two samples."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in head(status)]
    if status.get("models"):
        columns = ["MODEL", "STATE", "KV", "MEMORY", "POOL", "IN USE", "CACHED", "LIVE", "WAITING"]
        numbers = columns[3:]
        if rates is not None:
            columns, numbers = [*columns, "ROWS/S"], [*numbers, "ROWS/S"]
        rows = [model_row(status, model, rates) for model in status["models"]]
        parts += [Text(), table(columns, rows, right=numbers)]
    if status.get("requests"):
        rows = [request_row(request) for request in status["requests"]]
        parts += [Text(), table(["REQUEST", "VERB", "MODEL", "STAGE", "PROGRESS", "AGE"], rows, right=["AGE"])]
    notes = problems(status)
    if notes:
        parts += [Text(), *(Text(note, style="yellow") for note in notes)]
    return Group(*parts)


def ready(version: str, home: object, budget: int) -> str:
    """What a daemon says when it answers; `budget` in bytes."""
    return f'kvd {version} is ready in {home}, {format_size(budget)} for models; ask with kv "hello"'


def head(status: Status) -> list[str]:
    """Version and age, memory, store, and what was not computed so far."""
    memory = status.get("memory", {})
    lines = [
        f"kvd {status.get('version', '?')}  pid {status.get('pid', '?')}  up {format_age(status.get('uptime_s', 0))}"
        f"  {status.get('home', '')}",
        f"memory   {format_size(memory.get('used_bytes', 0))} of {format_size(memory.get('budget_bytes', 0))}",
        f"store    {store_line(status.get('store', {}))}",
        f"reuse    {reuse_line(prompt_tokens(status))}",
    ]
    return lines


def store_line(store: Mapping[str, Any]) -> str:
    for reason in ("problem", "offline"):
        if store.get(reason):
            return f"not available: {store[reason]}"
    if store.get("off"):
        return off_line(store)
    text = f"{format_size(store.get('used', 0))} of {format_size(store.get('limit', 0))}"
    if "blocks" in store:
        text += f", {store['blocks']:,} blocks"
    if "written_today_bytes" in store:
        text += f", {format_size(store['written_today_bytes'])} written today"
    if store.get("endurance_per_year") is not None:
        text += f" ({100 * store['endurance_per_year']:.1f} % of the drive's endurance per year)"
    return text


def off_line(store: Mapping[str, Any]) -> str:
    """Of a store whose limit is 0."""
    left = store.get("shards_bytes", 0)
    return f"off, {format_size(left)} left in {store.get('path')}; `kvd cache clear` removes them" if left else "off"


def prompt_tokens(status: Status) -> dict[str, int]:
    """Prompt tokens since the start: cached_memory, cached_ssd, computed."""
    for metric in status.get("metrics", []):
        if metric["name"] == "kvd_prompt_tokens_total":
            return {str(source): int(count) for source, count in metric["values"].items()}
    return {}


def reuse_line(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    if not total:
        return "no prompt yet"
    memory, ssd = counts.get("cached_memory", 0), counts.get("cached_ssd", 0)
    return (
        f"{100 * (memory + ssd) / total:.0f} % of {total:,} prompt tokens were cached"
        f" ({memory:,} in memory, {ssd:,} on SSD), {counts.get('computed', 0):,} computed"
    )


def model_row(status: Status, model: Mapping[str, Any], rates: Mapping[str, float] | None) -> list[str]:
    name = str(model["name"])
    held = status.get("memory", {}).get("by_model", {}).get(name)
    total = model.get("blocks_total")
    cells = [
        name + (" (pinned)" if model.get("pinned") else ""),
        str(model.get("state", "")),
        str(model.get("kv_precision") or model.get("kv") or "") if model.get("pid") else "",
        format_size(held) if held else "",
        format_size(model["pool_bytes"]) if model.get("pool_bytes") else "",
        share(model.get("blocks_live"), total),
        share(model.get("blocks_cached"), total),
        str(model.get("live", "")) if model.get("pid") else "",
        str(model.get("waiting", "")) if model.get("pid") else "",
    ]
    if rates is not None:
        cells.append(f"{rates[name]:,.0f}" if rates.get(name) else "")
    return cells


def share(part: int | None, total: int | None) -> str:
    return f"{100 * part / total:.0f} %" if part is not None and total else ""


def request_row(request: Mapping[str, Any]) -> list[str]:
    return [
        str(request["id"])[:12],
        str(request.get("kind", "")),
        str(request.get("model", "")),
        str(request.get("stage", "")),
        progress_cell(request),
        format_age(request.get("age_s", 0)),
    ]


def progress_cell(request: Mapping[str, Any]) -> str:
    if queued := request.get("queued"):
        return f"place {int(queued.get('position', 0)) + 1} in the line"
    if progress := request.get("progress"):
        done, total = int(progress.get("done", 0)), max(1, int(progress.get("total", 1)))
        filled = 20 * done // total
        bar = "█" * filled + "░" * (20 - filled)
        return f"{bar} {done:,} of {total:,} ({progress.get('cached', 0):,} cached)"
    return ""


def unread(model: Mapping[str, Any]) -> str:
    """Of a model whose `unread_s` is not 0."""
    return (
        f"{model['name']}: the disk of its files has not answered for {format_age(model['unread_s'])};"
        " what is said of them here is older"
    )


def problems(status: Status) -> list[str]:
    """What to look at: models that are down or crashed, a disk that hangs or is full, warnings, what a lower limit
    took, too many connections."""
    notes = []
    for model in status.get("models", []):
        if model.get("state") == "down":
            notes.append(f"{model['name']} crashed too often and stays down; see {model.get('log', 'its log')},"
                         f" then `kvd load {model['name']}`")  # fmt: skip
        elif model.get("crashes"):
            often = "once" if model["crashes"] == 1 else f"{model['crashes']} times"
            notes.append(f"{model['name']} crashed {often} lately; see `kvd logs --workers`")
        if model.get("reads_hung"):
            notes.append(f"{model['name']}: the disk of the store does not answer ({model['reads_hung']} reads are"
                         " waiting); prompts that need them are computed until it does")  # fmt: skip
        if full := sum(model.get("spill", {}).get(reason, 0) for reason in ("free_space", "no_space")):
            often = "once" if full == 1 else f"{full} times"
            notes.append(f"{model['name']}: not all was stored: the disk was too full {often} since it was loaded;"
                         " see `kvd doctor`")  # fmt: skip
        if model.get("unread_s"):
            notes.append(unread(model))
        notes += [f"{model['name']}: {warning}" for warning in model.get("warnings", [])]
    if said := cacheview.trimmed(status.get("store", {})):
        notes.append(f"the store dropped {said}")
    if status.get("clients", {}).get("gated"):
        notes.append("too many connections: new ones wait")
    return notes
