"""nodeagent: elastic, fault-tolerant distributed training on bare-metal GPU machines."""

__version__ = "0.1.0"
