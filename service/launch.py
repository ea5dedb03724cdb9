"""``bentoml serve`` on a port that the version before it still listens on, so that a takeover leaves no gap.

    python service/launch.py serve BENTO --host 127.0.0.1 --port 3000

BentoML has no switch for SO_REUSEPORT. With it the kernel shares new connections out to all servers that listen. BentoML
also listens seconds before its workers can answer; here only the workers listen (uvicorn does so once its app has
started), so the new server gets its first connection when it is ready for it.
Run by path, never imported: the Bento brings its own ``service`` package.
"""

from __future__ import annotations

import socket
import sys

from bentoml_cli.cli import cli
from circus.sockets import CircusSocket  # type: ignore[import-untyped]


def share_ports() -> None:
    """Let this process bind ports that other servers of the same user share, and leave the listening to its workers."""
    bind_and_listen = CircusSocket.bind_and_listen

    def bind_only(self: CircusSocket) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.listen = lambda backlog: None
        bind_and_listen(self)

    CircusSocket.bind_and_listen = bind_only


if __name__ == "__main__":
    share_ports()
    sys.exit(cli())
