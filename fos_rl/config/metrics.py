"""What each key of metrics.jsonl means, its formula, and its name in other toolkits.

The one source of `fos-rl explain metrics` and of the tables in docs/metrics.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A key and what it says.

    `{a,b}` in a key stands for each of a and b, `<...>` for a name of the run. A toolkit's name is
    given where it is the same quantity, a difference noted after it, and left empty where unsure.
    """

    key: str
    meaning: str
    verl: str = ""
    miles: str = ""
    nemo_rl: str = ""
    trl: str = ""


TOOLKITS = {"verl": "verl", "miles": "miles, slime", "nemo_rl": "NeMo-RL", "trl": "TRL"}

METRICS: dict[str, tuple[Metric, ...]] = {
    "Mismatch": (
        Metric(
            "mismatch/log_prob_abs_diff/{mean,p50,p90,p99,max}",
            "of |d|; a signed mean would hide errors that cancel",
            verl="training/rollout_probs_diff_mean, _max: of |p - q|, not of log-probs",
            miles="train_rollout_logprob_abs_diff (mean)",
            nemo_rl="token_mult_prob_error: mean exp(|d|)",
            trl="sampling/sampling_logp_difference/mean, max",
        ),
        Metric(
            "mismatch/kl_k1",
            "mean -d: KL(generator || trainer), unbiased, of either sign",
            verl="rollout_corr/kl",
            miles="mis_kl",
        ),
        Metric(
            "mismatch/kl_k2",
            "mean d^2 / 2: the same to second order, never negative",
        ),
        Metric(
            "mismatch/kl_k3",
            "mean r - 1 - d: the same, unbiased and never negative",
            verl="rollout_corr/k3_kl",
            miles="train_rollout_kl, mis_k3_kl",
            nemo_rl="gen_kl_error",
        ),
        Metric(
            "mismatch/reverse_kl_k1",
            "mean r d: KL(trainer || generator) from the generator's samples, weighted by r",
        ),
        Metric("mismatch/reverse_kl_k2", "mean r d^2 / 2"),
        Metric(
            "mismatch/reverse_kl_k3",
            "mean r d - (r - 1)",
            nemo_rl="policy_kl_error: mean 1/r - 1 + d, without the weight r",
        ),
        Metric(
            "mismatch/chi2",
            "mean (r - 1)^2: chi-squared divergence of the trainer from the generator",
            verl="rollout_corr/chi2_token: mean r^2 - 1",
            miles="mis_chi2_token: mean r^2 - 1",
        ),
        Metric(
            "mismatch/ess_frac",
            "(sum r)^2 / (tokens * sum r^2): effective sample size of the ratios, in (0, 1]",
            verl="rollout_corr/rollout_is_eff_sample_size: of bounded ratios",
        ),
        Metric(
            "mismatch/perplexity_ratio",
            "mean over sequences of exp(mean -d): the trainer's perplexity over the generator's",
            verl="rollout_corr/ppl_ratio",
            miles="mis_ppl_ratio",
        ),
        Metric(
            "mismatch/outside_{1e-6,1pct,5pct}_frac",
            "share of tokens with |r - 1| above 1e-6, 0.01, 0.05",
        ),
        Metric(
            "mismatch/non_finite_frac",
            "tokens whose d is not finite; they leave every other figure, above and below the bar",
        ),
        Metric("mismatch/non_finite_tokens", "their number; a run stops when it is all of a step"),
        Metric(
            "mismatch/clamped_frac",
            "tokens with d > 20, which count as 20 wherever d is exponentiated",
        ),
        Metric(
            "mismatch/by_probability/{0..9}",
            "mean |d| of tokens whose generator probability is in [k/10, (k+1)/10)",
        ),
        Metric(
            "mismatch/by_position/{0..9}",
            "mean |d| of the k-th tenth of each response",
        ),
        Metric(
            "mismatch/by_length/{0..3}",
            "mean |d| of responses of up to (k+1)/4 of the step's longest",
        ),
        Metric(
            "mismatch/floor_<any of the above>",
            "the same figure of the generator's prefill against its own decode steps",
        ),
        Metric(
            "mismatch/over_floor",
            "mean |d| over its floor; absent when the floor is 0",
        ),
        Metric(
            "mismatch/routing_flip_frac/layer_<n>",
            "share of tokens that trainer and generator send to different sets of experts",
        ),
    ),
    "Correction": (
        Metric(
            "correction/truncated_frac",
            "tokens whose weight was limited to max_weight",
            verl="rollout_corr/rollout_is_ratio_fraction_high",
            miles="mis_truncate_fraction",
        ),
        Metric(
            "correction/masked_frac",
            "tokens dropped, alone or with their sequence",
            verl="rollout_corr/rollout_rs_masked_fraction",
            miles="mis_mask_fraction_low + mis_mask_fraction_high",
        ),
        Metric(
            "correction/weight/mean",
            "mean weight after the correction, dropped tokens as 0",
            verl="rollout_corr/rollout_is_mean",
            miles="mis_ratio_mean_after_mis",
            nemo_rl="sampling_importance_ratio: before any limit",
            trl="sampling/importance_sampling_ratio/mean",
        ),
    ),
    "Loss": (
        Metric(
            "loss/policy",
            "the loss, mean over the step's updates",
            verl="actor/pg_loss",
            miles="pg_loss",
        ),
        Metric(
            "loss/ratio/mean",
            "policy over old policy (algorithm.ratio says whose), of tokens; gspo: of sequences",
            nemo_rl="probs_ratio",
        ),
        Metric(
            "loss/clip_frac",
            "tokens whose clipped term was the smaller one, so that they carry no gradient "
            "(sign-aware); 0 for cispo, which keeps every gradient",
            verl="actor/pg_clipfrac",
            miles="pg_clipfrac",
            trl="clip_ratio/region_mean",
        ),
        Metric(
            "loss/out_of_band_frac",
            "tokens whose ratio is outside the band, whatever the advantage's sign",
        ),
        Metric(
            "loss/dual_clip_frac",
            "tokens of negative advantage whose ratio is above algorithm.dual_clip",
            verl="actor/pg_clipfrac_lower",
        ),
        Metric(
            "loss/ratio_is_generator",
            "1 when the ratio's old policy is the generator (bypass), 0 when it is the trainer "
            "before the step (decoupled)",
        ),
    ),
    "Policy and optimizer": (
        Metric(
            "policy/entropy",
            "nats per token, at the sampling temperature",
            verl="actor/entropy",
            miles="entropy_loss",
            nemo_rl="approx_entropy: estimated from the sampled tokens",
            trl="entropy",
        ),
        Metric(
            "policy/uniform_frac",
            "tokens whose logits were all equal: entropy = log(vocabulary), a model that says "
            "nothing",
        ),
        Metric("policy/version", "finished steps after this one"),
        Metric(
            "trainer/grad_norm",
            "before clipping, mean over the step's updates",
            verl="actor/grad_norm",
            miles="grad_norm",
            nemo_rl="grad_norm",
            trl="grad_norm",
        ),
        Metric("trainer/lr", "of the step's last update"),
        Metric(
            "trainer/skipped_updates",
            "updates left out because the loss or the gradient norm was not finite; "
            "trainer.max_nonfinite_updates in a row stop the run",
        ),
    ),
    "Rewards and rollouts": (
        Metric("reward/{mean,std}", "over all responses of the step"),
        Metric("reward/{timeouts,errors}", "answers the verifier gave up on (they score 0)"),
        Metric("rollout/response_length/{mean,max}", "tokens"),
        Metric("rollout/truncated_frac", "responses cut at rollout.max_new_tokens"),
        Metric(
            "rollout/masked_frac",
            "responses left out of the loss: rollout.truncated = 'mask', or given up by vLLM",
        ),
        Metric("rollout/groups", "groups of the step"),
        Metric("rollout/zero_variance_groups", "those skipped because all rewards were equal"),
    ),
    "Evaluation": (
        Metric("eval/<set>/avg@<k>", "mean accuracy of k sampled responses per problem"),
        Metric("eval/<set>/pass@<k>", "unbiased estimate that one of k responses is right"),
        Metric("eval/<set>/greedy", "accuracy at temperature 0"),
        Metric("eval/<set>/truncated_frac", "responses cut at the limit of new tokens"),
        Metric("eval/<set>/undecided", "answers the verifier gave up on (they score 0)"),
    ),
    "Time and memory": (
        Metric("time/{generate,reward,noise_floor,train,sync,step}_s", "seconds"),
        Metric("throughput/generate_tokens_per_s", "sampled tokens"),
        Metric("throughput/train_tokens_per_s", "tokens trained on, with prompts"),
        Metric(
            "memory/{trainer,generator}_peak_gib",
            "most memory of that actor so far: reserved on its GPU, or resident on the CPU",
        ),
    ),
}


