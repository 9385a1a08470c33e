"""The responses that clients may come back to, in a store bounded by number and by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_mlx.engine.errors import RequestNotFoundError

#: What is kept of all clients together; the least lately used goes first.
MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


class History:
    """Hold the items of one turn as JSON, behind those of the turns before it.

    Turns of one conversation share what went before, and so do branches of it.
    """

    __slots__ = ("_num_users", "items", "parent")

    def __init__(self, parent: History | None, items: bytes) -> None:
        self.parent = parent
        self.items = items
        #: Stored responses and later turns that hold on to it.
        self._num_users = 0

    def hold(self) -> int:
        """Count one more user; return how many bytes are held now that were not before."""
        num_bytes = 0
        node: History | None = self
        while node is not None:
            node._num_users += 1
            if node._num_users > 1:
                break
            num_bytes += len(node.items)
            node = node.parent
        return num_bytes

    def release(self) -> int:
        """Count one user less; return how many bytes nobody holds any more."""
        num_bytes = 0
        node: History | None = self
        while node is not None:
            node._num_users -= 1
            if node._num_users:
                break
            num_bytes += len(node.items)
            node = node.parent
        return num_bytes

    def all_items(self) -> list[dict[str, Any]]:
        """Return the items of the conversation, from its first turn to this one."""
        turns: list[bytes] = []
        node: History | None = self
        while node is not None:
            turns.append(node.items)
            node = node.parent
        return [item for turn in reversed(turns) for item in msgspec.json.decode(turn)]


@dataclass(frozen=True)
class StoredResponse:
    """Hold one response as JSON, its input items likewise, and its conversation."""

    response: bytes
    input_items: bytes
    history: History
    #: Of all its items, by which they can be referred to.
    item_ids: tuple[str, ...]

    @property
    def own_bytes(self) -> int:
        """Count the bytes that it holds alone."""
        return len(self.response) + len(self.input_items)


class ResponseStore:
    """Own the stored responses, each for the client that asked for it only. Event loop only."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        #: Which response an item was last part of.
        self._items: dict[tuple[str, str], str] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Count the bytes that are held."""
        return self._num_bytes

    def put(
        self,
        client: str,
        response: dict[str, Any],
        input_items: Sequence[dict[str, Any]],
        parent: History | None,
    ) -> None:
        """Keep a response and what it answered; others make room.

        One that is over the bound alone is not kept.
        """
        items = [*input_items, *response["output"]]
        stored = StoredResponse(
            msgspec.json.encode(response),
            msgspec.json.encode(input_items),
            History(parent, msgspec.json.encode(items)),
            tuple(item["id"] for item in items),
        )
        key = (client, response["id"])
        self._num_bytes += stored.own_bytes + stored.history.hold()
        self._stored[key] = stored
        self._items |= {(client, item_id): response["id"] for item_id in stored.item_ids}
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def get(self, client: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Return a client's response; raise `RequestNotFoundError` for one that is not there."""
        key = (client, response_id)
        stored = self._stored.get(key)
        if stored is None:
            raise RequestNotFoundError(
                f"there is no response {response_id[:100]!r}: it is unknown here, was not stored, "
                "or is no longer",
                param=param,
            )
        self._stored.move_to_end(key)
        return stored

    def delete(self, client: str, response_id: str) -> None:
        """Forget a client's response; later turns of its conversation go on."""
        self.get(client, response_id)
        self._remove((client, response_id))

    def item(self, client: str, item_id: str) -> dict[str, Any]:
        """Return an item of a client's response; raise `RequestNotFoundError`."""
        response_id = self._items.get((client, item_id))
        if response_id is not None:
            items = msgspec.json.decode(self.get(client, response_id).history.items)
            found: dict[str, Any] = next(item for item in items if item["id"] == item_id)
            return found
        raise RequestNotFoundError(
            f"there is no item {item_id[:100]!r}: it is unknown here, or is no longer stored",
            param="input",
        )

    def _remove(self, key: tuple[str, str]) -> None:
        client, response_id = key
        stored = self._stored.pop(key)
        self._num_bytes -= stored.own_bytes + stored.history.release()
        for item_id in stored.item_ids:
            if self._items.get((client, item_id)) == response_id:
                del self._items[client, item_id]
