"""A handle per actor: the verbs of its protocol as blocking calls under a time limit."""

import collections.abc
import importlib
import os
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ray
import ray.exceptions

from fos_rl.trainer.dead_model import DeadModel


class Actor:
    """Any object in a Ray actor, asked by the names of its methods."""

    def start(
        self,
        environment: Mapping[str, str],
        module: str,
        build: Callable[..., Any],
        *arguments: Any,
    ) -> tuple[float, float]:
        """Build the object; the seconds of importing its module, and of building it.

        Not a constructor, whose errors Ray hands on as text alone. The environment is set here: as
        Ray's runtime_env it would need a new process, in place of one that Ray has started ahead.
        """
        # Before torch is imported: it and OpenMP read their variables once.
        os.environ.update(environment)
        begin = time.perf_counter()
        importlib.import_module(module)
        imported = time.perf_counter()
        self.target = build(*arguments)
        return imported - begin, time.perf_counter() - imported

    def call(self, verb: str, *arguments: object, **named: object) -> Any:
        """What the object's method returns."""
        return getattr(self.target, verb)(*arguments, **named)

    def stream(self, verb: str, *arguments: object) -> Iterator[Any]:
        """What the object's method yields, one after another."""
        yield from getattr(self.target, verb)(*arguments)


class Handle:
    """The verbs of `protocol`, answered by a remote `Actor`.

    A verb that returns an iterator yields references to its results, which another handle's verbs
    take as they are: the driver never holds a tensor.

    Raises (each verb):
        ValueError, DeadModel: what the verb itself raises.
        RuntimeError: naming the actor and the call that failed or did not answer in time.
    """

    def __init__(self, protocol: type, name: str, actor: Any, limit_s: float) -> None:
        self.actor = actor
        self._protocol = protocol
        self.name = name
        self._limit_s = limit_s

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method = None if verb.startswith("_") else getattr(self._protocol, verb, None)
        if method is None:
            raise AttributeError(f"{type(self).__name__} of {self.name} has no verb {verb!r}")
        returned = typing.get_origin(typing.get_type_hints(method)["return"])
        return partial(self._stream if returned is collections.abc.Iterator else self._call, verb)

    def wait(self, call: str, reference: Any, limit_s: float | None = None) -> Any:
        """The result of a call that was begun on the actor itself."""
        limit_s = limit_s or self._limit_s
        try:
            return ray.get(reference, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise self._no_answer(call, limit_s) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, ValueError | DeadModel):
                raise cause from error
            raise RuntimeError(f"{self.name} failed in {call}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(
                f"{self.name} died during {call}; its logs are in {_log_folder()}: {error}"
            ) from error

    def _call(self, verb: str, *arguments: object, **named: object) -> Any:
        return self.wait(verb, self.actor.call.remote(verb, *arguments, **named))

    def _stream(self, verb: str, *arguments: object) -> Iterator[Any]:
        # Two results exist at most: the one that travels, and the next.
        stream = self.actor.stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=2
        )
        references = stream.remote(verb, *arguments)
        while True:
            ready, _ = ray.wait([references], timeout=self._limit_s)
            if not ready:
                raise self._no_answer(verb, self._limit_s)
            try:
                yield next(references)
            except StopIteration:
                return

    def _no_answer(self, call: str, limit_s: float) -> RuntimeError:
        return RuntimeError(
            f"{self.name} did not answer {call} within {limit_s:.0f} s; its logs are in "
            f"{_log_folder()}; raise cluster.call_timeout_s (start: cluster.start_timeout_s) if it "
            "was only slow"
        )


def _log_folder() -> str:
    """Where Ray keeps the actors' output on this machine."""
    context = ray.get_runtime_context()
    return f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
