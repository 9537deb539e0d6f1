"""A run's settings from TOML files, recipes and `a.b=VALUE` overrides."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fos_rl.config.errors import explain_error
from fos_rl.config.run import RunConfig, section_models, tag_of
from fos_rl.config.shipped import config_names, find_config
from fos_rl.config.stored import is_stored, translate_stored
from fos_rl.files.reading import read_text


def load_config(
    path: str | Path, overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """The run described by a TOML file, after a recipe and `a.b=VALUE` overrides.

    Args:
        path: a file, or the name of one in configs/.
        recipe: a partial config, as a file or the name of one in configs/recipes. Its keys win over
            the file's; its `model.precision` replaces the file's whole, and with it the
            `trainer.backward_override` that belonged to it.

    Raises:
        ValueError: naming each wrong field, its value, the rule and the remedy.
    """
    hint = f"give a file, or one of {', '.join(config_names())}"
    return resolve_config(_read_config(find_config(path), hint), overrides, recipe)


def other_arm(path: str | Path, overrides: Sequence[str], recipe: str | None) -> RunConfig:
    """`load_config` for a forward alone: how the file's run differentiates may not fit another
    precision, and is in no forward."""
    tree = _read_config(Path(path), "give the config of the arm")
    tree.get("trainer", {}).pop("backward_override", None)
    return resolve_config(tree, overrides, recipe)


def resolve_config(
    tree: dict[str, Any], overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """`load_config` of what a file would hold."""
    if recipe is not None:
        hint = f"--recipe {recipe!r}: give a file, or one of {', '.join(config_names('recipes'))}"
        tree = with_recipe(tree, read_toml(find_config(recipe, "recipes"), hint))
    # A new type or recipe first: it takes old keys away, and none that this command line sets.
    for override in sorted(overrides, key=lambda text: not _is_choice(text)):
        _apply_override(tree, override)
    return parse_config(tree)


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """The tables of a TOML file; ValueError with the hint when there are none."""
    try:
        tree = tomllib.loads(read_text(path, hint))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}; {hint}") from None
    if not tree:
        raise ValueError(f"{path} is empty; {hint}")
    return tree


def _read_config(file: Path, hint: str) -> dict[str, Any]:
    tree = read_toml(file, hint)
    return translate_stored(tree) if is_stored(file) else tree


OUTDATED_MODEL = "model.outdated"
"""Lies in a run folder while its model/ is of an earlier end, and the run has continued since."""


def run_config_file(run: Path) -> Path:
    """The resolved config of a run folder.

    Raises:
        ValueError: when there is none.
    """
    file = run / "config.toml"
    if not file.is_file():
        raise ValueError(
            f"{run} is not a run folder, it has no config.toml; give one, as in runs/NAME"
        )
    return file


def with_recipe(tree: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """A config tree under a recipe, which replaces its precision and the backward that went with
    it; see `load_config`."""
    merged = merge_config(tree, recipe)
    if "precision" not in _table(recipe, "model"):
        return merged
    precision = dict(_table(recipe["model"], "precision", "model."))
    trainer = dict(_table(merged, "trainer"))
    if "backward_override" not in _table(recipe, "trainer"):
        trainer.pop("backward_override", None)
    model = {**_table(merged, "model"), "precision": precision}
    return {**merged, "model": model, "trainer": trainer}


def _table(tree: dict[str, Any], key: str, section: str = "") -> dict[str, Any]:
    """A table of a config tree, empty where there is none."""
    value = tree.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{section}{key} = {value!r}: it is a table; write [{section}{key}]")
    return value


def merge_config(base: dict[str, Any], over: dict[str, Any], section: str = "") -> dict[str, Any]:
    """A config tree with `over` laid on it: tables key by key, of any other value `over`'s.

    A table of another `type` or `recipe` replaces the old one whole, since its keys are others:
    the data {"type": "gsm8k", "split": "test"} and {"type": "arithmetic"} make the latter.
    """
    merged = dict(base)
    for key, value in over.items():
        old, name = base.get(key), f"{section}.{key}".removeprefix(".")
        if isinstance(old, dict) and isinstance(value, dict) and not _other_type(old, value, name):
            value = merge_config(old, value, name)
        merged[key] = value
    return merged


def _other_type(old: dict[str, Any], new: dict[str, Any], section: str) -> bool:
    for model in section_models(section)[:1]:
        for key in {"type", "recipe"} & model.model_fields.keys():
            # What a table without the key is taken for.
            current = old.get(key, model.model_fields[key].default)
            if new.get(key, current) != current:
                return True
    return False


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """A validated RunConfig from nested dicts; see `load_config` for the errors.

    Paths of files that exist become absolute, so that what a run stores can be used from any
    folder.
    """
    try:
        return _with_absolute_paths(RunConfig.model_validate(tree))
    except ValidationError as error:
        lines = [explain_error(details, tree) for details in error.errors()]
        raise ValueError("\n".join(dict.fromkeys(lines))) from None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    changes: dict[str, Any] = {"model": model}
    if "path" in type(config.data).model_fields:
        path = _absolute(config.data.path)  # type: ignore[union-attr]
        changes["data"] = config.data.model_copy(update={"path": path})
    if config.eval is not None:
        # A file has a suffix; a folder may have a set's name by chance.
        sets = tuple(_absolute(name) if Path(name).suffix else name for name in config.eval.sets)
        changes["eval"] = config.eval.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)


def _absolute(path: str) -> str:
    """The path as it would be from any folder; a hub name or a set's name stays as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *parents, leaf = parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ValueError(f"--set {override!r}: write it as a.b=VALUE, as in trainer.lr=1e-6")
    if "\n" in text:
        raise ValueError(f"--set {override!r}: one setting has one line; give the others their own")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        # An unquoted word is a string: --set data.type=gsm8k.
        value = text
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ValueError(
                f"--set {override!r}: {parent} is a value, not a section; give it as {parent}=VALUE"
            )
    if leaf == "type" and tree.get("type") != value:
        # Another type has other fields; what the file said of the old one does not carry over.
        tree.clear()
    if leaf == "recipe":
        _keep_shared_settings(tree, ".".join(parents), value)
    tree[leaf] = value


def _is_choice(override: str) -> bool:
    """Whether it chooses which other keys its section has."""
    return override.partition("=")[0].rpartition(".")[2] in ("type", "recipe")


def _keep_shared_settings(tree: dict[str, Any], section: str, recipe: Any) -> None:
    """Take out what another recipe does not have, and the old recipe's defaults, which a resolved
    config spells out: the new recipe has its own."""
    models = {tag_of(model): model for model in section_models(section)}
    old, new = models.get(tree.get("recipe", "bf16")), models.get(recipe)
    if old is None or new is None or old is new:
        return
    defaults = old().model_dump(mode="json")
    for key in list(tree):
        if key not in new.model_fields or tree[key] == defaults.get(key):
            del tree[key]
