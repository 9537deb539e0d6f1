"""The contract: every field that can change a log-prob, by name; precisions and messages."""

import typing
from typing import Any

import pytest
from pydantic import TypeAdapter

from fos_rl.config import parse_config
from fos_rl.model.hf import parse_architecture
from fos_rl.model.tiny import tiny_config
from fos_rl.spec import (
    Bf16,
    Consistency,
    FourOverSix,
    ModelSpec,
    Mxfp8,
    Nvfp4,
    Precision,
    contract_difference,
)

RECIPES = [Bf16, Mxfp8, Nvfp4, FourOverSix]
ARCHITECTURE = parse_architecture(tiny_config("qwen3_moe"))
# Another value of each field; a field that is missing here fails the test that walks over them.
OTHER_VALUE: dict[str, Any] = {
    "compute_dtype": "float32",
    "gemm": "native",
    "include": ("*.mlp.*",),
    "exclude": ("*.k_proj",),
    "first_layers_bf16": 1,
    "last_layers_bf16": 2,
    "scale_mode": "floor",
    "row_scaled_activation": False,
    "weight_block": "1x16",
    "err_mode": "mae",
    "e4m3_scale_bound": 448,
}
FIELDS = [
    pytest.param(recipe, field, id=f"{recipe.__name__}.{field}")
    for recipe in RECIPES
    for field in recipe.model_fields
    if field != "recipe"
]


def spec(precision: Any, consistency: Consistency = "fast") -> ModelSpec:
    return ModelSpec(architecture=ARCHITECTURE, precision=precision, consistency=consistency)


@pytest.mark.parametrize(("recipe", "field"), FIELDS)
def test_every_precision_field_is_in_the_contract(recipe: type[Any], field: str) -> None:
    ours, theirs = spec(recipe()), spec(recipe(**{field: OTHER_VALUE[field]}))
    assert ours.contract_hash() != theirs.contract_hash()
    [difference] = contract_difference(ours.contract(), theirs.contract())
    name, values = difference.split(": ", 1)
    assert name == f"model.precision.{field}".removeprefix("model.")
    left, right = (f"{ours.contract()[name]!r}", f"{theirs.contract()[name]!r}")
    assert values == f"{left} != {right}"


def test_all_pairs_of_recipes_differ() -> None:
    hashes = {spec(recipe()).contract_hash() for recipe in RECIPES}
    assert len(hashes) == len(RECIPES)
    difference = contract_difference(spec(Nvfp4()).contract(), spec(FourOverSix()).contract())
    # The fields that only one side has are named, too.
    assert difference == [
        "precision.e4m3_scale_bound: None != 256",
        "precision.err_mode: None != 'mse'",
        "precision.recipe: 'nvfp4' != 'nvfp4_four_over_six'",
    ]


def test_consistency_is_in_the_contract() -> None:
    ours, theirs = spec(Bf16()), spec(Bf16(), "exact")
    assert contract_difference(ours.contract(), theirs.contract()) == [
        "consistency: 'fast' != 'exact'"
    ]


def test_exact_refuses_what_depends_on_the_batch() -> None:
    for wrong, word in (
        (Mxfp8(gemm="native"), "gemm"),
        (FourOverSix(row_scaled_activation=False), "row_scaled_activation"),
    ):
        assert spec(wrong).consistency == "fast"
        with pytest.raises(ValueError, match=f"model.precision.{word}.*'exact'"):
            spec(wrong, "exact")


def test_every_architecture_field_is_in_the_contract() -> None:
    contract = spec(Bf16()).contract()
    for field in type(ARCHITECTURE).model_fields:
        assert f"architecture.{field}" in contract
    wider = ARCHITECTURE.model_copy(update={"rope_theta": 5e5, "dense_layers": (1,)})
    theirs = ModelSpec(architecture=wider)
    assert contract_difference(contract, theirs.contract()) == [
        "architecture.dense_layers: [] != [1]",
        "architecture.rope_theta: 10000.0 != 500000.0",
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_hash_survives_the_way_through_json(recipe: type[Any]) -> None:
    """As the spec travels to vLLM; order of fields and tuples against lists do not matter."""
    sent = spec(recipe())
    arrived = ModelSpec.model_validate(sent.model_dump(mode="json"))
    assert arrived == sent
    assert contract_difference(sent.contract(), arrived.contract()) == []
    assert arrived.contract_hash() == sent.contract_hash()
    assert len(sent.contract_hash()) == 12


# Recipes as a user writes them.


def precision(**values: Any) -> Any:
    tree = {"model": {"path": "random:qwen3", "precision": values}, "data": {"type": "vowels"}}
    return parse_config(tree).model.precision


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, Bf16(), id="empty section"),
        pytest.param({"compute_dtype": "float32"}, Bf16(compute_dtype="float32"), id="no recipe"),
        pytest.param({"recipe": "mxfp8"}, Mxfp8(), id="mxfp8"),
        pytest.param({"recipe": "nvfp4"}, Nvfp4(), id="nvfp4"),
        pytest.param(
            {"recipe": "nvfp4_four_over_six", "err_mode": "mae"},
            FourOverSix(err_mode="mae"),
            id="four over six",
        ),
    ],
)
def test_recipes_are_chosen_by_name(values: dict[str, Any], expected: Any) -> None:
    parsed = precision(**values)
    assert parsed == expected
    assert type(parsed) is type(expected)


def test_no_precision_section_is_bf16() -> None:
    config = parse_config({"model": {"path": "random:qwen3"}, "data": {"type": "vowels"}})
    assert config.model.precision == Bf16()
    assert spec(Bf16()) == ModelSpec(architecture=ARCHITECTURE)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param(
            {"recipe": "fp4"},
            ["model.precision.recipe", "'fp4' is unknown", "'mxfp8'", "'nvfp4_four_over_six'"],
            id="unknown recipe",
        ),
        pytest.param(
            {"recipe": "nvfp4", "err_mode": "mae"},
            ["model.precision.err_mode = 'mae'", "unknown key", "weight_block"],
            id="field of another recipe",
        ),
        pytest.param(
            {"weight_block": "1x16"},
            ["model.precision.weight_block = '1x16'", "unknown key"],
            id="quantized field without a recipe",
        ),
        pytest.param(
            {"recipe": "nvfp4_four_over_six", "e4m3_scale_bound": 300},
            ["model.precision.e4m3_scale_bound = 300", "256 or 448"],
            id="bound",
        ),
        pytest.param(
            {"recipe": "nvfp4_four_over_six", "err_mode": "MSE"},
            ['model.precision.err_mode = "MSE"', "'mse' or 'mae'"],
            id="case",
        ),
        pytest.param(
            {"recipe": "mxfp8", "include": "*.mlp.*"},
            ['model.precision.include = "*.mlp.*"', "tuple"],
            id="one pattern without brackets",
        ),
        pytest.param(
            {"recipe": "mxfp8", "first_layers_bf16": -1},
            ["model.precision.first_layers_bf16 = -1", "greater than or equal to 0"],
            id="negative window",
        ),
    ],
)
def test_wrong_recipes_are_explained(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        precision(**values)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_every_recipe_of_the_union_is_tested_here() -> None:
    members = TypeAdapter(Precision).json_schema()["discriminator"]["mapping"]
    assert set(members) == {recipe().recipe for recipe in RECIPES}
    assert "recipe" in typing.get_type_hints(FourOverSix)
