"""Settings of all tests. Hypothesis judges no test by wall-clock time: these machines are shared and noisy."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("nodeagent", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("nodeagent")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a script's & by the tools under test, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
