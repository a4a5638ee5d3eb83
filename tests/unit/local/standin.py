"""A stand-in for the agent: joins (its socket answers /readyz), and starts a shim that outlives it, with a worker.

Run as ``python standin.py [--broken] --config FILE``. The shim and the worker each have their own session, as the
real ones do; their pids are in ``pids`` in the node's run folder, one start of an agent to a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import yaml


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path.partition("?")[0] in ("/readyz", "/v1/nodes") else 404)
        self.end_headers()
        data = Path(sys.argv[sys.argv.index("--config") + 1]).parents[1]
        nodes = [{"name": path.parent.name, "state": "ready"} for path in data.glob("n*/agent.yaml")]
        self.wfile.write(json.dumps({"items": nodes, "next": ""}).encode())

    def address_string(self) -> str:
        return "local"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def start_shim(run: Path) -> None:
    """A shell in its own session that starts a worker in another, and both stay."""
    script = 'setsid sleep 600 & echo "shim $$ worker $!" > "$1/shim.tmp"; mv "$1/shim.tmp" "$1/shim"; wait'
    subprocess.Popen(["sh", "-c", script, "sh", str(run)], start_new_session=True, stdin=subprocess.DEVNULL)


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    if "--broken" in sys.argv:
        sys.exit("the reactor is on fire")
    if (hopeless := Path(config["dirs"]["state"]) / "hopeless").exists():
        hopeless.unlink()
        sys.exit(78)
    run = Path(config["dirs"]["run"])
    with (run / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if not (run / "shim").exists():
        start_shim(run)
    (run / "api.sock").unlink(missing_ok=True)
    with UnixStreamServer(str(run / "api.sock"), Ready) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
