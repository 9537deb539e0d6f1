"""A folder's manifest: size and checksum of each file, written last, compared before it is used.

The checksum is XXH3 of 128 bits (https://xxhash.com): against damage, not against forgery. On a
CPU core it takes 0.2 s for the 1.6 GB of a 135M model's checkpoint, SHA-256 1.1 s, zlib's CRC-32
0.4 s. The manifest carries one of its own content, too.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from fos_rl.files.whole import write_whole

MANIFEST = "manifest.json"
_CHUNK_BYTES = 4 << 20


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Seal a folder: list its files beside what a reader should know of them (`facts`)."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    content = {**facts, "files": files}
    sealed = {"xxh3_128": _content_checksum(content), "content": content}
    write_whole(folder / MANIFEST, json.dumps(sealed, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's facts, after every file that its manifest lists has been compared with it.

    Raises:
        ValueError: saying what is wrong with which file.
        OSError: when a file cannot be read.
    """
    content = _content(folder / MANIFEST)
    for name, entry in content.pop("files").items():
        path, size = folder / name, entry["bytes"]
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        found = path.stat().st_size
        if found != size:
            word = "truncated" if found < size else "too long"
            raise ValueError(f"{name} is {word}: {found:,} bytes, {size:,} were written")
        if file_checksum(path) != entry["xxh3_128"]:
            raise ValueError(f"{name} has other bytes than were written: its checksum differs")
    return content


def _content(path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads(path.read_bytes())
        content = sealed["content"]
        whole = sealed["xxh3_128"] == _content_checksum(content)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path.name} is damaged")
    return content


def _content_checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def file_checksum(path: Path) -> str:
    """XXH3 of 128 bits of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
