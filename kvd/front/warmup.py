"""Prompts named in the configuration, prefilled when the daemon starts: one after the other, in the background, pinned.

The daemon is its own client here: these requests queue, yield and fail as anybody's do.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvclient import AsyncClient, compose
from kvclient.errors import KvdError
from kvd.front.logs import logger
from kvd.front.reads import in_thread
from kvd.kinds import WarmPrompt

DURABLE_WAIT_MS = 60_000
"""a pin needs its blocks on the disk"""


async def warm_up(socket: Path, prompts: tuple[WarmPrompt, ...]) -> None:
    """What cannot be warmed is logged and left out."""
    if not prompts:
        return
    async with AsyncClient(socket) as client:
        for prompt in prompts:
            try:
                text = await in_thread(partial(prompt.file.read_text, encoding="utf-8"))
                body = compose.warm_body(text, prompt.system, raw=prompt.raw)
                stats = await client.warm(
                    prompt.model, **body, pin=True, priority="background", durable_wait_ms=DURABLE_WAIT_MS
                )
            except (KvdError, OSError, UnicodeDecodeError) as problem:
                logger.warning("not warmed", model=prompt.model, file=str(prompt.file), problem=str(problem))
                continue
            logger.info("warmed", model=prompt.model, file=str(prompt.file), tokens=stats.prompt_tokens,
                        computed=stats.computed_tokens)  # fmt: skip
