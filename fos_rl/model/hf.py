"""Hugging Face models in and out: find a model's folder, read it, write one back.

The pieces live in `hf_config` (config.json) and `weights` (names and safetensors); this module is
where the rest of the package takes them from.
"""

import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from fos_rl.files.reading import read_json_object
from fos_rl.files.whole import whole_folder
from fos_rl.model.decoder import Decoder
from fos_rl.model.hf_config import parse_architecture, read_architecture
from fos_rl.model.tiny import write_tiny_model
from fos_rl.model.weights import (
    hf_weight_shapes,
    load_hf_weights,
    named_hf_weights,
    read_weights,
    write_weights,
)
from fos_rl.spec import ModelSpec

__all__ = [
    "hf_weight_shapes",
    "load_hf_weights",
    "named_hf_weights",
    "parse_architecture",
    "read_architecture",
    "read_weights",
    "resolve_model",
    "write_model",
    "write_weights",
]

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")
_RANDOM = "random:"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]


def resolve_model(path: str, *, random_folder: Path | None = None, seed: int = 0) -> Path:
    """The local folder of `model.path`: a folder, a hub name, or `random:FAMILY`.

    A hub model is downloaded into Hugging Face's cache. A random one is written to
    `random_folder` with `seed`.

    Raises:
        ValueError: naming model.path, when there is no such folder or the hub cannot give it.
    """
    if path.startswith(_RANDOM):
        assert random_folder is not None, "a random model needs a folder to be written to"
        return write_tiny_model(path.removeprefix(_RANDOM), random_folder, seed)
    folder = Path(path).expanduser()
    if folder.is_file():
        raise ValueError(
            f"model.path = {path!r} is a file; give the folder that it is in, {folder.parent}"
        )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"model.path = {path!r}: the folder has no config.json; give a Hugging Face model "
                "folder"
            )
        return folder.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir():
        raise ValueError(
            f"model.path = {path!r}: no such folder; check the path, or give a hub name such as "
            "HuggingFaceTB/SmolLM2-135M"
        )
    return _download(path)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # Files of the top folder only: repositories keep other formats in folders.
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    # OSError is the base of the hub's HTTP and offline errors; connection errors of its client
    # come wrapped or as RuntimeError subclasses, depending on its version.
    except (OSError, HFValidationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ValueError(
                f"model.path = {name!r}: Hugging Face's cache cannot be written ({reason}); set "
                "HF_HOME to a folder that can, or give the folder of a model"
            ) from error
        raise ValueError(
            f"model.path = {name!r}: no such folder, and the Hugging Face hub did not provide it "
            f"({reason}); download it where the hub is reached and give the folder. A dry run "
            "can go without the model: fos-rl train CONFIG --dry-run --architecture CONFIG_JSON"
        ) from error


def write_model(
    weights: Decoder | Iterable[tuple[str, Tensor]],
    spec: ModelSpec,
    source_folder: str | Path,
    out_folder: str | Path,
) -> Path:
    """A Hugging Face folder with bf16 weights that transformers and stock vLLM load.

    config.json, tokenizer and all other small files come from `source_folder`, the model's own.
    The folder appears whole or not at all.

    Raises:
        ValueError: when `out_folder` is not empty, the source is another architecture, or a
            weight is missing, unknown or wrongly shaped.
    """
    source, out = Path(source_folder), Path(out_folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; choose another folder for the model")
    if read_architecture(source) != spec.architecture:
        raise ValueError(f"{source}/config.json describes another architecture than the weights'")
    pairs = named_hf_weights(weights) if isinstance(weights, Decoder) else weights
    with whole_folder(out) as partial:
        write_weights(_checked(pairs, spec), partial)
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(path, partial / path.name)
        _write_config(source, partial)
    return out


def _checked(
    weights: Iterable[tuple[str, Tensor]], spec: ModelSpec
) -> Iterable[tuple[str, Tensor]]:
    missing = hf_weight_shapes(spec)
    for name, tensor in weights:
        shape = missing.pop(name, None)
        if shape is None:
            raise ValueError(f"{name}: the model has no such weight, or it came twice")
        if shape != tensor.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {tuple(shape)}")
        yield name, tensor
    if missing:
        raise ValueError(f"weights are missing: {', '.join(list(missing)[:20])}")


def _write_config(source: Path, out: Path) -> None:
    config = read_json_object(source / "config.json", "restore the model's own")
    # transformers 4 and vLLM read torch_dtype, transformers 5 writes dtype.
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
