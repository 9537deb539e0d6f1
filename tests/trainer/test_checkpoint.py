"""Checkpoints that are whole are taken, to the bit; others are named with what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.files.manifest import MANIFEST, file_checksum
from fos_rl.model.hf import read_architecture
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.find_checkpoint import checkpoint_steps, find_checkpoint
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.trainer.checkpoint import (
    STATE,
    checkpoint_folder,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from fos_rl.trainer.trainer import GrpoTrainer
from tests.files.test_whole_files import no_file_above


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"), seed=0)


def _trainer(model: Path, dtype: str = "float32", **settings: object) -> GrpoTrainer:
    spec = ModelSpec(architecture=read_architecture(model), precision=Bf16(compute_dtype=dtype))
    return GrpoTrainer(
        spec,
        model,
        RolloutConfig(),
        AlgorithmConfig(),
        TrainerConfig(**settings),
        torch.device("cpu"),
    )


def _learn(trainer: GrpoTrainer, seed: int) -> None:
    """An optimizer update from random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for master in trainer.masters:
        master.grad = torch.randn(master.shape, generator=generator)
    trainer._apply_gradients()
    trainer.policy_version += 1


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory) -> Path:
    """A run folder with whole checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("run")
    trainer = _trainer(model)
    for step in (2, 4):
        _learn(trainer, seed=step)
        save_checkpoint(trainer, checkpoint_folder(run, step), {"seed": 3})
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_loaded_trainer_goes_on_to_the_bit(model: Path, tmp_path: Path) -> None:
    one, other = _trainer(model), _trainer(model)
    _learn(one, seed=0)
    save_checkpoint(one, checkpoint_folder(tmp_path, 1))
    load_checkpoint(other, find_checkpoint(tmp_path).checkpoint.folder)
    assert (other.policy_version, other.updates) == (1, 1)
    for trainer in (one, other):
        _learn(trainer, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.masters, other.masters, strict=True))
    assert one.weight_checksums() == other.weight_checksums()


def test_the_newest_whole_one_is_taken_and_the_older_not_looked_into(run: Path) -> None:
    (checkpoint_folder(run, 2) / STATE).unlink()
    found = find_checkpoint(run)
    assert (found.checkpoint.step, found.notes) == (4, [])
    assert found.checkpoint.settings == {"seed": 3}
    assert found.checkpoint.contract is not None
    assert found.checkpoint.contract["precision.recipe"] == "bf16"


def _flip(path: Path, at: int = -1) -> None:
    """Flip the lowest bit of one byte, by default in the middle."""
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _without_manifest(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        damage(folder / STATE)

    return both


def _edit_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert '"seed": 3' in text
    (folder / MANIFEST).write_text(text.replace('"seed": 3', '"seed": 4'))


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("?")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _of_another_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(checkpoint_folder(folder.parent.parent, 2), folder)


def _unreadable(folder: Path) -> None:
    # A folder in the file's place: the tests may run as root, whom no mode keeps out.
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


DAMAGE = [
    pytest.param(lambda f: _flip(f / STATE), "state.pt has other bytes", id="flipped"),
    pytest.param(lambda f: _flip(f / STATE, 0), "state.pt has other bytes", id="first bit"),
    pytest.param(lambda f: _truncate(f / STATE), "state.pt is truncated", id="truncated"),
    pytest.param(lambda f: (f / STATE).write_bytes(b""), "truncated: 0 bytes", id="no bytes"),
    pytest.param(lambda f: (f / STATE).open("ab").write(b"x"), "is too long", id="too long"),
    pytest.param(lambda f: (f / STATE).unlink(), "state.pt is missing", id="missing"),
    pytest.param(_edit_manifest, "manifest.json is damaged", id="edited manifest"),
    pytest.param(lambda f: _truncate(f / MANIFEST), "", id="newline lost"),
    pytest.param(
        lambda f: (f / MANIFEST).write_text("{}"), "manifest.json is damaged", id="empty manifest"
    ),
    pytest.param(lambda f: (f / MANIFEST).write_bytes(b"\0" * 9), "is damaged", id="zeros"),
    pytest.param(_unreadable, "Is a directory", id="unreadable"),
    pytest.param(_empty, "an empty folder", id="empty"),
    pytest.param(_of_another_step, "written as 000002, and renamed", id="another step's"),
    pytest.param(_replace_by_file, "a file, where a checkpoint is a folder", id="file"),
    pytest.param(_without_manifest(_flip), "other bytes than were written", id="old, flipped"),
    pytest.param(_without_manifest(_truncate), "truncated or not torch's", id="old, truncated"),
    pytest.param(
        _without_manifest(lambda f: f.write_bytes(b"")), "truncated or not torch's", id="old, empty"
    ),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_one_is_named_and_an_older_one_taken(
    run: Path, damage: Callable[[Path], None], words: str
) -> None:
    newest = checkpoint_folder(run, 4)
    damage(newest)
    found = find_checkpoint(run)
    if not words:
        # JSON without the file's last newline says the same.
        assert found.checkpoint.step == 4
        return
    assert found.checkpoint.step == 2
    [note] = found.notes
    assert note.startswith("checkpoints/000004: ")
    assert words in note
    with pytest.raises(ValueError, match="000004"):
        read_state(newest)
    shutil.rmtree(checkpoint_folder(run, 2))
    with pytest.raises(ValueError, match="no checkpoint that is whole: checkpoints/000004: ") as e:
        find_checkpoint(run)
    assert words in str(e.value)
    assert f"fos-rl train {run}/config.toml" in str(e.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("000006.partial", "left by a save that was interrupted"),
        ("000006.replaced", "not a checkpoint's name"),
        ("old", "not a checkpoint's name"),
        ("6", "not a checkpoint's name"),
        ("\u0661\u0662\u0663\u0664\u0665\u0666", "not a checkpoint's name"),
    ],
)
def test_what_is_no_checkpoint_is_named_and_in_nobodys_way(
    run: Path, name: str, words: str
) -> None:
    shutil.copytree(checkpoint_folder(run, 4), run / "checkpoints" / name)
    found = find_checkpoint(run)
    assert found.checkpoint.step == 4
    [note] = found.notes
    assert note.startswith(f"checkpoints/{name}: {words}")
    assert checkpoint_steps(run) == [2, 4]


def test_one_of_an_earlier_version_is_taken_and_said_to_be_unverified(
    model: Path, run: Path
) -> None:
    (checkpoint_folder(run, 4) / MANIFEST).unlink()
    found = find_checkpoint(run)
    assert found.checkpoint.step == 4
    assert found.checkpoint.settings is None
    [note] = found.notes
    assert "checkpoints/000004: unverified" in note
    trainer = _trainer(model)
    load_checkpoint(trainer, found.checkpoint.folder)
    assert trainer.policy_version == 2


def test_a_run_without_any_says_how_they_are_written(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"no checkpoint to resume from.*trainer\.save_every"):
            find_checkpoint(folder)


def test_a_full_disk_leaves_the_earlier_ones_and_nothing_of_its_own(model: Path, run: Path) -> None:
    size = (checkpoint_folder(run, 4) / STATE).stat().st_size
    trainer = _trainer(model)
    _learn(trainer, seed=0)
    with (
        pytest.raises(RuntimeError, match=r"000006 could not be written \(File too large\)"),
        no_file_above(size // 2),
    ):
        save_checkpoint(trainer, checkpoint_folder(run, 6))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000002", "000004"]
    assert find_checkpoint(run).notes == []


@pytest.mark.parametrize(
    "where",
    ["torch.save", "fos_rl.trainer.checkpoint.write_manifest", "os.fsync", "pathlib.Path.rename"],
)
def test_a_save_that_is_killed_is_named_and_can_be_done_again(
    model: Path, run: Path, monkeypatch, where: str
) -> None:
    """At each stage. A killed process cleans nothing up, so here nobody does."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    trainer, folder = _trainer(model), checkpoint_folder(run, 6)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        patch.setattr(where, killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(trainer, folder)
    found = find_checkpoint(run)
    assert found.checkpoint.step == 4
    assert found.notes == ["checkpoints/000006.partial: left by a save that was interrupted"]
    save_checkpoint(trainer, folder)
    found = find_checkpoint(run)
    assert (found.checkpoint.step, found.notes) == (6, [])


