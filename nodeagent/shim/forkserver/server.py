"""The fork server: an interpreter that has imported what the job preloads and forks the workers, so that a restart
costs no import. It forks some ahead: a pre-forked worker warms up (``warming.py``) and waits for what to run.

Runs by file path in the JOB's Python (3.8 or later), which need not have nodeagent: standard library only, plus the
modules that it is to preload. Must stay single-threaded and without a CUDA context, or it refuses to fork. It reaps
only when asked to, so that the shim's pidfds always name the process they were opened for.

A forked worker behaves as if executed, but for: ``/proc/self/cmdline`` (the fork server's), ``sys.flags.unbuffered``,
one hash seed for all forks, BLAS libraries that fixed one thread at import (torch's thread count is restored), its end
(``ending.py``), and of a pre-forked one its start time and the CPU time of its warm-up.
"""

# ruff: noqa: PTH109, PTH115, PTH118, PTH120, PTH123, PTH208 (os.path: pathlib would be one import more in each worker)
from __future__ import annotations

import array
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
import types
import warnings
from typing import Any

TORCH_PARTS = ("torch.distributed", "torch.optim", "torch._dynamo", "torch.utils.data")
REHEARSAL_BOUND = 10
"""Seconds for a step of a small network; the kernel ends one that hangs."""
NOTES, NOTE_CHARS = 20, 500
"""What goes to the shim of what went wrong: so many notes, each so long."""
RANK_AT_IMPORT = (("lightning_utilities.core.rank_zero", "RANK"), ("torchmetrics.utilities.prints", "LOCAL_RANK"))
"""Modules whose ``rank_zero_only`` is given its rank from this variable as they are imported: the fork server has
none, so it would be 0 in every worker."""
NOT_OURS = (
    "nodeagent: a fork server that is no child of its shim ends at once; a worker that starts itself anew has its own "
    "command line in sys.orig_argv, not in /proc/self/cmdline"
)
_libc = ctypes.CDLL(None, use_errno=True)
_compiled: dict[tuple[str, bytes], types.CodeType] = {}
"""The script, by its path and text: compiled while this worker was pre-forked."""
_end = types.ModuleType("__nodeagent_end__")
"""``ending.py``, loaded before the first fork: at a script's end its file may have gone with an upgrade."""


def main() -> None:
    """``server.py CONFIG``: JSON with ``fd`` (SOCK_SEQPACKET to the shim), ``preload``, ``guessed``, ``path0`` and the
    ``program`` of the job's command: a script, or "-m"."""
    config = json.loads(sys.argv[1])
    if os.getppid() != config["shim"]:
        sys.exit(NOT_OURS)
    die_with_parent(config["shim"])
    load("ending.py", _end)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = config["path0"]
    notes = config.get("notes", [])
    for name in config["guessed"]:
        notes += preloaded(name, guessed=True)
        why = why_unusable()
        if why:
            start_again(config, name, why)
    link = socket.socket(fileno=config["fd"])
    send(link, warm_up(config["preload"], notes))
    work = serve(link, config["shim"], config["program"])  # returns in a forked worker only
    del link, config
    run(work)


def die_with_parent(parent: int) -> None:
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def preloaded(name: str, guessed: bool = False) -> list[str]:
    """Import it; what went wrong. A guess that is not there is none: the script may try it, or its worker tells."""
    for part in (name, *(TORCH_PARTS if name == "torch" else ())):
        try:
            importlib.import_module(part)
        except Exception as error:  # noqa: BLE001 (whatever a module raises is reported, not fatal)
            if guessed and isinstance(error, ImportError):
                return []
            return [cut(f"preload {part}: {type(error).__name__}: {error}")]
    return []


def start_again(config: dict[str, Any], name: str, why: str) -> None:
    """Be this program anew, without a guess with which forking is unsafe: what is imported cannot be taken back."""
    left = [other for other in config["guessed"] if other != name]
    notes = [*config.get("notes", []), cut(f"{name} is not preloaded, though the script imports it: {why}")]
    changed = json.dumps({**config, "guessed": left, "notes": notes})
    os.execv(sys.executable, [sys.executable, *sys.argv[:1], changed])


def warm_up(preload: list[str], notes: list[str]) -> dict[str, Any]:
    """Import; say whether forking is safe and what went wrong, ``notes`` included."""
    for name in preload:
        notes += preloaded(name)
    if "torch" in sys.modules and rehearsal_is_safe():
        helper("rehearse")
    gc.collect()
    _end.freeze()
    problem = helper("huge_pages")
    if problem:
        notes.append(f"large pages: {problem}")
    return {"event": "warm", "torch": has_torch(), "unusable": why_unusable(), "notes": notes[:NOTES]}


