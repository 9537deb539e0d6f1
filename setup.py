"""What pyproject.toml cannot say: configs/ travels inside the package, as fos_rl/configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fos_rl", "fos_rl.*"]), "fos_rl.configs"],
    package_dir={"fos_rl.configs": "configs"},
    package_data={
        "fos_rl.compare": ["page.html"],
        "fos_rl.configs": ["*.toml", "*/*.toml", "*/*.json"],
    },
)
