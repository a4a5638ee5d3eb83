"""Settings of all tests. Hypothesis judges no test by wall-clock time: these machines are shared and noisy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("nodeagent", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("nodeagent")
