"""`config.json` of a Hugging Face folder, read into an Architecture by its family's parser."""

from pathlib import Path
from typing import Any

from fos_rl.files.reading import read_json_object
from fos_rl.model.families import FAMILIES
from fos_rl.model.families.config_json import ConfigReader, refuse_unsupported
from fos_rl.spec import Architecture


def read_architecture(folder: str | Path) -> Architecture:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ValueError: for a folder without config.json, and for a model that would not compute what
            the decoder computes; it names the field, its value, the rule and the remedy.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path: {folder} has no config.json; give a Hugging Face folder")
    return parse_architecture(read_json_object(path, "download it again"), str(path))


def parse_architecture(config: dict[str, Any], source: str = "config.json") -> Architecture:
    """An Architecture from the keys of a config.json; `source` names it in errors."""
    reader = ConfigReader(config, source)
    family = reader.required("model_type")
    # Asked of a list: model_type may be any JSON value, hashable or not.
    if family not in list(FAMILIES):
        reader.refuse("model_type", f"use one of {', '.join(FAMILIES)}")
    refuse_unsupported(reader)
    return FAMILIES[family].parse(reader)
