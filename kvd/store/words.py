"""The words by which people tell stored prefixes apart: where each first differs from its siblings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Final

from kvd.store.base import Node
from kvd.store.core import Core
from kvd.store.preview import plain
from kvd.store.shard import ShardDamaged, read_header
from kvd.store.table import Slot

MOST: Final = 80
"""characters"""


def told_apart(
    core: Core, nodes: Sequence[Node], first: Sequence[Slot]
) -> Generator[tuple[int, int], None, tuple[Node, ...]]:
    """`nodes` with their `words`; `first` are their first blocks, whose shards have the text. Yields (done, total)."""
    siblings: defaultdict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for place, slot in enumerate(first):
        siblings[slot.namespace, slot.parent].append(place)
    found = list(nodes)
    asked = [places for places in siblings.values() if len(places) > 1]
    done, total = 0, sum(map(len, asked))
    for places in asked:
        texts = []
        for place in places:
            texts.append(text_of(core, first[place]))
            done += 1
            yield done, total
        for place, words in zip(places, distinguishing(texts), strict=True):
            found[place] = replace(found[place], words=words)
    return tuple(found)


def text_of(core: Core, slot: Slot) -> str:
    """A block's text without the template's tags; its first words where the shard cannot be read."""
    try:
        text = read_header(core.files, core.tree.shard(slot.namespace, slot.chain)).header.preview
    except (ShardDamaged, OSError):
        text = slot.preview
    return plain(text)


def distinguishing(texts: Sequence[str]) -> list[str]:
    """Of each text the words from the first that is not common with another one on; "" for one that another equals.

    The longest common beginning of any two is one of neighbours in sorted order."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    common = [0] * len(texts)
    for one, other in zip(order, order[1:], strict=False):
        length = len(commonprefix((texts[one], texts[other])))
        common[one] = max(common[one], length)
        common[other] = max(common[other], length)
    times = Counter(texts)
    return ["" if times[text] > 1 else _words_from(text, at) for text, at in zip(texts, common, strict=True)]


def _words_from(text: str, at: int) -> str:
    """From the word at `at` on, or from the last one."""
    behind = text[at : at + 1] == " "
    start = at + 1 if behind else text.rfind(" ", 0, min(at, max(len(text) - 1, 0))) + 1
    return text[start : start + MOST]
