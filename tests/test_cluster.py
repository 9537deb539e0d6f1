"""What the cluster says when an actor does not answer, fails or dies. Real Ray, no models."""

import os
import socket
import time
from collections.abc import Iterator

import pytest
import ray

from fos_rl.config import parse_config
from fos_rl.runtime.cluster import Cluster, _init_ray, find_cluster

CONFIG = parse_config(
    {"model": {"path": "x"}, "data": {"type": "vowels"}, "cluster": {"call_timeout_s": 2.0}}
)


@pytest.fixture(scope="module")
def actor() -> Iterator:
    """A function that starts an actor with a slow, a failing and a deadly method."""

    class Actor:
        def slow(self) -> None:
            time.sleep(60)

        def wrong(self) -> None:
            raise ValueError("data.path = 3: no")

        def broken(self) -> None:
            raise KeyError("layer")

        def die(self) -> None:
            os._exit(1)

        def stream(self):
            yield 1
            time.sleep(60)

    _init_ray(CONFIG)
    yield lambda: ray.remote(Actor).options(num_cpus=0).remote()
    ray.shutdown()


@pytest.fixture
def cluster() -> Cluster:
    """Only the waiting of a cluster: no actors are started."""
    waiting = object.__new__(Cluster)
    waiting.config = CONFIG
    return waiting


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("slow", RuntimeError, "trainer did not answer slow within 2 s; its logs are in .*logs"),
        ("wrong", ValueError, "data.path = 3: no"),
        ("broken", RuntimeError, "trainer failed in broken.*layer"),
        ("die", RuntimeError, "trainer died during die; its logs are in"),
    ],
)
def test_errors_name_the_actor_and_the_call(actor, cluster, method, error, words) -> None:
    started = actor()
    # The start is not what the limit is about.
    ray.get(started.__ray_ready__.remote())
    with pytest.raises(error, match=words):
        cluster._get("trainer", method, getattr(started, method).remote())


def test_a_stream_that_stops_is_named(actor, cluster) -> None:
    started = actor()
    ray.get(started.__ray_ready__.remote())
    stream = started.stream.options(num_returns="streaming").remote()
    buckets = cluster._buckets(stream)
    assert ray.get(next(buckets)) == 1
    with pytest.raises(RuntimeError, match="trainer did not answer export_weights within 2 s"):
        next(buckets)


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
