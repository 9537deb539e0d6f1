"""Every wrong setting is answered with the field, its value, the rule and a remedy."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from fos_rl.config import RunConfig, VowelsData, load_config, parse_config
from fos_rl.config.explain import explain
from fos_rl.spec import Bf16, FourOverSix, Mxfp8, Nvfp4, Precision

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
GOOD = {"model": {"path": "random:llama"}, "data": {"type": "arithmetic"}}


def _merged(section: str, **values: object) -> dict:
    return {**GOOD, section: {**GOOD.get(section, {}), **values}}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    assert isinstance(load_config(path), RunConfig)


def test_every_toml_is_a_config_or_a_recipe() -> None:
    assert {*CONFIGS, *RECIPES} == set((ROOT / "configs").rglob("*.toml"))


@pytest.mark.parametrize("base", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads_over_every_config(path: Path, base: Path) -> None:
    config, plain = load_config(base, recipe=str(path)), load_config(base)
    wanted = tomllib.loads(path.read_text())
    assert config.model.precision.model_dump(mode="json", exclude_defaults=True).items() <= (
        wanted["model"]["precision"].items()
    )
    assert config.trainer.backward_override == wanted.get("trainer", {}).get("backward_override")
    # All else is the base's.
    model = plain.model.model_copy(update={"precision": config.model.precision})
    trainer = plain.trainer.model_copy(
        update={"backward_override": config.trainer.backward_override}
    )
    assert config == plain.model_copy(update={"model": model, "trainer": trainer})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        pytest.param(
            _merged("model", pth="x"), ["model.pth", "'x'", "did you mean path"], id="typo"
        ),
        pytest.param(_merged("trainer", lr="fast"), ["trainer.lr", '"fast"', "number"], id="type"),
        pytest.param(
            _merged("rollout", top_p=0.9), ["rollout.top_p", "0.9", "set 1.0"], id="top_p"
        ),
        pytest.param(_merged("rollout", top_k=50), ["rollout.top_k", "50", "set 0"], id="top_k"),
        pytest.param(
            _merged("rollout", group_size=1),
            ["rollout.group_size", "1", "use 2 or more"],
            id="group",
        ),
        pytest.param(
            _merged("data", dificulty=2), ["data.dificulty", "did you mean difficulty"], id="data"
        ),
        pytest.param(
            _merged("algorithm", minibatches=100), ["minibatches = 100", "64"], id="minibatches"
        ),
        pytest.param(
            _merged("algorithm", correction={"type": "truncated"}),
            ["algorithm.correction.type = 'truncated'", "twice", "ratio = 'decoupled'"],
            id="correction",
        ),
        pytest.param(
            _merged("algorithm", correction={"type": "geometric", "low": 1.2}),
            ["algorithm.correction.low = 1.2", "less than 1"],
            id="limits",
        ),
        pytest.param(
            _merged("algorithm", type="cispo", dual_clip=3),
            ["algorithm.dual_clip = 3", "cispo limits the ratio itself", "leave it out"],
            id="dual clip",
        ),
        pytest.param({"data": GOOD["data"]}, ["model", "required"], id="missing section"),
        pytest.param(_merged("data", type="chess"), ["data", "chess", "dapo_math"], id="data type"),
    ],
)
def test_wrong_settings_are_explained(tree: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_config(tree)
    for word in words:
        assert word in str(error.value)


def test_all_mistakes_are_reported_at_once() -> None:
    tree = {**_merged("rollout", top_p=0.5, group_size=1), "trainer": {"lr": -1}}
    with pytest.raises(ValueError, match=r".") as error:
        parse_config(tree)
    assert len(str(error.value).splitlines()) == 3


def test_overrides_are_merged_before_validation(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(GOOD))
    config = load_config(
        path, ["trainer.lr=3e-6", "data.difficulty=2", "model.path=random:qwen3", "steps=7"]
    )
    assert config.trainer.lr == 3e-6
    assert config.data.difficulty == 2
    assert config.model.path == "random:qwen3"
    assert config.steps == 7


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run.toml and the recipe `mine`, as the current directory."""
    (tmp_path / "configs" / "recipes").mkdir(parents=True)
    precision = {"recipe": "nvfp4_four_over_six", "err_mode": "mae"}
    run = {
        **_merged("model", precision=precision),
        "trainer": {"lr": 3e-6, "backward_override": "dequantized"},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    mine = {"model": {"precision": {"recipe": "mxfp8"}}, "trainer": {"warmup_steps": 5}}
    (tmp_path / "configs" / "recipes" / "mine.toml").write_text(tomli_w.dumps(mine))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_replaces_the_precision_and_its_backward(recipes: Path) -> None:
    for name in ("mine", "configs/recipes/mine.toml", str(recipes / "configs/recipes/mine.toml")):
        config = load_config("run.toml", recipe=name)
        assert config.model.precision == Mxfp8()
        assert config.trainer.backward_override is None
        assert (config.trainer.lr, config.trainer.warmup_steps) == (3e-6, 5)
        assert config.model.path == "random:llama"


def test_overrides_come_after_the_recipe(recipes: Path) -> None:
    overrides = ["model.precision.scale_mode=floor", "trainer.backward_override=high_precision"]
    config = load_config("run.toml", overrides, "mine")
    assert config.model.precision == Mxfp8(scale_mode="floor")
    assert config.trainer.backward_override == "high_precision"


def test_a_recipe_without_precision_keeps_the_files(recipes: Path) -> None:
    (recipes / "data.toml").write_text('data = { type = "vowels" }')
    config = load_config("run.toml", recipe="data.toml")
    assert config.model.precision == FourOverSix(err_mode="mae")
    assert config.trainer.backward_override == "dequantized"
    assert config.data == VowelsData()


def test_unknown_recipes_list_the_known(recipes: Path) -> None:
    with pytest.raises(ValueError, match=r"nvfp8 does not exist; .*one of bf16, mine, mxfp8"):
        load_config("run.toml", recipe="nvfp8")
    (recipes / "bad.toml").write_text("model = ")
    with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML"):
        load_config("run.toml", recipe="bad.toml")


def test_another_data_type_replaces_the_section(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(_merged("data", difficulty=3)))
    config = load_config(path, ["data.type=gsm8k", "data.path=x.jsonl"])
    assert config.data.path == "x.jsonl"


@pytest.mark.parametrize("old", [Bf16(), Mxfp8(), Nvfp4(), FourOverSix()], ids=lambda p: p.recipe)
@pytest.mark.parametrize("new", [Bf16(), Mxfp8(), Nvfp4(), FourOverSix()], ids=lambda p: p.recipe)
def test_another_recipe_by_set_takes_the_place_of_a_resolved_one(
    tmp_path: Path, old: Precision, new: Precision
) -> None:
    """A resolved config spells out the defaults of its recipe, which are not the other's."""
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(_merged("model", precision=old.model_dump(mode="json"))))
    config = load_config(path, [f"model.precision.recipe={new.recipe}"])
    assert config.model.precision == new


