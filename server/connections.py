"""Connections that end when their client has left, not when Hypercorn's idle timer does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Updated

if TYPE_CHECKING:
    from hypercorn.events import Event


class Connection(TCPServer):  # type: ignore[misc]  # its package is not followed
    """Close the socket once the client has closed its side.

    Hypercorn 0.18 ends a connection with a task group that its idle timer is part of, so a socket
    whose client has long gone stays open until the timer ends. With a timer of 75 s, clients that
    open a connection for each request hold thousands of descriptors.
    """

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Send to the client, or take note of the protocol's state; start no timer for the dead."""
        if isinstance(event, Updated) and event.idle and self.reader.at_eof():
            return
        await super().protocol_send(event)


def install() -> None:
    """Let Hypercorn make its connections of `Connection`; it has no setting for that."""
    hypercorn.asyncio.run.TCPServer = Connection
