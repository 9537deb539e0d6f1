"""What the cluster says when an actor does not answer, fails or dies. Real Ray, no models."""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import ray

from fos_rl.config import parse_config
from fos_rl.runtime.cluster import _init_ray, find_cluster
from fos_rl.runtime.handles import Actor, Handle

CONFIG = parse_config(
    {"model": {"path": "x"}, "data": {"type": "vowels"}, "cluster": {"call_timeout_s": 2.0}}
)


class Verbs(Protocol):
    """What the target of these tests answers."""

    def slow(self) -> None: ...

    def wrong(self) -> None: ...

    def broken(self) -> None: ...

    def die(self) -> None: ...

    def add(self, left: int, right: int) -> int: ...

    def stream(self) -> Iterator[int]: ...


class Target:
    def slow(self) -> None:
        time.sleep(60)

    def wrong(self) -> None:
        raise ValueError("data.path = 3: no")

    def broken(self) -> None:
        raise KeyError("layer")

    def die(self) -> None:
        os._exit(1)

    def add(self, left: int, right: int) -> int:
        return left + right

    def stream(self) -> Iterator[int]:
        yield 1
        time.sleep(60)


@pytest.fixture(scope="module")
def start() -> Iterator:
    """A function that gives the handle of a new actor, under a limit of 2 s for each call."""
    _init_ray(CONFIG)

    def started() -> Any:
        # Two calls at a time, as the cluster's.
        actor = ray.remote(Actor).options(num_cpus=0, max_concurrency=2).remote()
        # The start is not what the limit is about.
        ray.get(actor.start.remote({}, "math", Target))
        return Handle(Verbs, "trainer", actor, CONFIG.cluster.call_timeout_s)

    yield started
    ray.shutdown()


@pytest.mark.parametrize(
    ("verb", "error", "words"),
    [
        ("slow", RuntimeError, "trainer did not answer slow within 2 s; its logs are in .*logs"),
        ("wrong", ValueError, "data.path = 3: no"),
        ("broken", RuntimeError, "trainer failed in broken.*layer"),
        ("die", RuntimeError, "trainer died during die; its logs are in"),
    ],
)
def test_errors_name_the_actor_and_the_call(start, verb, error, words) -> None:
    with pytest.raises(error, match=words):
        getattr(start(), verb)()


def test_a_handle_has_the_verbs_of_its_protocol_and_takes_references(start) -> None:
    handle = start()
    assert handle.add(1, right=2) == 3
    reference = next(handle.stream())
    assert handle.add(reference, 10) == 11
    with pytest.raises(AttributeError, match="trainer has no verb 'close'"):
        handle.close()


def test_an_actor_answers_while_it_works(start) -> None:
    handle = start()
    working = handle.actor.call.remote("slow")
    assert handle.add(2, 3) == 5
    assert not ray.wait([working], timeout=0)[0]


def test_a_stream_that_stops_is_named(start) -> None:
    results = start().stream()
    assert ray.get(next(results)) == 1
    with pytest.raises(RuntimeError, match="trainer did not answer stream within 2 s"):
        next(results)


@pytest.mark.parametrize("address", ["foo", "", "1.2.3.4", "h:", ":6379", "ray://h:1", "h:70000"])
def test_an_address_of_another_form_is_shown_how(address: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.address = .*give HOST:PORT") as error:
        find_cluster(address)
    assert repr(address) in str(error.value)


def test_a_cluster_that_does_not_answer_is_named() -> None:
    """A port where nobody listens, and one where somebody does who is no Ray cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"'127\.0\.0\.1:{port}': no Ray cluster answers"):
            find_cluster(f"127.0.0.1:{port}", limit_s=1.0)
    with pytest.raises(ValueError, match=rf"'127\.0\.0\.1:{port}': no connection .*refused"):
        find_cluster(f"127.0.0.1:{port}")
