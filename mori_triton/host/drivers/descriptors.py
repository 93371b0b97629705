"""Hand an open file descriptor to other processes of this user on this machine.

Over a socket without a name in the file system, so a process that is killed leaves nothing behind. Reading another
process's descriptors (pidfd_getfd, ptrace) is forbidden in many containers; this is not.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid

from mori_triton.errors import DriverError

_TIMEOUT_S = 30.0


class DescriptorServer:
    """Gives `descriptor` to whoever asks at `name`, from a thread of its own, until `close`, which closes it too."""

    def __init__(self, descriptor: int) -> None:
        self.name = f"mori_triton-{uuid.uuid4().hex}"
        self._descriptor = descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        # all peers may ask at once
        self._socket.listen(4096)
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # closed
                return
            with connection:
                try:
                    if _peer_user(connection) in (os.geteuid(), 0):
                        socket.send_fds(connection, [b"\1"], [self._descriptor])
                except OSError:
                    # who asked has gone; the others may still come
                    continue

    def close(self) -> None:
        """Stop, and close the descriptor. Idempotent."""
        if self._descriptor < 0:
            return
        # ends the accept; close alone would not
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        os.close(self._descriptor)
        self._descriptor = -1


def receive_descriptor(name: str) -> int:
    """A descriptor of what the `DescriptorServer` called `name` serves. The caller closes it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect("\0" + name)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            why = "its process has ended, or is in another container or of another user"
            raise DriverError(f"asking {name} for memory: {error}; {why}") from error
    if not descriptors:
        raise DriverError(f"asking {name} for memory: refused; its process belongs to another user")
    # programs that this process starts are not to hold a peer's memory
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
