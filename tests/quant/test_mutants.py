"""The planted mistakes of tests/mutants.py are mistakes: another text, which can be imported."""

import ast
import sys
from types import ModuleType

import pytest

from tests.mutants import MUTANTS, QUANT, Mutant, changed_text


@pytest.mark.parametrize("mutation", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_another_module(mutation: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ast.parse(changed_text(mutation))
    assert ast.dump(changed) != ast.dump(ast.parse((QUANT / f"{mutation.module}.py").read_bytes()))
    if mutation.name == "17 flush to zero":
        # Its mistake is what an import does, to all of this process.
        return
    # A name of its own; dataclasses look for their module.
    module = ModuleType("fos_rl.quant.mutant")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(changed, mutation.module, "exec"), module.__dict__)
