"""The command line: one function a command."""

import argparse
import math
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from fos_rl.config import load_config, other_arm, run_config_file
from fos_rl.config.evaluation import eval_config, eval_precisions, is_run
from fos_rl.config.study import load_study
from fos_rl.files.reading import describe_os_error, is_full_disk
from fos_rl.run_folder.version import version_text

_TRAIN_HELP = """\
Train a model with GRPO as a TOML file describes it.

  fos-rl train configs/demo.toml
  fos-rl train configs/demo.toml --set trainer.lr=3e-6 --set rollout.group_size=4
  fos-rl train configs/demo.toml --recipe nvfp4 --set model.precision.compute_dtype=float32
  fos-rl train configs/demo.toml --dry-run      check everything, start nothing
  fos-rl train tiny_moe                         an example that comes with the package

The run folder (by default runs/NAME of the config file) gets the resolved config, the
environment, metrics.jsonl and every rollout. An existing folder is left alone: the run takes
NAME-2, NAME-3 ..."""


_RESUME_HELP = """\
Go on with a run from its newest checkpoint that is whole (trainer.save_every writes them).

  fos-rl resume runs/demo
  fos-rl resume runs/demo --set steps=20 --set trainer.lr=1e-6
  fos-rl resume runs/demo --strict         stop where any checkpoint is damaged

What the run had done after that checkpoint is moved to before-resume-N in its folder. Settings that
decide what is learned from which samples cannot change; those that can are written to config.toml,
and the earlier file is kept as config.NNNN.toml."""


_ABLATE_HELP = """\
Run the arms of a study file under all its seeds, and compare them.

  fos-rl ablate experiments/laptop/study.toml --dry-run    check all arms, show the plan
  fos-rl ablate experiments/laptop/study.toml              run, or continue where it stopped
  fos-rl ablate experiments/laptop/study.toml --arm mxfp8 --arm nvfp4

Every arm is checked before the first starts. The folder (by default runs/STUDY) gets a run folder
ARM/seed_N for each run. Calling it again leaves finished runs alone, resumes a run that has a
checkpoint, and moves any other to seed_N.failed-1 and starts it anew."""


_COMPARE_HELP = """\
Compare runs, or all runs of a study: a table here, and report.html, .md and .csv with their
plots as SVG files.

  fos-rl compare runs/laptop
  fos-rl compare runs/demo runs/demo-2 --baseline demo
  fos-rl compare runs/demo --fail-above mismatch/kl_k3=0.015

Exit status 1 when a step is above a limit, or when arms that differ in the backward mode alone do
not have identical first steps."""


_PARITY_HELP = """\
Run the same tokens through the trainer and through vLLM, without any training, and say where the
two forwards differ: the first operation that differs, differences per operation and layer, flipped
codes and expert choices, and the log-prob difference.

  fos-rl parity configs/demo.toml
  fos-rl parity configs/demo.toml --recipe nvfp4 --tokens 1000 --json parity.json
  fos-rl parity configs/demo.toml --fail-above 0.02      for a check: exit status 1 above it"""


_EVAL_HELP = """\
The accuracy of a model, or of a run's trained model, on one or more sets of problems.

  fos-rl eval runs/demo --data gsm8k                    under the run's precision and under bf16
  fos-rl eval models/SmolLM2-135M-Instruct --data problems.jsonl --samples 8 --greedy
  fos-rl eval models/SmolLM2-135M-Instruct --data math500 --recipe nvfp4

A set is gsm8k, math500, aime24, aime25, or a file with a question and an answer column. avg@K is
the mean accuracy of K samples, pass@k the unbiased estimate of one of k being right. A run's
figures go to eval.json in its folder."""


_VERIFY_HELP = """\
Score responses against gold answers as training does, and say why.

  fos-rl verify responses.jsonl
  fos-rl verify responses.jsonl | grep '"verdict": 0'

Each line of the file is a JSON object:

  {"gold": "34", "response": "17 + 17 = 34\\nAnswer: 34"}
  {"gold": "1/2", "response": "\\\\boxed{0.5}", "finish_reason": "length"}

gold and response are strings; finish_reason (stop, length or abort; default stop) says whether
the response was cut off. Printed is one object per line, in the same order:

  {"verdict": 1, "answer": "34", "reason": "the same text"}

What counts as an answer, and what is equal, is in docs/verifier.md."""


