"""`fos-rl rescore` with another arm: by --recipe or --set, over a config that spells all out."""

import json
from pathlib import Path

import numpy as np
import pytest

from fos_rl.cli import main
from fos_rl.config import RunConfig, parse_config
from fos_rl.diagnose.records import read_jsonl
from fos_rl.diagnose.rescore import model_spec, open_scene
from fos_rl.diagnose.scorer import run_forward
from fos_rl.model.tiny import VOCAB_SIZE, write_tiny_model
from fos_rl.run_folder.folder import resolved_toml
from fos_rl.spec import Bf16, FourOverSix, Mxfp8, Nvfp4, Precision


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[RunConfig, Path, Path]:
    """A config, its file, and records of log-probs that are all -5."""
    folder = tmp_path_factory.mktemp("stored")
    config = parse_config(
        {
            "model": {
                "path": str(write_tiny_model("llama", folder / "model", seed=0)),
                "precision": {"recipe": "nvfp4_four_over_six", "compute_dtype": "float32"},
            },
            "data": {"type": "arithmetic"},
            # It belongs to the recipe, and bf16 refuses it.
            "trainer": {"backward_override": "dequantized"},
        }
    )
    (folder / "run.toml").write_text(resolved_toml(config))
    row = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6, 7], "log_probs": [-5.0] * 4}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return config, folder / "run.toml", folder / "rows.jsonl"


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (["--set", "model.precision.recipe=bf16"], Bf16(compute_dtype="float32")),
        (["--set", "model.precision.recipe=mxfp8"], Mxfp8(compute_dtype="float32")),
        (["--set", "model.precision.recipe=nvfp4"], Nvfp4(compute_dtype="float32")),
        # A recipe replaces the precision whole.
        (["--recipe", "bf16"], Bf16()),
        (
            ["--recipe", "mxfp8", "--set", "model.precision.scale_mode=floor"],
            Mxfp8(scale_mode="floor"),
        ),
        (
            ["--set", "model.precision.e4m3_scale_bound=448"],
            FourOverSix(compute_dtype="float32", e4m3_scale_bound=448),
        ),
    ],
    ids=lambda value: " ".join(value[1::2]) if isinstance(value, list) else "",
)
def test_another_arm_is_scored(
    stored: tuple[RunConfig, Path, Path], options: list[str], precision: Precision, capsys
) -> None:
    config, toml, rows = stored
    assert main(["rescore", str(rows), "--config", str(toml), *options]) == 0
    shown = capsys.readouterr().out
    cells = next(line for line in shown.splitlines() if "log_prob_abs_diff/mean" in line)
    model = config.model.model_copy(update={"precision": precision})
    other = config.model_copy(
        update={
            "model": model,
            "trainer": config.trainer.model_copy(update={"backward_override": None}),
        }
    )
    with open_scene(other, None) as scene:
        assert model_spec(other, scene.model_folder).precision == precision
        forward = scene.forward(read_jsonl(rows, VOCAB_SIZE), 0)
        expected = np.abs(run_forward(forward).log_probs + 5.0).mean()
    # "configured arm - generator", then "this arm - generator".
    assert f"{expected:.3e}" == cells.replace("│", " ").split()[-1]
