"""A model's tokenizer, loaded from its folder and compared with the embedding."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fos_rl.files.reading import read_json_object

_AGAIN = "download the model's own"
# What a tokenizer is made of, by the library that reads it.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a model folder.

    Raises:
        ValueError: naming the file that is missing or broken, and the remedy.
    """
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise ValueError(
            f"model.path: {folder} has no tokenizer (tokenizer.json, or tokenizer.model); {_AGAIN}"
        )
    for name in _JSON_FILES:
        if (folder / name).exists():
            read_json_object(folder / name, _AGAIN)
    try:
        return AutoTokenizer.from_pretrained(folder)
    # The tokenizers library raises Exception itself, transformers whatever a wrong value leads to.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"model.path: the tokenizer of {folder} cannot be loaded ({reason}); its files do not "
            f"fit together or are damaged: {_AGAIN}"
        ) from error


def check_tokenizer(tokenizer: Any, folder: Path, vocab_size: int) -> str:
    """What the tokenizer is, in a few words, after comparing it with an embedding.

    Raises:
        ValueError: when it is empty, has a token that the embedding lacks, or when no token ends a
            response.
    """
    ids = tokenizer.get_vocab()
    if not ids:
        raise ValueError(f"model.path: the tokenizer of {folder} has no tokens; {_AGAIN}")
    last = max(ids, key=ids.__getitem__)
    if ids[last] >= vocab_size:
        raise ValueError(
            f"model.path: the tokenizer of {folder} has token {last!r} with id {ids[last]}, but "
            f"the embedding has ids up to {vocab_size - 1} (vocab_size = {vocab_size} in "
            f"config.json); {_AGAIN}, or resize the embedding"
        )
    ends = end_tokens(tokenizer, folder, vocab_size)
    if not ends:
        raise ValueError(
            f"model.path: no token ends a response of {folder}, so that all would be cut off at "
            "max_new_tokens; set eos_token in tokenizer_config.json, or eos_token_id in "
            "generation_config.json"
        )
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
    template = "chat template" if tokenizer.chat_template else "no chat template: plain text"
    return f"{len(ids):,} tokens of {vocab_size:,} in the embedding, {template}, ends at {names}"


def end_tokens(tokenizer: Any, folder: Path, vocab_size: int) -> list[int]:
    """The tokens at which vLLM ends a response: the tokenizer's, and generation_config.json's or,
    without that file, config.json's.

    Raises:
        ValueError: for an eos_token_id that is not a token.
    """
    files = (folder / "generation_config.json", folder / "config.json")
    file = next(path for path in files if path.is_file())
    stated = read_json_object(file, _AGAIN).get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < vocab_size:
            raise ValueError(
                f"{file}: eos_token_id = {stated!r}: {end!r} is not a token, ids are 0 to "
                f"{vocab_size - 1}; {_AGAIN}"
            )
    own = tokenizer.eos_token_id
    return sorted({*ends, *([] if own is None else [own])})
