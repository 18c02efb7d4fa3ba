"""The human views of `status` and `cache`: what is there is shown, what is missing stays blank."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from kvd.cli import cacheview, status, view
from kvd.cli.explain import lines
from kvd.cli.logs import readable

STATUS: dict[str, Any] = {
    "version": "0.1.0", "pid": 77, "uptime_s": 7200, "home": "/h",
    "memory": {"budget_bytes": 8 * 2**30, "used_bytes": 2**30, "by_model": {"demo": 2**30}},
    "store": {"used": 3 * 2**30, "limit": 20 * 2**30, "blocks": 1234, "written_today_bytes": 5 * 2**20},
    "models": [
        {"name": "demo", "state": "loaded", "pid": 78, "kv_precision": "native", "pinned": True, "blocks_total": 10,
         "blocks_live": 1, "blocks_cached": 5, "pool_bytes": 2**20, "live": 2, "waiting": 1, "reads_hung": 3},
        {"name": "other", "state": "down", "crashes": 5, "log": "/h/logs/w.log"},
        {"name": "far", "state": "not loaded", "unread_s": 90.4},
    ],
    "requests": [
        {"id": "abcdef0123456789", "kind": "generate", "model": "demo", "stage": "running", "age_s": 3.0,
         "progress": {"done": 512, "total": 2048, "cached": 256}},
        {"id": "b" * 32, "kind": "generate", "model": "demo", "stage": "waiting", "age_s": 1.0,
         "queued": {"position": 0}},
    ],
    "metrics": [{"name": "kvd_prompt_tokens_total", "label": "source", "help": "",
                 "values": {"cached_memory": 600, "cached_ssd": 300, "computed": 100}}],
}  # fmt: skip


def printed(renderable: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(renderable)
    return out.getvalue()


def test_status_shows_models_requests_reuse_and_what_needs_a_look() -> None:
    text = printed(view.page(STATUS))
    for words in (
        "pid 77", "up 2h", "1 GiB of 8 GiB", "3 GiB of 20 GiB, 1,234 blocks, 5 MiB written today",
        "90 % of 1,000 prompt tokens were cached (600 in memory, 300 on SSD), 100 computed",
        "demo (pinned)", "512 of 2,048 (256 cached)", "place 1 in the line", "other crashed too often",
        "kvd load other", "demo: the disk of the store does not answer (3 reads",
        "far: the disk of its files has not answered for",
    ):  # fmt: skip
        assert words in text, words
    for crashes, often in ((1, "once"), (2, "2 times")):
        [note] = view.problems({"models": [{"name": "demo", "state": "loaded", "crashes": crashes}]})
        assert note.startswith(f"demo crashed {often} lately"), note
    assert "ROWS/S" not in text
    assert "ROWS/S" in printed(view.page(STATUS, {"demo": 80.0}))


def test_the_help_of_status_says_what_each_column_of_a_model_means() -> None:
    header = next(line for line in printed(view.page(STATUS)).splitlines() if line.startswith("MODEL "))
    explained = [line.strip().partition("  ")[0] for line in (status.__doc__ or "").splitlines()]
    assert len(header.split("  ")) > 5
    for column in [words.strip() for words in header.split("  ") if words.strip()][1:]:
        assert column in explained, column


def test_a_daemon_that_just_started_is_shown_without_gaps() -> None:
    text = printed(view.page({"version": "0.1.0", "pid": 1, "store": {"problem": "opening"}}))
    assert "no prompt yet" in text
    assert "not available: opening" in text


def test_a_disk_without_room_for_blocks_is_told_with_what_to_do() -> None:
    model = {"name": "demo", "spill": {"free_space": 2, "no_space": 1, "parent_missing": 7}}
    text = printed(view.page({"models": [model], "store": {}}))
    assert "demo: not all was stored: the disk was too full 3 times since it was loaded; see `kvd doctor`" in text
    assert view.problems({"models": [{**model, "spill": {"parent_missing": 7}}]}) == []


def test_a_store_that_is_off_says_what_it_left_on_the_disk_and_how_to_remove_it() -> None:
    off = {"off": True, "shards_bytes": 3 * 2**30, "path": "/h/store", "limit": 0, "used": 3 * 2**30}
    assert "store    off, 3 GiB left in /h/store; `kvd cache clear` removes them" in printed(
        view.page({**STATUS, "store": off})
    )
    assert view.store_line({**off, "shards_bytes": 0}) == "off"
    numbers = {"blocks": 3, "tokens": 9, "pins": 0, "durable": True, "written_today_bytes": 0, "written_total_bytes": 0}
    assert "the store is off (store.limit is 0)" in printed(cacheview.stats({**off, **numbers}))


STATS: dict[str, Any] = {
    "used": 0, "limit": 10_000_000, "written_today_bytes": 0, "written_total_bytes": 0, "blocks": 0, "tokens": 0,
    "pins": 0, "path": "/s", "durable": True,
}  # fmt: skip


def test_what_a_lower_limit_took_is_shown_with_the_pins_it_cost() -> None:
    assert "dropped" not in printed(cacheview.stats(STATS))
    text = printed(cacheview.stats({**STATS, "trimmed": {"blocks": 1_234, "bytes": 2**30, "pinned": 3}}))
    assert "1,234 blocks (1 GiB), 3 of them pinned: the store held more than store.limit (9.54 MiB) allows" in text
    store = {"limit": 10_000_000, "trimmed": {"blocks": 1_234, "bytes": 2**30, "pinned": 0}}
    assert "the store dropped 1,234 blocks (1 GiB), none of them pinned" in printed(view.page({"store": store}))
    assert "0 (2 more wait for their block" in printed(cacheview.stats({**STATS, "pins_waiting": 2}))


def node(**fields: Any) -> dict[str, Any]:
    base = {
        "namespace": "00", "model": "demo", "chain": "ab" * 16, "preview": "You are", "start": 0, "tokens": 256,
        "blocks": 1, "bytes": 2**20, "hits": 3, "last_use": time.time() - 90, "pinned": False, "expires": None,
        "depth": 0, "parent": "", "words": "",
    }  # fmt: skip
    return {**base, **fields}


def test_ls_is_a_tree_with_pins_and_the_chain_that_names_each_prefix() -> None:
    below = {"start": 256, "tokens": 30, "chain": "cd" * 16, "pinned": True, "expires": time.time() + 7200.5}
    child = node(preview="<|im_end|> <|im_start|>user and then", depth=1, **below)
    text = printed(cacheview.tree({"prefixes": [node(), child]}))
    top, line = text.splitlines()[1:3]
    assert "You are" in top and "ab" * 16 in top and "2m ago" in top
    assert "  user and then" in line and "cd" * 16 in line and "2h left" in line
    assert "(from token 256)" in printed(cacheview.tree({"prefixes": [node(preview="", start=256)]}))
    assert "nothing is stored" in printed(cacheview.tree({"prefixes": []}))


def test_a_thousand_turns_deep_is_no_problem() -> None:
    deep = [node(depth=depth) for depth in range(1000)]
    shown = printed(cacheview.tree({"prefixes": deep})).splitlines()
    assert len(shown) == 1001


def test_siblings_are_shown_by_the_words_that_tell_them_apart() -> None:
    text = printed(cacheview.tree({"prefixes": [node(words="Which version?"), node(words="", preview="You are")]}))
    assert "…Which version?" in text and " You are" in text


def test_a_clear_says_what_it_dropped_on_disk_and_in_memory_and_what_stays() -> None:
    disk = {"checked": 1200, "freed": 2**30}
    assert cacheview.cleared(disk) == "1,200 blocks dropped, 1 GiB given back"
    assert "(2 more are being written and stay)" in cacheview.cleared(disk | {"counts": {"being_written": 2}})
    memory = {"memory_blocks": 40, "memory_bytes": 2**20, "memory_blocks_in_use": 0}
    assert cacheview.cleared(disk | memory).endswith("; 40 blocks (1 MiB) forgotten in memory")
    assert cacheview.cleared(disk | memory | {"memory_blocks_in_use": 3}).endswith(", 3 are in use and stay")



def test_verify_with_damage_fails_for_scripts() -> None:
    assert cacheview.exit_code("verify", {"damaged": 1}) == 70
    assert cacheview.exit_code("verify", {"damaged": 0}) == 0
    assert "1 damaged" in cacheview.verified({"checked": 5, "damaged": 1, "counts": {"checksum": 1}})


def test_explain_names_the_divergence_on_both_sides_and_the_reason() -> None:
    found = {
        "prompt_tokens": 100, "cached_memory_tokens": 40, "cached_ssd_tokens": 20, "miss_reason": "diverged",
        "first_divergence": {"token": 60, "text": " Tuesday", "stored_text": " Monday"},
        "rules": [{"name": "dates", "saved_tokens": 39}],
    }  # fmt: skip
    text = "\n".join(lines(found))
    for words in ("40 to compute", "at token 60", "' Tuesday'", "' Monday'", "rule dates would save 39"):
        assert words in text, words
    assert "why not all" not in text
    assert "cannot run" not in text
    assert "cannot run: too long by 10 tokens; the limit is 90" in lines({**found, "limit": 90})
    assert lines({**found, "miss_reason": "cache_off"})[-2] == "why not all: the request did without the cache"


def test_counters_are_named_in_words() -> None:
    assert cacheview.collected({"freed": 0, "counts": {"pins_expired": 2}}) == "0 B given back (pins expired 2)"
    answer = {
        "used": 0, "limit": 1, "blocks": 0, "tokens": 0, "pins": 0, "written_today_bytes": 0, "path": "/s",
        "written_total_bytes": 0, "durable": True, "counters": {"refused.free_space": 3, "committed": 4},
    }  # fmt: skip
    text = printed(cacheview.stats(answer))
    assert "refused: free space" in text and "blocks written" in text


def test_a_log_line_is_readable_and_what_is_no_json_stays() -> None:
    line = '{"request": "r1", "event": "end", "level": "info", "timestamp": "2026-11-30T23:25:20.744155Z"}'
    assert readable(line) == "2026-11-30 23:25:20 info    end  request=r1"
    assert readable("Fatal Python error\n") == "Fatal Python error"


def test_a_verification_does_not_call_sound_what_it_could_not_read() -> None:
    assert "3 blocks read: all sound" in cacheview.verified({"checked": 3, "counts": {"ok": 3}})
    some = cacheview.verified({"checked": 3, "damaged": 0, "counts": {"ok": 1, "unreadable": 2}})
    assert "2 could not be read" in some and "sound" not in some
    both = cacheview.verified({"checked": 3, "damaged": 1, "counts": {"checksum": 1, "unreadable": 2}})
    assert "1 damaged and set aside, 2 could not be read" in both
