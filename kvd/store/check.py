"""Is an index sound? Asked in a process of its own: a damaged `data.mdb` can crash whoever maps it.

    python -P -m kvd.store.check FOLDER     exit 0: sound; 3: damaged; a signal: worse
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

TIMEOUT_S: Final = 60.0
DAMAGED: Final = 3


def sound(folder: str) -> bool:
    """Check the index in `folder` in a child process: False for damaged, crashed or stuck."""
    command = [sys.executable, "-P", "-m", "kvd.store.check", folder]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(folder: str) -> int:
    from kvd.store.index import check
    from kvd.store.kv import IndexFailed, LmdbKeyValue

    try:
        kv = LmdbKeyValue(folder, readonly=True)
        with kv.read() as reader:
            check(reader)
        kv.check_pages()
    except IndexFailed:
        return DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