def test_another_recipe_by_set_keeps_what_was_chosen_and_fits(tmp_path: Path) -> None:
    chosen = FourOverSix(compute_dtype="float32", include=("*.mlp.*",), e4m3_scale_bound=448)
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(_merged("model", precision=chosen.model_dump(mode="json"))))
    # The order on the command line does not matter.
    overrides = ["model.precision.scale_mode=floor", "model.precision.recipe=mxfp8"]
    expected = Mxfp8(compute_dtype="float32", include=("*.mlp.*",), scale_mode="floor")
    assert load_config(path, overrides).model.precision == expected
    with pytest.raises(ValueError, match=r"model\.precision\.recipe: 'fp4' is unknown"):
        load_config(path, ["model.precision.recipe=fp4"])


@pytest.mark.parametrize("override", ["lr", "=3", "model.path.deep=1"])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(GOOD))
    with pytest.raises(ValueError, match="--set"):
        load_config(path, [override])


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("steps = ")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("variant", "clip_high", "normalize", "aggregation"),
    [
        ("grpo", 0.2, True, "sequence_mean"),
        ("dapo", 0.28, True, "token_mean"),
        ("dr_grpo", 0.2, False, "constant"),
        ("gspo", 4e-4, True, "sequence_mean"),
        ("cispo", 4.0, True, "token_mean"),
    ],
)
def test_algorithm_variants(
    variant: str, clip_high: float, normalize: bool, aggregation: str
) -> None:
    algorithm = parse_config(_merged("algorithm", type=variant)).algorithm
    assert algorithm.clip_high == clip_high
    assert algorithm.normalize_advantages is normalize
    assert algorithm.aggregation == aggregation
    assert (
        parse_config(_merged("algorithm", type=variant, clip_high=0.5)).algorithm.clip_high == 0.5
    )


def test_resolved_config_loads_again() -> None:
    config = parse_config(_merged("rollout", temperature=0.6))
    dumped = config.model_dump(mode="json", exclude_none=True)
    assert parse_config(tomllib.loads(tomli_w.dumps(dumped))) == config


def test_config_imports_no_torch() -> None:
    code = "import sys, fos_rl.config.explain, fos_rl.spec; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_explain_lists_every_field() -> None:
    text = explain()
    for section, model in [("rollout", "temperature"), ("trainer", "lr"), ("cluster", "address")]:
        assert f"[{section}]" in text
        assert f"  {model} = " in text
    assert "> 0" in explain("trainer")
    with pytest.raises(ValueError, match="no section"):
        explain("trainr")
