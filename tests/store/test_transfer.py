"""A prefix goes from one store to another as one file, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient.errors import BadRequest, StoreError
from kvd.store.base import Limits
from kvd.store.store import Store
from kvd.store.transfer import export, import_
from kvd.store.verbs import perform
from tests.store.conftest import finish
from torments.actor import Actor
from torments.blocks import NAMESPACE

PROMPT = list(range(1, 11))


@pytest.fixture
def exported(actor: Actor, tmp_path: Path) -> Path:
    actor.put(PROMPT)
    actor.put([*PROMPT[:4], 60])
    target = tmp_path / "prefix.kvd"
    perform(actor.store, "export", {"chain": actor.blocks(PROMPT)[-1].chain.hex(), "file": str(target)})
    return target


def other_store(tmp_path: Path, limit: int = 8_000_000, name: str = "other", **limits: object) -> Actor:
    return Actor(Store.open(tmp_path / name, Limits(limit, **limits)))  # type: ignore[arg-type]


def test_another_store_serves_an_imported_prefix(exported: Path, tmp_path: Path) -> None:
    actor = other_store(tmp_path, admission="second")
    actor.store.label(NAMESPACE, "demo")
    answer = perform(actor.store, "import", {"file": str(exported)})
    assert (answer["blocks"], answer["tokens"], answer["stored"]) == (3, 10, 3)
    assert actor.get(PROMPT) == len(PROMPT)
    assert perform(actor.store, "import", {"file": str(exported)})["already"] == 3
    actor.store.close()


def test_the_same_blocks_give_the_same_file(exported: Path, tmp_path: Path) -> None:
    actor = other_store(tmp_path)
    actor.put([9])
    finish(import_(actor.store, str(exported)))
    again = tmp_path / "again.kvd"
    finish(export(actor.store, actor.blocks(PROMPT)[-1].chain, str(again)))
    assert again.read_bytes() == exported.read_bytes()
    actor.store.close()


def test_an_export_of_another_namespace_is_refused_with_both(exported: Path, tmp_path: Path) -> None:
    actor = other_store(tmp_path)
    actor.store.label(b"x" * 16, "other weights")
    with pytest.raises(BadRequest, match=NAMESPACE.hex()) as caught:
        perform(actor.store, "import", {"file": str(exported)})
    assert caught.value.details == {"theirs": NAMESPACE.hex(), "models": [], "known": [(b"x" * 16).hex()]}
    assert len(actor.store.core.table) == 0
    actor.store.close()


def test_an_export_of_a_model_that_was_never_asked_here_says_which_and_what_to_do(
    actor: Actor, tmp_path: Path
) -> None:
    actor.put(PROMPT)
    for name in ("two", "demo"):
        actor.store.label(NAMESPACE, name)
    target = str(tmp_path / "named.kvd")
    perform(actor.store, "export", {"chain": actor.blocks(PROMPT)[-1].chain.hex(), "file": target})
    other = other_store(tmp_path)
    with pytest.raises(BadRequest, match=r"is of demo or two .* ask the model once .* then import again"):
        perform(other.store, "import", {"file": target})
    other.store.label(NAMESPACE, "mine")
    assert perform(other.store, "import", {"file": target})["stored"] == 3
    other.store.close()


def test_a_damaged_or_foreign_file_changes_nothing(exported: Path, tmp_path: Path) -> None:
    actor = other_store(tmp_path)
    actor.store.label(NAMESPACE, "demo")
    good = exported.read_bytes()
    for bad in (
        b"", b"hello", good[:-1], good + b"x", good[:2000], good[:5000] + b"\0" + good[5001:],
        good[:13] + b"\xff\xff\xff\xff" + good[17:], good.replace(b'"size":', b'"size":-'), good[:17] + b"x" * 900,
    ):  # fmt: skip
        exported.write_bytes(bad)
        with pytest.raises(BadRequest):
            perform(actor.store, "import", {"file": str(exported)})
    with pytest.raises(BadRequest, match="cannot read"):
        perform(actor.store, "import", {"file": str(tmp_path / "missing")})
    assert len(actor.store.core.table) == 0 and not actor.store.core.pending
    actor.store.close()


def test_no_room_is_an_error_that_says_why(exported: Path, tmp_path: Path) -> None:
    actor = other_store(tmp_path, limit=600_000)
    actor.store.label(NAMESPACE, "demo")
    with pytest.raises(StoreError, match="full|larger_than_limit"):
        perform(actor.store, "import", {"file": str(exported)})
    actor.store.close()


def test_a_damaged_block_is_not_exported(actor: Actor, exported: Path, tmp_path: Path) -> None:
    path = Path(actor.store.core.tree.shard(NAMESPACE, actor.blocks(PROMPT)[0].chain))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError):
        finish(export(actor.store, actor.blocks(PROMPT)[-1].chain, str(tmp_path / "no.kvd")))
    with pytest.raises(StoreError, match="no stored prefix"):
        finish(export(actor.store, bytes(16), str(tmp_path / "no.kvd")))
    assert not list(tmp_path.glob("no.kvd*"))
