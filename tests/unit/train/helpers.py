"""What the tests of snapshots share."""

from __future__ import annotations

from nodeagent.train.memory import SharedBuffer

memories: list[SharedBuffer] = []
"""Those that a test has made: ``conftest.py`` closes them."""
