"""The store of responses: bounded by number and by bytes, whatever is put in and taken out."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from vllm_mlx.engine.errors import RequestNotFoundError
from vllm_mlx.server.responses_api.store import History, ResponseStore


def response(number: int, text: str = "") -> dict[str, Any]:
    """Return a response of one item."""
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def held_bytes(store: ResponseStore) -> int:
    """Count anew what the store holds: of each history what it is reached by."""
    histories: dict[int, History] = {}
    for stored in store._stored.values():
        node: History | None = stored.history
        while node is not None:
            histories[id(node)] = node
            node = node.parent
    own = sum(stored.own_bytes for stored in store._stored.values())
    return own + sum(len(node.items) for node in histories.values())


def test_the_least_lately_used_goes_first() -> None:
    """Reading is using; what is gone is gone with its items."""
    store = ResponseStore(max_responses=2)
    for number in range(2):
        store.put("me", response(number), [], None)
    store.get("me", "resp_0")
    store.put("me", response(2), [], None)
    assert len(store) == 2
    with pytest.raises(RequestNotFoundError):
        store.get("me", "resp_1")
    with pytest.raises(RequestNotFoundError):
        store.item("me", "msg_1")
    assert store.item("me", "msg_0") == {"id": "msg_0", "text": ""}


def test_a_long_conversation_costs_its_length_once() -> None:
    """Turns share what went before, and it stays while a later one needs it."""
    store = ResponseStore(max_responses=2)
    parent: History | None = None
    for number in range(200):
        store.put("me", response(number), [{"id": f"in_{number}"}], parent)
        parent = store.get("me", f"resp_{number}").history
    assert parent is not None
    assert [item["id"] for item in parent.all_items()][:3] == ["in_0", "msg_0", "in_1"]
    assert len(parent.all_items()) == 400
    assert store.num_bytes == held_bytes(store) < 200 * 100
    for number in (198, 199):
        store.delete("me", f"resp_{number}")
    assert store.num_bytes == 0


def test_what_is_over_the_bound_alone_is_not_kept() -> None:
    """And takes the others with it only as far as they are older."""
    store = ResponseStore(max_bytes=1000)
    store.put("me", response(0, "x" * 2000), [], None)
    assert (len(store), store.num_bytes) == (0, 0)


def test_clients_with_the_same_id_do_not_meet() -> None:
    """Ids of items are the clients' own choice."""
    store = ResponseStore()
    store.put("me", response(0, "mine"), [], None)
    store.put("you", response(0, "yours"), [], None)
    assert store.item("me", "msg_0")["text"] == "mine"
    store.delete("you", "resp_0")
    assert msgspec.json.decode(store.get("me", "resp_0").response)["id"] == "resp_0"


@pytest.mark.parametrize("seed", range(5))
def test_the_bounds_hold_whatever_happens(seed: int) -> None:
    """Bytes are counted as they are, over branches, deletions, evictions and late children."""
    rng = random.Random(seed)
    store = ResponseStore(max_responses=8, max_bytes=3000)
    known: list[History] = []
    for number in range(300):
        if rng.random() < 0.2 and len(store):
            client, response_id = rng.choice(list(store._stored))
            store.delete(client, response_id)
        else:
            client = rng.choice("ab")
            parent = rng.choice([None, *known[-6:]])
            store.put(client, response(number, "x" * rng.randrange(200)), [], parent)
            if (client, f"resp_{number}") in store._stored:
                known.append(store.get(client, f"resp_{number}").history)
        assert len(store) <= 8
        assert store.num_bytes == held_bytes(store) <= 3000
        assert set(store._items.values()) <= {key[1] for key in store._stored}
    for client, response_id in list(store._stored):
        store.delete(client, response_id)
    assert (store.num_bytes, store._items) == (0, {})
