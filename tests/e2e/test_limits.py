"""What the system allows the daemon is there for its workers."""

from __future__ import annotations

import resource

import pytest

from rig.daemon import Daemon


def test_a_worker_may_open_as_many_files_as_the_system_allows_the_daemon(own_daemon: Daemon) -> None:
    """The daemon's limit is one that no library would set by itself."""
    if not hasattr(resource, "prlimit"):
        pytest.skip("only Linux tells the limits of another process")
    assert own_daemon.process is not None
    resource.prlimit(own_daemon.process.pid, resource.RLIMIT_NOFILE, (1000, 3000))
    with own_daemon.client() as client:
        client.load("demo")
    [worker] = own_daemon.worker_pids()
    assert resource.prlimit(worker, resource.RLIMIT_NOFILE) == (3000, 3000)
