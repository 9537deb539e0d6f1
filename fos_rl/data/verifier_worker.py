"""The main loop of a verifier process; see `verifiers.VerifierPool`."""

import json
import os
import resource
import signal
import sys

from fos_rl.data.verifiers import verify_safely

# A power tower is out of memory before it is out of time; 4 GiB are far beyond an honest answer.
_MEMORY_LIMIT_BYTES = 4 << 30


def main() -> None:
    """Answer requests until the pipe closes, then exit."""
    # The terminal's Ctrl-C is for the caller, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    # What a library prints must not look like a verdict.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Imports sympy before the first time limit runs.
    verify_safely("math", r"\boxed{x+1}", "1+x", "stop")
    _reply(replies, "ready")
    for line in sys.stdin:
        limit_s, rule, text, gold, finish_reason = json.loads(line)
        # SIGPROF ends the process, in C code too, when it has used up its processor time.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = verify_safely(rule, text, gold, finish_reason)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, verdict)


def _reply(replies, verdict: float | str) -> None:
    replies.write(json.dumps(verdict) + "\n")
    replies.flush()