def explain_metrics() -> str:
    """The tables as text for a terminal."""
    lines: list[str] = []
    for title, metrics in METRICS.items():
        lines.append(f"[{title}]")
        for metric in metrics:
            lines += [f"  {metric.key}", f"      {metric.meaning}"]
            lines += [f"      {toolkit}: {name}" for toolkit, name in _elsewhere(metric).items()]
        lines.append("")
    return "\n".join(lines)


def metric_tables() -> str:
    """The tables as Markdown; docs/metrics.md holds them letter for letter."""
    parts: list[str] = []
    for title, metrics in METRICS.items():
        toolkits = [t for t in TOOLKITS.values() if any(t in _elsewhere(m) for m in metrics)]
        rows = [["key", "meaning", *toolkits], ["---"] * (2 + len(toolkits))]
        for metric in metrics:
            elsewhere = [_elsewhere(metric).get(toolkit, "") for toolkit in toolkits]
            rows.append([f"`{metric.key}`", *(_escaped(c) for c in (metric.meaning, *elsewhere))])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {title}\n\n{table}\n")
    return "\n".join(parts)


def _elsewhere(metric: Metric) -> dict[str, str]:
    names = {toolkit: getattr(metric, field) for field, toolkit in TOOLKITS.items()}
    return {toolkit: name for toolkit, name in names.items() if name}


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
