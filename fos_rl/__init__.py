"""RL post-training for train/inference-consistent GRPO in low precision."""

__version__ = "0.1.0"
