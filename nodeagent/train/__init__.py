"""Help for worker scripts, optional: what nodeagent knows of this worker, and checkpoints that lose nothing.

Runs in the job's own Python and imports nothing of the rest of nodeagent; torch only where a file needs it. Works
under plain torchrun as well: there it is just less. Must never be imported by the agent.
"""

from __future__ import annotations

from nodeagent.train.context import Context, context
from nodeagent.train.link import Link, LinkError
from nodeagent.train.progress import progress

__all__ = ["Context", "Link", "LinkError", "context", "progress"]
