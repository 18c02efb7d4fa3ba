"""Small files replaced as a whole. The store has its own way, through its door to the file system."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Durable on return; whoever reads it, also after a crash, finds the old text or the new one. One writer at a time.
    Raises OSError."""
    temp = path.with_name(path.name + ".tmp")
    with temp.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)
