"""The safetensors of a model folder, and whether they are those of an architecture: headers alone.

A header is JSON after eight bytes that give its length; the tensors' bytes follow and fill the file
(https://huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fos_rl.files.reading import read_json_object

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("BF16", "F16", "F32", "F64")
_AGAIN = "download the model again"
# Formats that this package does not read; the pickled ones can run code when they are read.
_OTHERS = {
    "pickled": ("*.bin", "*.pt", "*.pth", "*.ckpt"),
    "GGUF": ("*.gguf",),
    "other frameworks'": ("*.h5", "*.msgpack", "*.npz"),
}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, else model.safetensors as for
    transformers, else all.

    Raises:
        ValueError: when there are none, or not all that the index names.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / WHOLE).exists() or (folder / WHOLE).is_symlink():
            return [folder / WHOLE]
        return sorted(folder.glob("*.safetensors")) or _refuse_without_weights(folder)
    weight_map = read_json_object(index, _AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"model.path: {index} has no weight_map, tensor names to files; {_AGAIN}")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"model.path: {folder} lacks {_some(missing)}, named by {INDEX}; {_AGAIN}")
    return [folder / name for name in names]


def open_safetensors(path: Path) -> Any:
    """`safe_open` for CPU tensors of torch; reads the header.

    Raises:
        ValueError: naming the file, what is wrong with it and the remedy.
    """
    try:
        with path.open("rb"):
            pass
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise ValueError(
            f"model.path: {path} cannot be read ({error.strerror or error}); check the path and "
            "its permissions"
        ) from None
    except SafetensorError as error:
        wrong = _damage(path) or f"is damaged ({error}); {_AGAIN}"
        raise ValueError(f"model.path: {path} {wrong}") from None


def check_weights(folder: Path, shapes: Mapping[str, Sequence[int]], *, tied_head: bool) -> str:
    """What a folder's weights are, in a few words, after comparing them with an architecture's.

    Args:
        shapes: of every weight, by Hugging Face name.
        tied_head: accept a head beside the embedding that serves as one; whether the two are equal
            is seen when they are loaded.

    Raises:
        ValueError: naming every file that cannot be read, and every tensor that is missing,
            unknown, in two files, or of another shape or a type that is not floating point.
    """
    wanted = dict(shapes)
    if tied_head:
        wanted["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    files = weight_files(folder)
    found: dict[str, str] = {}
    problems: list[str] = []
    for path in files:
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                if name in found:
                    problems.append(f"{name}: in {found[name]} and in {path.name}")
                found[name] = path.name
                tensor = file.get_slice(name)
                problems += _misfits(name, tensor.get_shape(), tensor.get_dtype(), wanted)
    problems += [f"{name}: missing" for name in shapes if name not in found]
    if problems:
        raise ValueError(
            f"model.path: the weights in {folder} are not those of its config.json; take both from "
            "one unquantized model:\n" + summary(problems)
        )
    where = f"{len(files)} files" if len(files) > 1 else files[0].name
    size = sum(path.stat().st_size for path in files) / 2**30
    return f"{len(found):,} tensors, {size:.2f} GiB, in {where}"


def summary(problems: list[str], limit: int = 20) -> str:
    """The first problems, one per line, and how many more there are."""
    rest = len(problems) - limit
    more = [f"... and {rest} more"] if rest > 0 else []
    return "\n".join(problems[:limit] + more)


def _misfits(
    name: str, shape: Sequence[int], dtype: str, wanted: Mapping[str, Sequence[int]]
) -> list[str]:
    if name not in wanted:
        return [f"{name}: the architecture has no such weight"]
    if tuple(shape) != tuple(wanted[name]):
        need = tuple(wanted[name])
        return [f"{name}: shape {tuple(shape)}, the architecture needs {need}"]
    if dtype not in _FLOATS:
        return [f"{name}: type {dtype}, must be one of {', '.join(_FLOATS)}"]
    return []


def _damage(path: Path) -> str | None:
    """What is wrong with a file that is not a whole safetensors file, where a look at it tells."""
    size = path.stat().st_size
    if size == 0:
        return f"is empty; {_AGAIN}"
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            return "is a Git LFS pointer, not the weights; run git lfs pull in its folder"
        if 8 + length > size:
            return (
                f"is cut off, or no safetensors file: it has {size:,} bytes, and its header alone "
                f"would have {length:,}; {_AGAIN}"
            )
        header = file.read(length)
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        whole = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors)
    # Any bytes can stand there; the library's own words must do then.
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None
    return f"has {size:,} bytes, and its header tells of {whole:,}; {_AGAIN}"


def _refuse_without_weights(folder: Path) -> list[Path]:
    remedy = "download the model's .safetensors files"
    for kind, patterns in _OTHERS.items():
        other = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        if other:
            remedy = (
                f"there are {kind} weights alone ({_some(other)}); {remedy}, or convert these with "
                "save_pretrained of transformers"
            )
            break
    raise ValueError(f"model.path: {folder} has no .safetensors files; {remedy}")


def _some(names: Sequence[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
