"""The main loop of a verifier process; see `verifiers.VerifierPool`."""

import json
import os
import resource
import signal
import sys
import time
from typing import TextIO

from fos_rl.rewards.verifiers import verify_safely

# A sum or product can be out of memory before it is out of time; 4 GiB are far beyond an honest
# answer.
_MEMORY_LIMIT_BYTES = 4 << 30


def main() -> None:
    """Answer requests until the pipe closes, then exit.

    A forked child answers, so that one over the time limit is replaced in milliseconds, without
    importing sympy again. A child that dies of anything else takes this process with it: what it
    was asked and whether it replied is then unknown, and the caller asks a fresh process.
    """
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
    while True:
        child = os.fork()
        if child == 0:
            _answer_requests(replies)
            os._exit(0)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if exit_code != -signal.SIGPROF:
            sys.exit(exit_code != 0)
        _reply(replies, ["timeouts", 0.0])


def _answer_requests(replies: TextIO) -> None:
    server = os.getppid()
    # A buffer would take in requests that die with this process.
    with os.fdopen(os.dup(0), "rb", buffering=0) as requests:
        while line := requests.readline():
            limit_s, rule, text, gold, finish_reason = json.loads(line)
            # SIGPROF ends the process, in C code too, when it has used up its processor time.
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            start = time.process_time()
            verdict = verify_safely(rule, text, gold, finish_reason)
            seconds = time.process_time() - start
            signal.setitimer(signal.ITIMER_PROF, 0)
            _reply(replies, [verdict, seconds])
            if os.getppid() != server:
                return


def _reply(replies: TextIO, reply: object) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