def cut(text: str) -> str:
    """Short enough for a message that a socket takes whole, and text in every encoding."""
    return text[:NOTE_CHARS].encode("utf-8", "backslashreplace").decode()


def rehearsal_is_safe() -> bool:
    """Tried in a fork: what fails there, or leaves a thread or a CUDA context, would spoil the fork server."""
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(me)
        signal.alarm(REHEARSAL_BOUND)
        os._exit(1 if helper("rehearse") or why_unusable() else 0)
    return os.waitpid(pid, 0)[1] == 0


def has_torch() -> bool:
    return "torch.distributed" in sys.modules and hasattr(sys.modules["torch.distributed"], "TCPStore")


def why_unusable() -> str:
    """Why a fork would be unsafe; empty if it is safe."""
    with open("/proc/self/status") as file:
        threads = next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    if threads != 1:
        return f"the preloaded modules started {threads - 1} thread(s), so forking is unsafe"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preloaded modules made a CUDA context, so forking is unsafe"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + fd)
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return f"the preloaded modules opened {target}, so forking is unsafe"
    return ""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    link.send(json.dumps(message).encode())


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One command with its descriptors; ends the process when the shim has closed the socket."""
    data, ancillary, _, _ = link.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 4))
    if not data:
        os._exit(0)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return json.loads(data), list(fds)


def serve(link: socket.socket, shim: int, program: str) -> dict[str, Any]:
    """Obey the shim. In the fork server it never returns; in a forked worker it returns what to run."""
    me = os.getpid()
    while True:
        command, fds = receive(link)
        if command["op"] == "reap":
            send(link, {"event": "reaped", "pid": command["pid"], "status": reap(command["pid"])})
            continue
        problem = why_unusable()
        if problem:
            send(link, {"event": "failed", "id": command["id"], "error": problem})
        else:
            try:
                pid = os.fork()
            except OSError as error:
                send(link, {"event": "failed", "id": command["id"], "error": f"fork: {error.strerror}"})
            else:
                if pid == 0:
                    os.setsid()
                    die_with_parent(me)
                    _libc.prctl(0x59616D61, shim, 0, 0, 0)  # PR_SET_PTRACER: where Yama is on, it may read our stacks
                    link.close()
                    if command["op"] == "store":
                        host_store(command, fds)
                    if command["op"] == "prefork":
                        command, fds = prefork(socket.socket(fileno=fds[0]), command["deep"], program)
                    become_worker(command, fds)
                    return command
                send(link, {"event": "forked", "id": command["id"], "pid": pid})
        for fd in fds:
            os.close(fd)


def reap(pid: int) -> int:
    """Its wait status; -1 if it is not (or no longer) a child."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return -1


def prefork(link: socket.socket, deep: bool, program: str) -> tuple[dict[str, Any], list[int]]:
    """Warm up, tell the shim how that went, and wait for work. What the warm-up has spoilt ends here."""
    note = helper("warm_up") if deep else ""
    compile_ahead(program)
    gc.collect()
    _end.freeze()
    spoilt = why_unusable()
    send(link, {"event": "preforked", "note": note, "spoilt": spoilt, "private": private_memory()})
    if spoilt:
        os._exit(1)
    work = receive(link)
    link.close()
    return work


def compile_ahead(program: str) -> None:
    """The script, if it compiles without a word; else the worker does it, and says the word."""
    if program == "-m":
        return
    try:
        path = os.path.join(os.getcwd(), program)  # the folder may have been replaced since the fork server came up
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            source = file.read()
            _compiled[path, source] = compile(source, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, Warning):  # ValueError: null bytes
        pass


def helper(name: str) -> str:
    """Call a function of ``warming.py``. Returns what went wrong."""
    warm = types.ModuleType("__nodeagent_warm__")
    try:
        load("warming.py", warm)
        getattr(warm, name)()
    except Exception as error:  # noqa: BLE001 (whatever a framework raises is reported, not fatal)
        return f"{type(error).__name__}: {error}"[:NOTE_CHARS]
    return ""


def load(name: str, module: types.ModuleType) -> None:
    """A file beside this one, which no worker shall find among its modules."""
    from importlib.machinery import SourceFileLoader

    SourceFileLoader(module.__name__, os.path.join(os.path.dirname(__file__), name)).exec_module(module)


