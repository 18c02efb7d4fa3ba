"""Names of the store's files and folders. Pure.

    store/  blocks/<namespace hex>/<chain hex>.safetensors   tmp/   index/{data.mdb,clean.json}   quarantine/
            pins.json  wear.json  names.json  seen  lock  CACHEDIR.TAG  .metadata_never_index
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvd.store.files import TEMP_SUFFIX
from kvd.store.header import SUFFIX

TAG: Final = b"Signature: 8a477f597d28d172789f06886806bc55\n# KV cache of kvd; safe to delete while kvd is stopped.\n"
SMALL: Final = ("pins.json", "wear.json", "names.json", "seen")
OURS: Final = frozenset(
    {"blocks", "tmp", "index", "quarantine", "lock", "CACHEDIR.TAG", ".metadata_never_index", *SMALL}
    | {name + TEMP_SUFFIX for name in SMALL}
)
_LOWER: Final = frozenset("0123456789abcdef")
INDEX_FILES: Final = frozenset({"data.mdb", "lock.mdb", "clean.json", "clean.json" + TEMP_SUFFIX})


@dataclass(frozen=True, slots=True)
class Tree:
    """Paths below the store's folder `root`."""

    root: str

    @property
    def blocks(self) -> str:
        return os.path.join(self.root, "blocks")

    @property
    def tmp(self) -> str:
        return os.path.join(self.root, "tmp")

    @property
    def index(self) -> str:
        return os.path.join(self.root, "index")

    @property
    def quarantine(self) -> str:
        return os.path.join(self.root, "quarantine")

    @property
    def clean(self) -> str:
        """Size and time of data.mdb at a clean close; its absence says that the last owner died."""
        return os.path.join(self.index, "clean.json")

    @property
    def tag(self) -> str:
        return os.path.join(self.root, "CACHEDIR.TAG")

    def small(self, name: str) -> str:
        return os.path.join(self.root, name)

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.root, self.blocks, self.tmp, self.index, self.quarantine)

    def namespace(self, namespace: bytes) -> str:
        return os.path.join(self.blocks, namespace.hex())

    def shard(self, namespace: bytes, chain: bytes) -> str:
        return os.path.join(self.blocks, namespace.hex(), chain.hex() + SUFFIX)

    def temp(self, reservation: int, chain: bytes) -> str:
        return os.path.join(self.tmp, f"{reservation}-{chain.hex()}{TEMP_SUFFIX}")


def namespace_of(folder: str) -> bytes | None:
    """The namespace that a folder under `blocks` is named after; None: not a name of ours."""
    return _hex(folder)


def chain_of(file: str) -> bytes | None:
    """The chain that a shard is named after; None: not a name of ours."""
    return _hex(file[: -len(SUFFIX)]) if file.endswith(SUFFIX) else None


def _hex(text: str) -> bytes | None:
    if len(text) != 32 or not _LOWER.issuperset(text):
        return None
    return bytes.fromhex(text)
