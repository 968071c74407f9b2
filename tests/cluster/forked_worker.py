"""What the raylets of the tests run to start a worker: asks the server of `forks` to fork one.

Stands in for Ray's `setup_worker.py`, and imports little, as it is run for each worker. One that its runtime
environment starts in a way of its own (another interpreter, another folder) starts as Ray would start it.
"""

import json
import os
import socket
import sys

SOCKET = "WORLDLINE_FORKS"
PLAIN = "WORLDLINE_PLAIN_WORKER"
CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
REPLY_S = 60.0


def main(arguments: list[str]) -> None:
    context = {}
    for word in arguments:
        if word.startswith(CONTEXT):
            context = json.loads(word.removeprefix(CONTEXT))
    own_way = context.get("command_prefix") or context.get("py_executable", sys.executable) != sys.executable
    if own_way or f"{LANGUAGE}PYTHON" not in arguments:
        os.execv(sys.executable, [sys.executable, os.environ[PLAIN], *arguments])
    added = {name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}
    order = {
        "arguments": [word for word in arguments if not word.startswith((CONTEXT, LANGUAGE))],
        "environment": {**os.environ, **added},
        "folder": os.getcwd(),
        "raylet": os.getppid(),
    }
    body = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(REPLY_S)
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [len(body).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(body)
        if not server.recv(1):
            sys.exit("no worker was forked")


if __name__ == "__main__":
    main(sys.argv[1:])
