"""nodeagent: elastic, fault-tolerant distributed training on bare-metal GPU machines."""

__version__ = "0.1.0"


def hardware_missing() -> str:
    """A sentence if the package that watches the hardware was left out of this installation; empty if it is there."""
    from importlib.util import find_spec  # the tool asks only in commands that need it

    return "" if find_spec("nodeagent.hardware") else "nodeagent.hardware is not installed"
