"""The caller's end of a verifier process."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys

# A worker imports sympy, which takes seconds on a busy machine.
_START_LIMIT_S = 120.0
# The limit counts a worker's processor time, so that a busy machine changes no reward; a worker
# that is silent for this many times as long is taken for stuck all the same.
_WALL_FACTOR = 20


class VerifierProcess:
    """One verifier process: a line of JSON in, a line of JSON out.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self) -> None:
        # The caller's import path, as multiprocessing would hand it on; not its main module.
        start = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from fos_rl.rewards.verifier_worker import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It has a child, and both are killed together.
            process_group=0,
        )
        if self._read_line(_START_LIMIT_S) != "ready":
            self.kill()
            raise RuntimeError(
                f"a verifier worker did not start ({sys.executable}, exit code "
                f"{self._process.returncode}); its error is on stderr"
            )

    def ask(self, request: list[str], limit_s: float) -> tuple[float | str, float]:
        """The verdict on [rule, response, gold, finish reason] and its seconds of processor time.

        The verdict may be "errors", "timeouts", or "died" or "stuck", after which the process is
        of no more use.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps([limit_s, *request]).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return "died", 0.0
        reply = self._read_line(limit_s * _WALL_FACTOR)
        if isinstance(reply, str):
            return reply, limit_s
        verdict, seconds = reply
        return verdict, limit_s if verdict == "timeouts" else seconds

    def kill(self) -> None:
        """End the process and all that it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # A request it never read may still be in the buffer.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read_line(self, limit_s: float) -> list | str:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return "stuck"
        # Lines are short and written at once.
        line = stdout.readline()
        return json.loads(line) if line else "died"
