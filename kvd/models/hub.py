"""Model repositories of a Hugging Face hub (or of the server that `HF_ENDPOINT` names)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest
from kvd.models.progress import progress

PATTERNS = (
    "config.json", "generation_config.json", "hf_quant_config.json", "model*.safetensors",
    "model.safetensors.index.json", "tokenizer*.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json",
    "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.json", "*.jinja",
)  # fmt: skip
"""What a model needs; never code, pickles or pictures."""


def wanted(name: str) -> bool:
    """Whether a file at the top of a model folder is part of the model."""
    return any(fnmatch(name, pattern) for pattern in PATTERNS)


def download(repo: str, folder: Path) -> None:
    """Fetch the newest revision of `repo` into `folder`. Raises BadRequest saying what stood in the way."""
    from huggingface_hub import errors, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT") or None
    # An empty folder of its own: the library takes a filled one for the model when the hub cannot be reached.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".hub-") as scratch, progress(repo, None) as advance:
        target = Path(scratch, "files")
        try:
            snapshot_download(
                repo, local_dir=target, cache_dir=Path(scratch, "cache"), allow_patterns=list(PATTERNS),
                endpoint=endpoint, tqdm_class=_reporting(advance), max_workers=4,
            )  # fmt: skip
        except errors.GatedRepoError as error:
            raise _failed(repo, "it is gated: accept its terms on the hub, then log in (hf auth login)") from error
        except errors.RepositoryNotFoundError as error:
            raise _failed(repo, "the hub has no such repository, or it is private and you are not logged in") from error
        except errors.HfHubHTTPError as error:
            raise _failed(repo, f"the hub answered {error.response.status_code}") from error
        except errors.LocalEntryNotFoundError as error:
            raise _failed(repo, _offline_reason(error)) from error
        except Exception as error:  # its transports raise types of their own, which its documentation does not list
            raise _failed(repo, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        if not any(path.is_file() for path in target.glob("*")):
            raise _failed(repo, "it holds none of the files that a model needs")
        for path in target.iterdir():
            if path.is_file():
                shutil.move(path, folder / path.name)


def _failed(repo: str, reason: str) -> BadRequest:
    return BadRequest(f"cannot fetch {repo}: {reason}", repo=repo, reason=reason)


def _offline_reason(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = error.__cause__
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids the network"
    if isinstance(cause, HfHubHTTPError):
        return f"the hub answered {cause.response.status_code}"
    unreached = "the hub cannot be reached: no network, or a proxy that is not set (HTTPS_PROXY)"
    return f"{unreached} [{type(cause).__name__}]" if cause else unreached


def _reporting(advance: Callable[[int], None]) -> type[Any]:
    """A tqdm class that draws nothing and tells `advance` of the bytes written."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = str(kwargs.get("desc", "")).startswith("Reconstructing")
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._bytes:
                advance(int(n or 0))
            return None

    return Reporting
