"""kvclient: thin clients of kvd over a Unix socket.

    from kvclient import Client
    with Client() as kv:
        print(kv.generate("demo", "Once upon", max_tokens=32).text)

Importing this package loads nothing but itself; each name below loads its module on first use, and none of them
ever loads mlx, numpy or transformers.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import would take longer than everything else here
__version__ = "0.1.0"

if TYPE_CHECKING:
    from typing import Any

    from kvclient.aio import AsyncClient as AsyncClient
    from kvclient.aio import AsyncStream as AsyncStream
    from kvclient.client import Client as Client
    from kvclient.client import Stream as Stream
    from kvclient.errors import BadRequest as BadRequest
    from kvclient.errors import Busy as Busy
    from kvclient.errors import Cancelled as Cancelled
    from kvclient.errors import ContextLengthExceeded as ContextLengthExceeded
    from kvclient.errors import Internal as Internal
    from kvclient.errors import KvdError as KvdError
    from kvclient.errors import OutOfMemory as OutOfMemory
    from kvclient.errors import ProtocolError as ProtocolError
    from kvclient.errors import StoreError as StoreError
    from kvclient.errors import Timeout as Timeout
    from kvclient.errors import UnknownModel as UnknownModel
    from kvclient.errors import Unreachable as Unreachable
    from kvclient.errors import UnsupportedModel as UnsupportedModel
    from kvclient.errors import WorkerLost as WorkerLost
    from kvclient.events import Choice as Choice
    from kvclient.events import Completion as Completion
    from kvclient.events import Divergence as Divergence
    from kvclient.events import Event as Event
    from kvclient.events import Progress as Progress
    from kvclient.events import Stats as Stats
    from kvclient.events import TokenLogprob as TokenLogprob
    from kvclient.events import ToolCall as ToolCall

_HOMES = {
    "kvclient.client": ("Client", "Stream"),
    "kvclient.aio": ("AsyncClient", "AsyncStream"),
    "kvclient.events": (
        "Choice", "Completion", "Divergence", "Event", "Progress", "Stats", "TokenLogprob", "ToolCall",
    ),
    "kvclient.errors": (
        "BadRequest", "Busy", "Cancelled", "ContextLengthExceeded", "Internal", "KvdError", "OutOfMemory",
        "ProtocolError", "StoreError", "Timeout", "UnknownModel", "Unreachable", "UnsupportedModel", "WorkerLost",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvclient' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
