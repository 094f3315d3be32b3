# SPDX-License-Identifier: Apache-2.0
"""The socket that a server listens on."""

import socket

from sporeloom.core.errors import ConfigError

MAX_PORT, BACKLOG = 65535, 1024


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens there.

    Raises:
        ConfigError: nobody can listen there, or somebody else does.
    """
    if port > MAX_PORT:
        raise ConfigError(f"--port {port}: ports end at {MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    except (OSError, UnicodeError) as error:  # not a host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {reason}; take another --port") from None
    return made
