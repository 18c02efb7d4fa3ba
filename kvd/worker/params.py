"""What a client asks for, as one frozen value: checked by the protocol's table, then against the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvclient.errors import BadRequest
from kvclient.fields import checked

CacheUse = Literal["use", "read", "off"]
Priority = Literal["interactive", "background"]

NO_LIMIT: Final = 2**31 - 1
COLD: Final = 1e-5
"""a temperature below it is 0: what it leaves to chance is rounding, and logits divided by it would be infinite"""
DURABLE_WAIT_MS: Final = {"warm": 60_000}
DURABLE_WAIT_MS_ELSE: Final = 500
"""how long `done` waits for commits: warming is there for what is stored"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `seed` is always set: a request without one got a random one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLD or self.top_k == 1 or self.top_p == 0.0

    @property
    def plain(self) -> bool:
        """Logits are drawn from as the model gave them."""
        return not (
            self.logit_bias or self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class Params:
    """A validated request. `max_tokens` is NO_LIMIT when the client named none; `timeout`, `durable_wait`, `ttl` in
    seconds."""

    kind: str
    sampling: Sampling
    max_tokens: int = NO_LIMIT
    stop: tuple[str, ...] = ()
    n: int = 1
    response_format: Mapping[str, Any] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    cache: CacheUse = "use"
    salt: str = ""
    priority: Priority = "interactive"
    durable_wait: float = DURABLE_WAIT_MS_ELSE / 1000
    timeout: float | None = None
    pin: bool = False
    ttl: float | None = None

    @property
    def reads(self) -> bool:
        return self.cache != "off"

    @property
    def stores(self) -> bool:
        return self.cache == "use"


def parse(kind: str, body: Mapping[str, Any], *, vocab: int, random_seed: int) -> tuple[Params, dict[str, Any]]:
    """The request and its body in the form of the wire. Raises BadRequest naming the field and what is allowed."""
    body = checked(kind, body)
    response_format = body.get("response_format")
    if response_format is not None and response_format.get("type") == "text":
        response_format = None
    params = Params(
        kind=kind,
        sampling=_sampling(body, vocab, random_seed),
        max_tokens=body.get("max_tokens", NO_LIMIT),
        stop=tuple(body.get("stop", ())),
        n=body.get("n", 1),
        response_format=response_format,
        tool_choice=body.get("tool_choice", "auto"),
        cache=body.get("cache", "use"),
        salt=body.get("salt", ""),
        priority=body.get("priority", "interactive"),
        durable_wait=body.get("durable_wait_ms", DURABLE_WAIT_MS.get(kind, DURABLE_WAIT_MS_ELSE)) / 1000,
        timeout=body.get("timeout"),
        pin=body.get("pin", False),
        ttl=body.get("ttl_s"),
    )
    return params, body


def _sampling(body: Mapping[str, Any], vocab: int, random_seed: int) -> Sampling:
    bias = {int(token): amount for token, amount in body.get("logit_bias", {}).items()}
    if beyond := [token for token in bias if token >= vocab]:
        raise BadRequest(
            f"logit_bias: token id {beyond[0]} is not within 0 and {vocab - 1}",
            field="logit_bias", value=beyond[0], vocab=vocab,
        )  # fmt: skip
    return Sampling(
        temperature=body.get("temperature", 0.0),
        top_p=body.get("top_p", 1.0),
        top_k=body.get("top_k", 0),
        min_p=body.get("min_p", 0.0),
        seed=body.get("seed", random_seed),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        presence_penalty=body.get("presence_penalty", 0.0),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        logit_bias=tuple(sorted(bias.items())),
        logprobs=body.get("logprobs", False),
        top_logprobs=body.get("top_logprobs", 0),
    )
