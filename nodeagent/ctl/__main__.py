"""``python -m nodeagent.ctl``: as ``nodeagentctl``."""

from nodeagent.entry import tool

tool()
