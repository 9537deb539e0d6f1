"""Head sizes that vLLM's CPU attention has kernels for, read without importing vLLM.

Importing it takes longer than all other checks of a run together (6 s on two cores) and changes the
environment that the actors would inherit.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path("v1", "attention", "backends", "cpu_attn.py")


def cpu_head_sizes() -> list[int] | None:
    """What `CPUAttentionBackend.get_supported_head_sizes` of the installed vLLM returns; None where
    its source does not say it as a list of numbers.

    Raises:
        ValueError: when vLLM is not installed.
    """
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "the package vllm, which is the generator, is not installed; pip install 'fos-rl[cpu]' "
            "or, on a machine with GPUs, 'fos-rl[cuda]'"
        )
    source = Path(found.submodule_search_locations[0]) / _SOURCE
    if not source.is_file():
        return None
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return _returned_numbers(node)
    return None


def _returned_numbers(function: ast.FunctionDef) -> list[int] | None:
    """The numbers of a function that only returns a list of them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            values = [v.value for v in node.value.elts if isinstance(v, ast.Constant)]
            numbers = [value for value in values if isinstance(value, int)]
            return numbers if len(numbers) == len(node.value.elts) else None
    return None
