"""The end of a forked worker's script: what Python promises a script is done, the interpreter is not torn down."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.groups import one_in
from tests.integration.shim_support import LAST_WORD, Bench, make_spec, open_bench

PYTHON = sys.executable

TORN_DOWN = """
import os, time, types
class Waits:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"torn down\\n")
        while True:
            sleep(1)
import keeper
keeper.waits = Waits()  # held by a module, as what torch has made is
print("over")
"""

KEEPER = """
import atexit, tempfile
file = open("by_module.txt", "w")
file.write("written by a module")
atexit.register(file.write, ", at exit too")
"""

PROMISED = """
import atexit, bz2, gzip, io, keeper, logging, logging.handlers, multiprocessing, os, sys, tempfile
import threading, time, weakref, zipfile
from concurrent.futures import ThreadPoolExecutor

class Held:
    def __del__(self):
        print("a finalizer of the script's own")
        os.write(os.open("finalized", os.O_CREAT | os.O_WRONLY), b"yes")

class Uploads(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        self.data = getattr(self, "data", b"") + bytes(data)
        return len(data)
    def close(self):
        if not self.closed:
            open("uploaded", "wb").write(getattr(self, "data", b""))
        super().close()


def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def child(other):
    while runs(other):
        time.sleep(0.01)
    time.sleep(0.3)
    os.write(1, b"child ends\\n")

def daemon():
    time.sleep(5)
    os.write(1, b"daemon ends\\n")

def later():
    time.sleep(0.2)
    print("thread ends")

held = Held()
text = open("text.txt", "w")
text.write("text")
binary = open("binary", "wb")
binary.write(b"bytes")
both = open("both", "w+b")
both.write(b"read and written")
packed = gzip.open("packed.gz", "wb")
packed.write(b"packed")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("inside.txt", "inside")
named = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
folder = tempfile.TemporaryDirectory(dir=".", prefix="folder")
upload = io.BufferedWriter(Uploads())
upload.write(b"sent")
lines = logging.handlers.MemoryHandler(100, target=logging.FileHandler("log.txt"))
logging.getLogger().addHandler(lines)
logging.warning("logged")
weakref.finalize(held, print, "finalize")
atexit.register(print, "first registered, last run")
atexit.register(lambda: 1 / 0)
atexit.register(sys.exit, 9)
atexit.register(print, "last registered, first run")
threading.Thread(target=later).start()
pool = ThreadPoolExecutor()
pool.submit(later)
forked = multiprocessing.get_context("fork")
first = forked.Process(target=daemon, daemon=True)
first.start()
forked.Process(target=child, args=(first.pid,)).start()
pipe = open("pipe", "w")
pipe.write("through a pipe")
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("over")
"""

ENDS = {
    "returns": "print('over')",
    "seven": "import sys; sys.exit(7)",
    "none": "import sys; sys.exit(None)",
    "true": "import sys; sys.exit(True)",
    "beyond a byte": "import sys; sys.exit(256 + 3)",
    "negative": "import sys; sys.exit(-1)",
    "huge": "import sys; sys.exit(1 << 70)",
    "text": "import sys; print('out'); sys.exit('cannot go on')",
    "two values": "import sys; sys.exit((1, 2))",
    "no errors shown": "import sys; sys.stderr = None; sys.exit('cannot go on')",
    "own class": "class Stop(SystemExit): pass\nraise Stop(5)",
    "error": "file = open('f', 'w'); file.write('kept')\ndef f(): raise ValueError('boom')\nf()",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\nraise ValueError('boom')",
    "exit in hook": "import sys\nsys.excepthook = lambda *a: sys.exit(4)\nraise ValueError('boom')",
    "broken hook": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('boom')",
    "interrupt": "import atexit\natexit.register(print, 'gone')\nf = open('f', 'w')\nf.write('kept')\n"
    "raise KeyboardInterrupt",
    "ignored interrupt": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nraise KeyboardInterrupt",
    "exit on SIGTERM in thread": "import os, signal, sys, threading, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    "def end():\n while threading.main_thread().is_alive(): time.sleep(0.01)\n"
    " os.kill(os.getpid(), 15); time.sleep(0.2)\nthreading.Thread(target=end).start()",
    "error in thread": "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "exit in thread": "import sys, threading; threading.Thread(target=sys.exit, args=(3,)).start()",
    "atexit ends it": "import atexit, os; atexit.register(os._exit, 6)",
    "full": "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('lost')",
    "full and failed": "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('lost')\nsys.exit(3)",
    "closed": "import sys; print('x'); sys.stdout.close()",
    "no stdout": "import sys; sys.stdout = None",
    "own stdout": "import sys\nclass Tee:\n def write(self, x): sys.__stdout__.write(x)\n"
    "sys.stdout = Tee()\nprint('x')",
    "C stdio": "import ctypes; ctypes.CDLL(None).puts(b'from C')",
    "fork": "import os\nif os.fork() == 0: print('child')\nelse: os.wait(); print('parent')",
    "daemon": "import threading, time\nn = 1\ndef f():\n while True: time.sleep(0.001); n + 1\n"
    "threading.Thread(target=f, daemon=True).start()\ntime.sleep(0.05)",
}


async def ran(bench: Bench, folder: Path, *, fork_server: bool) -> tuple[int | None, int | None, list[str], list[str]]:
    """Code, signal and output of t.py."""
    await bench.ready(make_spec((PYTHON, "t.py"), folder, fork_server=fork_server, hooks=LAST_WORD))
    (end,) = (await bench.run()).exits
    await bench.over()
    return end.code, end.signal, bench.output(), bench.output(stream="stderr")


async def forked_and_plain(
    tmp_path: Path, script: str
) -> tuple[list[Path], list[tuple[int | None, int | None, list[str], list[str]]]]:
    """The folders that it ran in, and how it ended there."""
    folders, ends = [], []
    for fork_server in (True, False):
        folder = tmp_path / f"{fork_server}"
        folder.mkdir()
        (folder / "keeper.py").write_text(KEEPER)
        (folder / "t.py").write_text(script)
        with piped(folder):
            async with open_bench(folder / "bench") as bench:
                ends.append(await ran(bench, folder, fork_server=fork_server))
        folders.append(folder)
    return folders, ends


async def test_the_interpreter_is_not_torn_down(tmp_path: Path) -> None:
    """It takes a second and more with torch, while a gang stands still."""
    (tmp_path / "t.py").write_text(TORN_DOWN)
    (tmp_path / "keeper.py").write_text("")
    async with open_bench(tmp_path) as bench:
        assert await ran(bench, tmp_path, fork_server=True) == (0, None, ["over"], [])


async def test_what_python_promises_a_script_is_done(tmp_path: Path) -> None:
    folders, ends = await forked_and_plain(tmp_path, PROMISED)
    files = []
    for folder in folders:
        files.append(written(folder))
        assert gzip.decompress((folder / "packed.gz").read_bytes()) == b"packed"
        assert zipfile.ZipFile(folder / "archive.zip").read("inside.txt") == b"inside"
    assert files[0] - files[1] <= {"uploaded: sent"}  # Python itself ends layers of a file in any order
    assert files[1] <= files[0]
    assert files[0] == {
        "t.py", "keeper.py", "packed.gz", "archive.zip", "by_module.txt: written by a module, at exit too",
        "finalized: yes", "uploaded: sent", "text.txt: text", "binary: bytes",
        "both: read and written", "log.txt: logged\n", "piped: through a pipe",
    }  # fmt: skip
    assert [(code, signal, sorted(out)) for code, signal, out, _ in ends] == [
        (0, None, sorted(ends[1][2])),
        (0, None, sorted(ends[1][2])),
    ]
    assert "a finalizer of the script's own" in ends[0][2]
    assert "child ends" in ends[0][2]
    assert "daemon ends" not in ends[0][2]
    assert errors(ends[0][3]) == errors(ends[1][3])


@contextlib.contextmanager
def piped(folder: Path) -> Iterator[None]:
    """A pipe, and what came through it as a file. This process reads: one that the script starts is killed with it."""
    os.mkfifo(folder / "pipe")
    end = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield
        (folder / "piped").write_bytes(os.read(end, 100))
    finally:
        os.close(end)


def written(folder: Path) -> set[str]:
    """The files with their content, but that of archives and scripts."""
    names = set()
    for path in folder.iterdir():
        if path.is_file():
            plain = path.suffix not in (".gz", ".zip", ".py")
            names.add(f"{path.name}: {path.read_text()}" if plain else path.name)
    return names


def errors(lines: list[str]) -> list[str]:
    """The last lines of tracebacks."""
    return [line for line in lines if "Error" in line]


@pytest.mark.parametrize("end", one_in(2, ENDS))
async def test_each_end_is_as_of_a_plain_start(tmp_path: Path, end: str) -> None:
    folders, ends = await forked_and_plain(tmp_path, ENDS[end])
    assert ends[0][:3] == ends[1][:3]
    assert errors(ends[0][3]) == errors(ends[1][3])
    assert len({(folder / "f").read_text() if (folder / "f").exists() else "" for folder in folders}) == 1
