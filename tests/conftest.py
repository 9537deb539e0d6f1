"""What every test needs before the first heavy import."""

import os
import signal

# A suite that a script starts in the background ignores it, and so would all programs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# vLLM and torch share one process in the numerics tests, as they do in an actor.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
