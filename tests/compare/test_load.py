import json

import pytest

from fos_rl.compare.load import load

STEP = [{"reward/mean": 0.5}]


def test_a_study_is_read_in_its_files_order(tmp_path, write_run) -> None:
    for arm in ("alpha", "bf16", "beta"):
        for seed in (1, 0, 10):
            write_run(tmp_path / arm / f"seed_{seed}", STEP)
    # What ablate moved aside, and a folder of results, are no runs.
    write_run(tmp_path / "beta/seed_3", STEP).rename(tmp_path / "beta/seed_3.failed-1")
    (tmp_path / "comparison").mkdir()
    (tmp_path / "study.toml").write_text(
        'base = "x.toml"\nbaseline = "bf16"\nseeds = [0, 1, 10]\n[arms.beta]\n[arms.alpha]\n'
        "[arms.bf16]\n[arms.gamma]\n"
    )
    (tmp_path / "alpha/seed_10/metrics.jsonl").unlink()
    comparison = load([tmp_path])
    assert [arm.name for arm in comparison.arms] == ["bf16", "beta", "alpha"]
    assert [run.name for run in comparison.arms[1].runs] == [
        "beta/seed_0",
        "beta/seed_1",
        "beta/seed_10",
    ]
    assert comparison.notes == [
        "Missing: alpha/seed_10 has no finished step.",
        "Missing: arm gamma of the study has not been run.",
    ]


def test_single_runs_are_arms_of_their_own(tmp_path, write_run) -> None:
    paths = [write_run(tmp_path / name, STEP) for name in ("one/demo", "two/demo", "other")]
    comparison = load(paths, baseline="one/demo")
    names = [arm.name for arm in comparison.arms]
    assert names == ["one/demo", "two/demo", f"{tmp_path.name}/other"]


def test_a_run_named_twice_counts_once(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "study/bf16/seed_0", STEP)
    assert len(load([tmp_path / "study", run, run]).runs) == 1


def test_an_unfinished_run_is_named(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "demo", STEP * 3)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert load([run]).notes == ["Unfinished: demo/seed_0 has 2 of 3 steps."]


def test_a_torn_last_line_is_left_out_and_named(tmp_path, write_run) -> None:
    """The machine stopped in the middle of step 2's line."""
    run = write_run(tmp_path / "demo", STEP * 3)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole[:-10])
    found = load([run])
    assert [step["step"] for step in found.runs[0].steps] == [0, 1]
    assert found.notes == [
        f"Torn: {run}/metrics.jsonl, line 3: torn in a write, left out.",
        "Unfinished: demo/seed_0 has 2 of 3 steps.",
    ]


def test_torn_rollouts_are_named_and_their_other_rows_read(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "demo", STEP)
    file = run / "rollouts" / "000000.jsonl"
    row = json.dumps({"group": 0, "prompt_id": "a", "reward": 1.0})
    file.write_text(f"{row}\n{row[:-10]}")
    found = load([run])
    assert found.notes == [f"Torn: {file}, line 2: torn in a write, left out."]
    assert found.runs[0].rollouts(0) == [json.loads(row)]


def test_settings_that_a_resume_changed_are_named(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "demo", STEP)
    changes = {name: {"before": 1, "now": 2} for name in ("steps", "trainer.lr")}
    (run / "environment.json").write_text(
        json.dumps({"resumed": [{"step": 0}, {"step": 3, "settings": changes}]})
    )
    assert load([run]).notes == [
        "Changed: demo/seed_0 has trainer.lr = 2 from step 3 on, 1 before."
    ]


def test_mistakes_are_named(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "demo", STEP)
    with pytest.raises(ValueError, match="'mxfp8': no such arm; one of demo"):
        load([run], baseline="mxfp8")
    with pytest.raises(ValueError, match=r"nothing is not a folder; give a run folder"):
        load([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no finished step in any run there"):
        load([tmp_path / "empty"])
    (run / "metrics.jsonl").write_text('{"step": 0, "rew\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is not JSON"):
        load([run])


def test_backward_mode_and_its_default(tmp_path, write_run) -> None:
    modes = {
        "bf16": [],
        "mxfp8": ["model.precision.recipe=mxfp8"],
        "nvfp4": ["model.precision.recipe=nvfp4"],
        "tensor_scaled": [
            "model.precision.recipe=nvfp4",
            "model.precision.row_scaled_activation=false",
        ],
        "said": ["model.precision.recipe=nvfp4", "trainer.backward_override=dequantized"],
    }
    paths = [write_run(tmp_path / name, STEP, overrides=o) for name, o in modes.items()]
    assert [run.backward for run in load(paths).runs] == [
        None,
        "quantized",
        "high_precision",
        "quantized",
        "dequantized",
    ]
