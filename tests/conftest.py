"""What every test needs before the first heavy import."""

import importlib.util
import os
import signal

import pytest

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

# It replaces distutils, and refuses to once another package has imported that: vLLM and gguf import
# both, in an order that depends on which tests a process runs.
import setuptools  # noqa: E402, F401

# Packages with annotated arrays; but kernels, whose device code is traced from its source, which a
# wrapper would hide.
_CHECKED = ("algorithms", "diagnose", "exact", "generator", "model", "quant", "trainer")


# A machine that tests kernels need not have it.
_CAN_CHECK = importlib.util.find_spec("beartype") is not None


def pytest_configure() -> None:
    """Calls in the tests' own processes check their annotations, shapes and dtypes included."""
    if not _CAN_CHECK:
        return
    from jaxtyping import install_import_hook

    import tests.support.type_checks

    install_import_hook(
        [f"fos_rl.{package}" for package in _CHECKED],
        f"{tests.support.type_checks.__name__}.checked",
    )


def pytest_report_header() -> str:
    return "annotations: checked" if _CAN_CHECK else "annotations: not checked, beartype is missing"


def pytest_runtest_setup(item: pytest.Item) -> None:
    from jaxtyping import config

    # In a slow test checks would double the time of its many small calls, which others make, too.
    unchecked = any(item.get_closest_marker(name) for name in ("wrong_types", "slow", "long"))
    config.update("jaxtyping_disable", unchecked)