def test_another_contract_is_refused_with_the_fields(model: Path, run: Path) -> None:
    with pytest.raises(
        ValueError, match=r"precision\.compute_dtype: 'float32' != 'bfloat16'; resume with"
    ):
        load_checkpoint(_trainer(model, dtype="bfloat16"), checkpoint_folder(run, 4))


def test_the_settings_decide_how_the_optimizer_goes_on(model: Path, run: Path) -> None:
    """torch's own state would bring back the earlier weight decay, whatever the config says."""
    trainer = _trainer(model, weight_decay=0.5, eps=1e-3)
    load_checkpoint(trainer, checkpoint_folder(run, 4))
    [group] = trainer.optimizer.param_groups
    assert (group["weight_decay"], group["eps"], group["fused"]) == (0.5, 1e-3, True)
    moments = trainer.optimizer.state_dict()["state"]
    saved = read_state(checkpoint_folder(run, 4))["optimizer"]["state"]
    assert moments.keys() == saved.keys()
    assert all(torch.equal(moments[k]["exp_avg"], saved[k]["exp_avg"]) for k in saved)


def test_the_checksum_is_xxh3s(run: Path) -> None:
    (run / "empty").touch()
    # XXH3 of 128 bits, seed 0, no bytes: https://github.com/Cyan4973/xxHash, tests/sanity_test.
    assert file_checksum(run / "empty") == "99aa06d3014798d86001c324468d497f"
    content = json.loads((checkpoint_folder(run, 4) / MANIFEST).read_text())["content"]
    assert list(content["files"]) == [STATE]