_RESCORE_HELP = """\
Score the stored rollouts of a run again, without generating, and name the single cause that
explains why the recorded log-probs are not those of the run's arm.

  fos-rl rescore runs/demo                       each step whose weights exist
  fos-rl rescore runs/demo --steps 0 3
  fos-rl rescore runs/demo --recipe nvfp4        that arm's mismatch instead
  fos-rl rescore runs/demo --set model.precision.recipe=nvfp4      the same, all else as it was
  fos-rl rescore rollouts.jsonl --config configs/demo.toml         another toolkit's records

Weights: the initial model for step 0, later steps need trainer.save_every. A JSONL file has one
object per line with prompt_ids, response_ids, log_probs and, optionally, trainer_log_probs.

Exit status 1 when a difference is not explained. Noise, a named cause and flipped codes are
explanations."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's mistake prints its remedy and gives 2."""
    try:
        try:
            return _run(_parser().parse_args(arguments))
        finally:
            # Here, and not when the interpreter ends, where nothing can handle what it raises.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not _reader_is_gone(sys.stdout):
            raise
        # As with `| head`: all that was wanted has been read.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(args: argparse.Namespace) -> int:
    # A scheduler that ends a job, or kill, does what Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        described = describe_os_error(error)
        if described is None:
            raise
        failed = is_full_disk(error)
        print(f"{'failed' if failed else 'error'}: {described}", file=sys.stderr)
        return 1 if failed else 2
    except KeyboardInterrupt:
        print("interrupted; the run folder holds every finished step", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _reader_is_gone(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Version(argparse.Action):
    """Prints the versions; they are read when asked for, since git is asked, too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version_text())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fos-rl", description="RL post-training for train/inference-consistent GRPO."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions of it and its packages"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="run GRPO from a config file",
        description=_TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", help="a TOML file, or the name of one in configs/")
    train.add_argument(
        "--recipe",
        metavar="NAME",
        help="a recipe in configs/recipes, or a file like them, merged over the config before "
        "--set; its [model.precision] replaces the config's whole",
    )
    _add_overrides(train)
    train.add_argument("--out", type=Path, metavar="DIR", help="run folder (default runs/NAME)")
    train.add_argument("--dry-run", action="store_true", help="check everything, start nothing")
    train.add_argument(
        "--architecture",
        type=Path,
        metavar="FILE",
        help="with --dry-run: a config.json to check with where the model is not available",
    )
    train.set_defaults(run=_train)

    resume = commands.add_parser(
        "resume",
        help="continue a run from its newest whole checkpoint",
        description=_RESUME_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    resume.add_argument("folder", type=Path, metavar="RUN", help="the run folder")
    _add_overrides(resume)
    resume.add_argument(
        "--strict",
        action="store_true",
        help="stop where a checkpoint is damaged or left over, instead of going on from the newest "
        "whole one",
    )
    resume.set_defaults(run=_resume)

    ablate = commands.add_parser(
        "ablate",
        help="run the arms of a study file",
        description=_ABLATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ablate.add_argument("study", type=Path, help="a TOML file; see experiments/")
    ablate.add_argument(
        "--arm", dest="arms", action="append", default=[], metavar="NAME", help="only this arm"
    )
    ablate.add_argument("--out", type=Path, metavar="DIR", help="folder (default runs/STUDY)")
    ablate.add_argument(
        "--parallel",
        type=_positive,
        metavar="N",
        help="runs at a time (default: as many as have GPUs or cores of their own); more than that "
        "share them",
    )
    ablate.add_argument("--dry-run", action="store_true", help="check all arms, start nothing")
    ablate.set_defaults(run=_ablate)

    compare = commands.add_parser(
        "compare",
        help="runs side by side: a table and an HTML report",
        description=_COMPARE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run or study folder")
    compare.add_argument("--baseline", metavar="ARM", help="default: the study's, else the first")
    compare.add_argument(
        "--fail-above",
        action="append",
        default=[],
        metavar="METRIC=LIMIT",
        help="exit with 1 when a step of a run is above; may be given often",
    )
    compare.add_argument(
        "--out", type=Path, metavar="DIR", help="default: comparison/ beside the runs"
    )
    compare.set_defaults(run=_compare)

    _add_diagnosis(commands)

    evaluate = commands.add_parser(
        "eval",
        help="the accuracy of a model or a run on problem sets",
        description=_EVAL_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    evaluate.add_argument("model", help="a run folder, a Hugging Face folder or a hub name")
    evaluate.add_argument(
        "--data", dest="sets", action="append", required=True, metavar="SET", help="name or file"
    )
    evaluate.add_argument(
        "--samples", type=_positive, metavar="K", help="sampled responses per problem"
    )
    evaluate.add_argument("--greedy", action="store_true", help="one greedy response per problem")
    precision = evaluate.add_mutually_exclusive_group()
    precision.add_argument("--recipe", metavar="NAME", help="as in fos-rl train")
    precision.add_argument(
        "--precision",
        choices=("arm", "bf16", "both"),
        default="both",
        help="a run's own precision, bf16, or both (default)",
    )
    _add_overrides(evaluate)
    evaluate.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    evaluate.set_defaults(run=_eval)

    verify = commands.add_parser(
        "verify",
        help="the verdicts of the math verifier on a file of responses",
        description=_VERIFY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("file", type=Path, metavar="FILE", help="JSONL: gold and response per line")
    verify.set_defaults(run=_verify)

    explain = commands.add_parser("explain", help="list settings, defaults and what can run here")
    explain.add_argument(
        "section",
        nargs="?",
        default="",
        help="such as trainer or model.precision; or metrics, for what is measured",
    )
    explain.set_defaults(run=_explain)
    return parser


def _add_diagnosis(commands: Any) -> None:
    parity = commands.add_parser(
        "parity",
        help="the same tokens through trainer and generator: where the forwards differ",
        description=_PARITY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parity.add_argument("config", help="a TOML file, or the name of one in configs/")
    parity.add_argument("--recipe", metavar="NAME", help="as in fos-rl train")
    _add_overrides(parity)
    parity.add_argument(
        "--tokens", type=_positive, default=256, metavar="N", help="tokens to sample (default 256)"
    )
    parity.add_argument(
        "--fail-above",
        type=_limit,
        metavar="X",
        help="exit with 1 when the mean |log-prob difference| is above X",
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parity.set_defaults(run=_parity)

    rescore = commands.add_parser(
        "rescore",
        help="why stored log-probs differ, or what another arm makes of them",
        description=_RESCORE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rescore.add_argument("source", type=Path, metavar="RUN", help="a run folder or a JSONL file")
    rescore.add_argument("--config", metavar="FILE", help="of a JSONL file: the arm that sampled")
    rescore.add_argument("--recipe", metavar="NAME", help="as in fos-rl train: another arm")
    _add_overrides(rescore)
    rescore.add_argument(
        "--steps", type=int, nargs="+", metavar="N", help="these steps (default all)"
    )
    rescore.add_argument(
        "--tokens",
        type=_positive,
        default=2000,
        metavar="N",
        help="tokens per step to score, prompts included (default 2000)",
    )
    rescore.set_defaults(run=_rescore)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="override a setting; may be given often",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 0, as in 0.02")
    return value


def _train(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, args.recipe)
    # Only now the heavy imports: a wrong config answers at once.
    from fos_rl.runtime.launch import CHECKED, check_without_model, planned, train

    out = args.out or Path("runs") / Path(args.config).stem
    if args.architecture is not None:
        if not args.dry_run:
            raise ValueError(
                f"--architecture {args.architecture}: it replaces a model in checks alone; "
                "add --dry-run, or leave it out"
            )
        print("\n".join(check_without_model(config, args.architecture)))
        print("dry run: checked what the architecture tells, nothing started")
        return 0
    if args.dry_run:
        with planned(config, out=out) as plan:
            print("\n".join(plan.notes))
        print(f"checked    {', '.join(CHECKED)}")
        print(f"unchecked  {'; '.join(plan.unchecked)}")
        print("dry run: nothing started")
        return 0
    train(config, out)
    return 0


def _resume(args: argparse.Namespace) -> int:
    from fos_rl.runtime.launch import resume

    resume(args.folder, args.overrides, strict=args.strict)
    return 0


def _ablate(args: argparse.Namespace) -> int:
    # A wrong study answers at once; only then the heavy imports.
    load_study(args.study).only(args.arms)
    from fos_rl.studies.ablate import ablate

    return ablate(
        args.study,
        arms=args.arms,
        out=args.out,
        parallel=args.parallel,
        dry_run=args.dry_run,
    )


def _compare(args: argparse.Namespace) -> int:
    from fos_rl.compare import Limit, compare

    limits = [Limit.parse(text) for text in args.fail_above]
    return 1 if compare(args.runs, args.baseline, args.out, limits) else 0


def _parity(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides, args.recipe)
    from fos_rl.runtime.cluster import actor_environment

    # Both actors run in this process; their variables must be set before torch is imported.
    actor_environment()
    from fos_rl.diagnose.commands import parity

    return parity(config, tokens=args.tokens, fail_above=args.fail_above, out=args.json)


def _eval(args: argparse.Namespace) -> int:
    config = eval_config(
        args.model,
        sets=args.sets,
        samples=args.samples or 0,
        # Without either option, one greedy response.
        greedy=args.greedy or not args.samples,
        overrides=args.overrides,
        recipe=args.recipe,
    )
    from fos_rl.runtime.cluster import actor_environment

    # The engine runs in this process; its variables must be set before torch is imported.
    actor_environment()
    from fos_rl.evaluation.command import evaluate_model

    out = args.out or (Path(args.model) / "eval.json" if is_run(args.model) else None)
    return evaluate_model(config, eval_precisions(config, args.precision), out)


def _rescore(args: argparse.Namespace) -> int:
    is_run = args.source.is_dir()
    if is_run == (args.config is not None):
        raise ValueError(
            f"--config: {args.source} is a run folder, which has its own; leave it out"
            if is_run
            else f"{args.source} is not a run folder; give --config FILE, the arm that sampled"
        )
    file = run_config_file(args.source) if is_run else args.config
    config = load_config(file)
    arm = other_arm(file, args.overrides, args.recipe) if args.overrides or args.recipe else None
    from fos_rl.diagnose.commands import rescore

    return rescore(args.source, config, arm=arm, steps=args.steps, tokens=args.tokens)


def _verify(args: argparse.Namespace) -> int:
    from fos_rl.rewards.verify_command import verify_file

    return verify_file(args.file)


def _explain(args: argparse.Namespace) -> int:
    from fos_rl.config.explain import explain

    print(explain(args.section))
    if "model.precision".startswith(args.section):
        # torch, only where it is asked for.
        from fos_rl.model.machine import describe_machine

        print(describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
