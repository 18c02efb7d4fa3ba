"""One question, through the client or through the shell helper, and what it cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient import Client
from tour.document import Exam

ANSWER = 24
"""tokens generated per question"""


@dataclass(frozen=True, slots=True)
class Asked:
    """`ttft` in seconds: for the client as it sees it, for the shell helper as the daemon measured it."""

    ttft: float
    text: str
    stats: dict[str, Any]

    @property
    def computed(self) -> int:
        return int(self.stats["computed_tokens"])


def ask(client: Client, model: str, exam: Exam, question: str, tokens: int = ANSWER) -> Asked:
    began = time.perf_counter()
    ttft = None
    text = ""
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
    for event in client.stream(model, messages=exam.messages(question), **options):
        if ttft is None and event.kind in ("text", "reasoning", "done"):
            ttft = time.perf_counter() - began
        text += event.text if event.kind == "text" else ""
        if event.done is not None:
            return Asked(ttft or 0.0, " ".join(text.split()), event.done.stats.to_wire())
    raise RuntimeError("the stream ended without an answer")


def ask_shell(home: Path, model: str, exam: Exam, question: str) -> Asked:
    """`kv -m MODEL -s SYSTEM "question" < document`."""
    kv = str(Path(sys.executable).parent / "kv")
    words = [kv, "-m", model, "-s", exam.system, "-n", str(ANSWER), "-t", "0", "--json", question]
    env = {**os.environ, "KVD_HOME": str(home)}
    done = subprocess.run(words, input=exam.document, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"kv ended with {done.returncode}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    return Asked(float(answer["stats"]["ttft_s"]), " ".join(str(answer["text"]).split()), answer["stats"])
