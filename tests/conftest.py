from __future__ import annotations

import signal

# A suite started in the background by a shell inherits an ignored Ctrl-C, and so would every program it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
