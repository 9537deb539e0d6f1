"""Resolve what pyproject.toml asks for into locks/*.txt, from metadata alone: no wheel is fetched.

    python locks/compile.py            write locks/cpu.txt and locks/cuda.txt, newest versions
    python locks/compile.py --check    exit status 1 when a lock no longer satisfies pyproject.toml

cuda.txt holds for Python 3.11 to 3.13 on Linux, x86-64; cpu.txt for Python 3.11 there. Use one as
constraints: pip install -c locks/cuda.txt '.[cuda]'.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNIVERSAL = ["--universal", "--python-version", "3.11"]
LOCKS = {
    "cuda": ["--extra", "cuda", *UNIVERSAL],
    "cpu": [
        *(word for extra in ("cpu", "demo", "kernels", "dev") for word in ("--extra", extra)),
        *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"),
    ],
}


def pip_sources() -> list[str]:
    """The index and the wheels of this machine's pip configuration, which uv does not read."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    options = []
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in ("index-url", "find-links"):
            options += [w for place in value.strip("'").split() for w in (f"--{option}", place)]
    return options


def resolve(name: str, out: Path) -> str:
    """Write the lock to `out`, keeping the versions that stand there already; the error or ''."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        str(ROOT / "pyproject.toml"),
    ]
    command += [*LOCKS[name], "--no-header", "--no-annotate", "--no-emit-index-url"]
    command += ["--no-emit-find-links", "--index-strategy", "unsafe-best-match"]
    command += [*pip_sources(), "--output-file", str(out)]
    error = ""
    # PyTorch's own index is asked only when the usual one has no CPU build.
    for more in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        result = subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT)
        if result.returncode == 0:
            return ""
        error = error or result.stderr
    return error


def check(name: str) -> str:
    """What is wrong with a lock, or ''."""
    lock = ROOT / "locks" / f"{name}.txt"
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "lock.txt"
        fresh.write_text(lock.read_text())
        if error := resolve(name, fresh):
            return f"pyproject.toml cannot be resolved for locks/{name}.txt:\n{error}"
        old, new = (set(path.read_text().splitlines()) for path in (lock, fresh))
    if old == new:
        return ""
    changes = [*(f"  - {x}" for x in sorted(old - new)), *(f"  + {x}" for x in sorted(new - old))]
    lines = "\n".join(changes)
    return (
        f"locks/{name}.txt is not what pyproject.toml needs; run python locks/compile.py\n{lines}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        wrong = [message for name in LOCKS if (message := check(name))]
    else:
        locks = {name: ROOT / "locks" / f"{name}.txt" for name in LOCKS}
        for lock in locks.values():
            lock.unlink(missing_ok=True)
        wrong = [message for name, lock in locks.items() if (message := resolve(name, lock))]
    print("\n".join(wrong) or "locks/cuda.txt and locks/cpu.txt satisfy pyproject.toml")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
