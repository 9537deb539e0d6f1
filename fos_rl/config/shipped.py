"""The example configs and recipes that come with the package, wherever it is used from."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def shipped_configs() -> Path:
    """configs/ of a checkout, or the copy of it inside an installed package."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def find_config(name: str | Path, kind: str = "") -> Path:
    """The file that `name` means: a path, or the bare name of a shipped config.

    Args:
        kind: the folder of configs/ that holds them; one of that name in the current directory
            comes first.

    Example: `demo` is configs/demo.toml, and `nvfp4` of kind "recipes" configs/recipes/nvfp4.toml.
    """
    path = Path(name)
    if path.suffix or len(path.parts) != 1 or path.is_file():
        return path
    found = [root / kind / f"{name}.toml" for root in (Path("configs"), shipped_configs())]
    return next((file for file in found if file.is_file()), path)


def config_names(kind: str = "") -> list[str]:
    """The bare names that `find_config` knows."""
    roots = (Path("configs"), shipped_configs())
    return sorted({file.stem for root in roots for file in (root / kind).glob("*.toml")})
