"""The house: where a verb, the weight sync and a folder's tests stand, read from the source."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fos_rl"
# What tests/ has beside the folders of fos_rl.
TEST_FOLDERS = {"experiments", "golden", "support"}
# Protocol, with the protocols it extends, and the class that implements it.
SIDES = {
    "Trainer": (("Trainer", "WeightSource"), "GrpoTrainer"),
    "Generator": (("Generator", "Sampler"), "VllmGenerator"),
}
# Classes with methods of these names: a folder is another source of weights, a vLLM rank has its
# own end of a sync, both sides return a spec's contract, a journal keeps layer errors, and the
# console has a line per step.
OTHERS = {
    "FolderWeights",
    "WeightSyncWorker",
    "ModelSpec",
    "Journal",
    "RunFolder",
    "RunConsole",
}


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(ROOT)), node


def _methods(node: ast.ClassDef) -> list[str]:
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]


@pytest.mark.parametrize("side", SIDES)
def test_a_verb_is_written_in_its_protocol_and_in_its_class(side: str) -> None:
    """So that adding one touches two places: handles hand on any verb of a protocol."""
    protocols, implementation = SIDES[side]
    methods = {node.name: _methods(node) for _, node in _classes()}
    places = defaultdict(set)
    for name, verbs in methods.items():
        for verb in verbs:
            places[verb].add(name)
    verbs = [verb for protocol in protocols for verb in methods[protocol]]
    assert len(verbs) >= 8
    [other] = SIDES.keys() - {side}
    other_protocols, other_implementation = SIDES[other]
    for verb in verbs:
        found = places[verb] - OTHERS - {*other_protocols, other_implementation}
        declared = [protocol for protocol in protocols if verb in methods[protocol]]
        assert found == {*declared, implementation}, verb
        assert len(declared) == 1, verb


def test_one_function_knows_the_order_of_a_weight_sync() -> None:
    verbs = {"begin_weight_sync", "load_weight_bucket", "finish_weight_sync"}
    callers = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in verbs:
                    callers[node.attr].add((str(path.relative_to(ROOT)), function.name))
    # A class that implements a verb may call it on its own ranks, by name.
    assert callers == {verb: {("fos_rl/model/sync.py", "sync")} for verb in verbs}


def test_the_folders_of_tests_are_those_of_the_package() -> None:
    def folders(root: Path) -> set[str]:
        return {path.name for path in root.iterdir() if any(path.rglob("*.py"))}

    tests = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name[0] not in "._"}
    assert tests - TEST_FOLDERS <= folders(PACKAGE)


@pytest.mark.parametrize("folder", ["fos_rl", "tests"])
def test_file_names_say_which_of_several(folder: str) -> None:
    """A search for a file name finds one: no two modules share theirs."""
    places = defaultdict(list)
    for path in (ROOT / folder).rglob("*.py"):
        if path.name not in ("__init__.py", "conftest.py"):
            places[path.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