def private_memory() -> int:
    """Bytes that are this process's alone; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) * 1024
    except OSError:
        return 0


def host_store(command: dict[str, Any], fds: list[int]) -> None:
    """Serve one rendezvous store on a listening socket until killed; tell the outcome on the second descriptor."""
    listening, answer = fds
    try:
        try:
            store = sys.modules["torch.distributed"].TCPStore(
                command["host"], command["port"], None, True, wait_for_workers=False, master_listen_fd=listening
            )
        except Exception as error:  # noqa: BLE001 (whatever torch raises is reported, and the job goes on without)
            os.write(answer, f"{type(error).__name__}: {error}".encode()[:2000])
            return
        os.write(answer, b"ok")
        os.close(answer)
        while store is not None:
            signal.pause()
    finally:
        os._exit(1)


def become_worker(command: dict[str, Any], fds: list[int]) -> None:
    """Give this fork the worker's output, environment, folder, rank, threads and seeds."""
    null = os.open("/dev/null", os.O_RDONLY)
    for fd, target in ((null, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(fd, target)
    for fd in (null, *fds):
        os.close(fd)
    os.environ.clear()
    os.environ.update(command["env"])
    try:
        os.chdir(command["cwd"])
    except OSError as error:  # as ``shim/processes.enter`` says it
        os.write(2, f"nodeagent: cannot enter working_dir {command['cwd']}: {error.strerror}\n".encode())
        os._exit(126)
    if os.environ.get("NODEAGENT_NUMA_BINDING"):
        binding = types.ModuleType("__nodeagent_binding__")
        load("binding.py", binding)
        binding.bind(os.environ)
    for number, value in command["limits"]:
        resource.setrlimit(number, (value, value))
    for name, variable in RANK_AT_IMPORT:
        only: Any = getattr(sys.modules.get(name), "rank_zero_only", None)
        if hasattr(only, "rank") and os.environ.get(variable, "").isdecimal():
            only.rank = int(os.environ[variable])
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # random, as a fresh torch starts
        threads = thread_count()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def thread_count() -> int:
    """OMP_NUM_THREADS as the worker has it, else the physical cores it may use, as a fresh torch would take."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def run(work: dict[str, Any]) -> None:
    """Run ``python [-u] script args`` or ``python [-u] -m module args`` in this process, and end it."""
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = work["argv"]
    arguments = list(work["argv"][1:])
    at_once = arguments[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments[0] == "-u":
        arguments.pop(0)
    if at_once:
        sys.stdout = unbuffered(1)
        sys.stderr = unbuffered(2)
    sys.modules["__nodeagent_fork_server__"] = sys.modules["__main__"]  # this module's globals must stay alive
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module
    code, interrupted = outcome(arguments, module)
    _end.end(module, code, interrupted=interrupted)


def outcome(arguments: list[str], module: types.ModuleType) -> tuple[int, bool]:
    """Run it; its exit code, and whether a KeyboardInterrupt ended it."""
    try:
        if arguments[0] == "-m":
            run_module(arguments[1:])
        else:
            run_script(arguments, module)
    except SystemExit as error:
        return _end.code_of(error), False
    except BaseException as error:  # noqa: BLE001 (what the interpreter itself does with an uncaught exception)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        return show(error), isinstance(error, KeyboardInterrupt)
    return 0, False


def show(error: BaseException) -> int:
    """By the script's hook, if it has one; what fails in that is shown too. The exit code."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        code: int = _end.code_of(stop)
        return code
    except BaseException as failed:  # noqa: BLE001 (any hook may be set)
        failed.__context__ = None
        for title, each in (("Error in sys.excepthook:", failed), ("\nOriginal exception was:", error)):
            print(title, file=sys.stderr)
            sys.__excepthook__(type(each), each, each.__traceback__)
    return 1


def run_module(arguments: list[str]) -> None:
    import runpy

    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    sys.argv[:] = ["-m", *arguments[1:]]
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


def run_script(arguments: list[str], module: types.ModuleType) -> None:
    path = os.path.join(os.getcwd(), arguments[0])
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.argv[:] = arguments
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)
    from importlib.machinery import SourceFileLoader

    module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    code = _compiled.get((path, source)) or compile(source, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def unbuffered(fd: int) -> io.TextIOWrapper:
    """Standard output as ``python -u`` makes it."""
    old = sys.stdout if fd == 1 else sys.stderr
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, write_through=True)


if __name__ == "__main__":
    main()
