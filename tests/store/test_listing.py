"""`ls`: the tree of stored prefixes, as a list, with the words that tell them apart."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvclient import wire
from kvd.cache.chain import next_chain
from kvd.store.base import Reservation, Written
from kvd.store.shard import offer_of, store_shard
from kvd.store.upkeep import rebuild
from kvd.store.verbs import perform
from kvd.store.words import distinguishing
from tests.store.conftest import World, finish
from torments.actor import Actor
from torments.blocks import NAMESPACE, header, payload

PROMPT = list(range(1, 11))
BRANCH = [*PROMPT[:4], 50, 51]


def test_ls_shows_branches_with_first_words_hits_and_pins(actor: Actor) -> None:
    actor.put(PROMPT)
    actor.put(BRANCH)
    actor.store.label(NAMESPACE, "demo")
    actor.store.pin(NAMESPACE, [b.chain for b in actor.blocks(PROMPT)], ttl_s=60)
    actor.get(PROMPT)
    top, *below = perform(actor.store, "ls", {})["prefixes"]
    assert (top["model"], top["tokens"], top["blocks"], top["preview"]) == ("demo", 4, 1, "words of 1")
    assert (top["depth"], top["parent"]) == (0, "")
    assert {(n["depth"], n["parent"]) for n in below} == {(1, top["chain"])}
    pinned, branch = sorted(below, key=lambda n: -n["tokens"])
    assert (pinned["tokens"], pinned["start"], pinned["hits"], pinned["pinned"]) == (6, 4, 1, True)
    assert (branch["tokens"], branch["hits"], branch["pinned"], branch["expires"]) == (2, 0, False, None)
    assert top["pinned"] and pinned["expires"]
    assert perform(actor.store, "ls", {"model": "x"}) == {"prefixes": [], "model": "x"}


def test_a_pin_in_the_middle_of_a_prefix_is_shown_with_the_chain_that_unpins_it(actor: Actor) -> None:
    tokens = list(range(1, 21))
    actor.put(tokens)
    chain = actor.blocks(tokens)[1].chain
    actor.store.pin(NAMESPACE, [chain])
    first, rest = perform(actor.store, "ls", {})["prefixes"]
    assert (first["chain"], first["tokens"], first["pinned"], first["depth"]) == (chain.hex(), 8, True, 0)
    assert (rest["tokens"], rest["pinned"], rest["depth"], rest["parent"]) == (12, False, 1, chain.hex())


def test_a_conversation_that_branches_at_every_turn_can_be_listed_and_sent(world: World) -> None:
    actor = world.open(1 << 30, durable=False)
    parent = NAMESPACE
    for turn in range(600):
        for tokens in ([1, 1, 1, 1], [2, turn]):
            block = header(tokens, parent, start=4 * turn)
            place = actor.store.reserve(offer_of(block))
            assert isinstance(place, Reservation)
            size, checksum = store_shard(actor.files, place.temp, place.final, block, payload(block), durable=False)
            assert actor.store.commit([Written(place.id, checksum, size)])[0].ok
        parent = next_chain(parent, [1, 1, 1, 1])
    nodes = wire.unpack(wire.pack(perform(actor.store, "ls", {})))["prefixes"]
    assert len(nodes) == 1200 and max(n["depth"] for n in nodes) == 599
    above = [""]
    for node in nodes:
        assert node["parent"] == above[node["depth"]]
        above = [*above[: node["depth"] + 1], node["chain"]]


def test_siblings_are_told_apart_by_their_first_own_words(world: World) -> None:
    actor = world.open()
    system = "<|im_start|>system You are helpful. <|im_end|> <|im_start|>user "
    for n, question in enumerate(("Which licence is this?", "What does it grant?", "What does it cost?")):
        put_text(actor, [1, 2, n], system + question)
    put_text(actor, [9], "Another beginning")
    nodes = perform(actor.store, "ls", {})["prefixes"]
    assert {n["words"] for n in nodes} == {"Which licence is this?", "grant?", "cost?", "Another beginning"}
    assert sum(n["preview"].startswith("<|im_start|>system You") for n in nodes) == 3
    path = actor.store.core.tree.shard(NAMESPACE, next_chain(NAMESPACE, [1, 2, 0]))
    os.unlink(path)
    assert len(perform(actor.store, "ls", {})["prefixes"]) == 4


def put_text(actor: Actor, tokens: list[int], text: str) -> None:
    block = replace(header(tokens), preview=text)
    place = actor.store.reserve(offer_of(block))
    assert isinstance(place, Reservation)
    size, checksum = store_shard(actor.files, place.temp, place.final, block, payload(block))
    assert actor.store.commit([Written(place.id, checksum, size)])[0].ok


def test_a_row_of_the_index_has_the_first_words_only_also_after_a_rebuild(world: World) -> None:
    actor = world.open()
    put_text(actor, [1, 2], "word " * 500)
    for _ in range(2):
        (slot,) = actor.store.core.table
        assert slot.preview == ("word " * 16)
        finish(rebuild(actor.store.core))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a b c", "a b d"], ["c", "d"]),
        (["Version 2.0, January", "Version 3.0, January", "Apache"], ["2.0, January", "3.0, January", "Apache"]),
        (["foo bar", "foo barbecue x"], ["bar", "barbecue x"]),
        (["a b c", "a b c d"], ["c", "d"]),
        (["same", "same", "other"], ["", "", "other"]),
        (["", "x"], ["", "x"]),
        (["one"], ["one"]),
        ([], []),
    ],
)
def test_words_begin_where_no_other_text_agrees_any_more(texts: list[str], words: list[str]) -> None:
    assert distinguishing(texts) == words
