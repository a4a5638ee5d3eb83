"""The end of a forked worker: what Python promises a script when it is over is done, then the process ends at once.

The interpreter is not torn down. That gives back, piece by piece, memory that the kernel takes back anyway, and writes
to each page that a fork shares with its fork server: with torch half a second of a core and more, for each worker,
while a gang stands still. What scripts rely on is done, in Python's own order: threads that are no daemons are waited
for; ``atexit``; standard output; what the script's own names hold is let go, and so finalized; open files are written.
What is not done: finalizers of what other modules hold, or objects in cycles, and exit handlers of C libraries.

Loaded by ``server.py`` before it forks, in the job's Python (3.8 or later): standard library only. Must never end a
worker with another exit code than Python would, nor keep it longer than ``WRITE_BOUND`` once ``atexit`` is through.
"""

from __future__ import annotations

import _io
import _thread
import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import time
import types
import weakref
from typing import Any, NoReturn

WRITE_BOUND = 30.0
"""Seconds for finalizers and open files; then the process ends without: one may wait for a lock that nobody gives."""
NOT_WRITTEN = 120
"""Python's exit code if standard output could not be written."""
_libc = ctypes.CDLL(None)
_frozen: list[weakref.ref[io.IOBase]] = []


def freeze() -> None:
    """``gc.freeze``, with the files among what it hides kept in mind."""
    _frozen.extend(weakref.ref(file) for file in found_files())
    gc.freeze()


def code_of(error: SystemExit) -> int:
    """The exit code; a text is shown, as Python does."""
    code: Any = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF if abs(code) < 1 << 63 else 0xFF
    if sys.stderr is not None:
        print(code, file=sys.stderr)
    return 1


def end(script: types.ModuleType, code: int, *, interrupted: bool) -> NoReturn:
    """End the process; ``interrupted``: by SIGINT, so that its parent can tell."""
    try:
        code = finish(script, code)
    except BaseException as error:  # noqa: BLE001 (any class may have part in it; the code is the script's own)
        os.write(2, f"nodeagent: the end of the script was cut short by {type(error).__name__}\n".encode())
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def finish(script: types.ModuleType, code: int) -> int:
    """What Python promises; the exit code."""
    run_threads()
    with contextlib.suppress(BaseException):  # Python 3.8 and 3.9 have shown it, and raise the last one as well
        atexit._run_exitfuncs()
    if not flush_standard():
        code = NOT_WRITTEN
    handlers_off()
    with contextlib.suppress(RuntimeError):  # as many threads as there may be: no bound then but the grace
        _thread.start_new_thread(give_up, (code,))
    drop_names(script)
    close_files()
    if code != NOT_WRITTEN and not flush_standard():  # what was printed meanwhile
        code = NOT_WRITTEN
    _libc.fflush(None)  # of C libraries
    return code


def run_threads() -> None:
    """Wait for threads that are no daemons, and for what is to run before that (executors)."""
    threading = sys.modules.get("threading")
    if threading is None:
        return
    try:
        threading._shutdown()
    except BaseException as error:  # noqa: BLE001 (a signal's handler; Python goes on as well)
        ignored(threading, error)


def flush_standard() -> bool:
    """Standard output and error, and what they were at first. Whether what a script printed last could be written."""
    written = True
    for stream in standard():
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # noqa: BLE001 (any class may be standard output)
            if stream in (sys.stdout, sys.stderr):
                written = False
            if stream is sys.stdout:
                ignored(stream, error)
    return written


def standard() -> list[Any]:
    streams = [sys.stdout, sys.stderr]
    return streams + [each for each in (sys.__stdout__, sys.__stderr__) if each not in streams]


def handlers_off() -> None:
    """Python's signal handlers end here: their code may need what is about to go."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def give_up(code: int) -> None:
    time.sleep(WRITE_BOUND)
    os.write(2, f"nodeagent: open files were not written within {WRITE_BOUND:g} s after the script's end\n".encode())
    os._exit(code)


def drop_names(script: types.ModuleType) -> None:
    """Let go of what the script's own names hold, the newest first; modules, functions and classes stay, which
    finalizers use. Not while a thread runs code of the script: it would miss them, and Python stops it before."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    names = vars(script)
    frames = sys._current_frames()
    del frames[_thread.get_ident()]
    if any(runs(frame, names) for frame in frames.values()):
        return
    frames.clear()
    stays = (types.ModuleType, types.FunctionType, type)
    for name in [name for name, value in names.items() if not issubclass(type(value), stays)][::-1]:
        if not name.startswith("__"):
            names[name] = None


def runs(frame: types.FrameType | None, names: dict[str, Any]) -> bool:
    """Whether this frame, or one that called it, runs code of the module with these names."""
    while frame is not None and frame.f_globals is not names:
        frame = frame.f_back
    return frame is not None


def found_files() -> list[io.IOBase]:
    """Those that the garbage collector sees. By the type alone: to ask a lazy proxy for its class may import."""
    base = _io._IOBase
    return [each for each in gc.get_objects() if issubclass(type(each), base)]


def close_files() -> None:
    """Write what open files hold back, from the outermost layer inwards: text, bytes, archives and what else does more
    at its end than write, then the bytes that these have written. Plain ones are not closed: a thread that still uses
    one has no error of it."""
    files = [*found_files(), *filter(None, (kept() for kept in _frozen))]
    done = {id(each) for stream in standard() for each in (stream, getattr(stream, "buffer", None))}
    files = [file for file in files if id(file) not in done]
    buffered, other, raw = [], [], []
    for file in files:
        kind = type(file)
        if issubclass(kind, io.TextIOWrapper):
            attempt(file, file.flush)
        elif issubclass(kind, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
            buffered.append(file)
        elif issubclass(kind, io.RawIOBase):
            if kind is not io.FileIO:
                raw.append(file)
        elif not issubclass(kind, (io.BufferedReader, io.BytesIO, io.StringIO)):
            other.append(file)
    for file in buffered:
        attempt(file, file.flush)
    for file in other:
        attempt(file, file.close)
    for file in buffered:
        attempt(file, file.flush)
    for file in raw:
        attempt(file, file.close)


def attempt(file: io.IOBase, what: Any) -> None:
    try:
        if not file.closed:
            what()
    except OSError as error:  # Python is silent here too, but a full disk is worth a word
        ignored(file, error)
    except Exception:  # noqa: BLE001, S110 (whatever a class's close raises: Python's finalizer passes over it as well)
        pass


def ignored(what: object, error: BaseException) -> None:
    """In the form that Python uses."""
    if sys.stderr is not None:
        print(f"Exception ignored in: {what!r}\n{type(error).__name__}: {error}", file=sys.stderr)
