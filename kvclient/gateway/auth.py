"""Who may ask: API keys, loopback names, origins. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvclient.errors import KvdError
from kvclient.gateway.problems import refused

SALT_LABEL: Final = b"kvd gateway salt v1"
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches; a name other than `localhost` is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def salt_of(key: str) -> str:
    """The cache salt of an API key: clients with different keys share nothing, and the key is not to be had from it."""
    return hmac.new(SALT_LABEL, key.encode(), hashlib.sha256).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules for one gateway. Without keys only loopback names are served: a web page that a browser on this
    machine shows must not reach it, neither by rebinding a name (Host) nor by posting across (Origin)."""

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    """origins allowed to call from a browser (CORS); "*" allows all"""

    def key_of(self, headers: dict[str, str]) -> str | None:
        """The key that was sent and is known; None where no keys are set. Raises Refused (401)."""
        if not self.keys:
            return None
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        sent = rest.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = None
        for key in self.keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key.encode(), sent.encode()):
                found = key
        if found is None:
            raise refused(401, "invalid_api_key", "the API key is missing or not one of this gateway's")
        return found

    def check_origin(self, headers: dict[str, str]) -> KvdError | None:
        """Why a browser's request is refused, None if it is not."""
        origin = headers.get("origin", "")
        host = headers.get("host", "")
        if not self.keys and _name(host) not in LOOPBACK_NAMES:
            return refused(403, "host_not_allowed", f"Host {host!r} is not a loopback name, and no API key is set")
        if not origin or self.allows(origin) or urlsplit(origin).netloc == host:
            return None
        return refused(403, "origin_not_allowed", f"origin {origin!r} is not allowed; see --cors-origin")

    def allows(self, origin: str) -> bool:
        return origin in self.origins or "*" in self.origins


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()
