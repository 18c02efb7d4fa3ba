"""A worker ends with the front, by the pipe alone too."""

from __future__ import annotations

import os
import subprocess
import sys

from kvd.leash import ORPHANED

CODE = "import sys, time; from kvd import leash; leash.hold(int(sys.argv[1])); print('on', flush=True); time.sleep(60)"


def test_the_end_of_the_pipe_is_the_end_of_the_worker() -> None:
    reading, writing = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", CODE, str(reading)], pass_fds=[reading], stdout=subprocess.PIPE)
    os.close(reading)
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"on\n"
        assert child.poll() is None
        os.close(writing)
        assert child.wait(10) == ORPHANED
