"""The programs' entry points: Ctrl-C ends one that is still being loaded, or is about to end, quietly and with 130.

Loads nothing before the handler is there that the interpreter has not loaded itself. What SIGINT does while a program
runs is the program's.
"""

import _signal  # type: ignore[import-not-found]  # to load ``signal`` takes longer than all that is here
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130


def tool() -> None:
    """``nodeagentctl``."""

    def load() -> "Callable[[], object]":
        from nodeagent.ctl.main import main

        return main

    _run(load)


def run_tool() -> None:
    """``nodeagent-run``."""

    def load() -> "Callable[[], object]":
        from nodeagent.ctl.main import run_main

        return run_main

    _run(load)


def daemon() -> None:
    """``nodeagent``."""

    def load() -> "Callable[[], object]":
        from nodeagent.agent.main import main

        return main

    _run(load)


def _run(load: "Callable[[], Callable[[], object]]") -> None:
    if _signal.getsignal(_signal.SIGINT) is not _signal.default_int_handler:  # a shell had it ignored: ``... &``
        load()()
        return
    _signal.signal(_signal.SIGINT, _leave)
    program = load()
    try:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        program()
    except KeyboardInterrupt:
        _leave()
    finally:
        _signal.signal(_signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
