"""Supervised fine-tuning that teaches a small model to answer as the study's verifier reads.

    python experiments/deepmath/warm_start.py models/SmolLM2-135M-Instruct models/SmolLM2-135M-math

SmolLM2-135M never ends with "Answer: ..." when asked to, so that no group of its responses has
reward variance and nothing can be learned. Two epochs of a thousand worked GSM8K answers in the
data set's own prompt teach it form, not competence. bf16, a minute on a GPU. Deterministic
algorithms are asked for; the number printed last tells whether two runs made the same weights.
"""

import argparse
import json
import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from fos_rl.model.checksum import named_checksums
from fos_rl.model.convert import build_decoder
from fos_rl.model.decoder import Decoder
from fos_rl.model.hf import load_hf_weights, read_architecture, read_weights, write_model
from fos_rl.model.log_probs import token_log_probs
from fos_rl.model.packed_attention import PackedSequences, packed_attention
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.trainer.masters import Masters

HERE = Path(__file__).parent
WORKED_ANSWERS = HERE.parent / "sft_parity" / "gsm8k_train_1000.jsonl"
EPOCHS, BATCH, LEARNING_RATE, WARMUP_STEPS = 2, 16, 3e-5, 5


def examples(tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each worked answer, asked in the study's own words."""
    before, after = prompt_frame()
    found = []
    for row in map(json.loads, WORKED_ANSWERS.read_text().splitlines()):
        working, answer = row["answer"].split("\n#### ")
        working = re.sub(r"<<.*?>>", "", working)
        chat = [{"role": "user", "content": before + row["question"] + after}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        response = f"{working}\nAnswer: {answer.replace(',', '')}{tokenizer.eos_token}"
        found.append(
            tuple(tokenizer(x, add_special_tokens=False).input_ids for x in (prompt, response))
        )
    return found


def prompt_frame() -> tuple[str, str]:
    """What stands before and after the question in every prompt of the study."""
    first = json.loads((HERE / "data" / "dapo_deepmath.jsonl").read_text().splitlines()[0])
    content = first["prompt"][0]["content"]
    start, end = content.index("\n\n") + 2, content.rindex("\n\n")
    return content[:start], content[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER")
    parser.add_argument("--steps", type=int, help="stop after so many (for a quick look)")
    args = parser.parse_args()
    # Else the gradients of attention and of cuBLAS' products are added in no fixed order. With
    # warn_only FlashAttention's backward would warn and keep its unordered sums.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = ModelSpec(architecture=read_architecture(args.model), precision=Bf16())
    sequences = PackedSequences()
    with torch.device(device):
        decoder = build_decoder(spec, packed_attention(sequences)).to(torch.float32)
    load_hf_weights(decoder, read_weights(args.model))
    masters = Masters(decoder, torch.bfloat16)
    optimizer = torch.optim.AdamW(list(masters), lr=LEARNING_RATE, weight_decay=0.0)
    data = examples(AutoTokenizer.from_pretrained(args.model))
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(data)) for _ in range(EPOCHS)])
    batches = np.array_split(order, len(order) // BATCH)[: args.steps]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        loss = batch_loss(decoder, sequences, [data[i] for i in batch], device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(masters), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.publish()
        if step % 10 == 0 or step == len(batches) - 1:
            print(f"step {step}: {loss.item():.3f} nats per token", flush=True)
    write_model(decoder, spec, args.model, args.out)
    total = sum(named_checksums(decoder).values()) % (1 << 64)
    print(f"weights {total:016x}")


def batch_loss(
    decoder: Decoder,
    sequences: PackedSequences,
    batch: list[tuple[list[int], list[int]]],
    device: torch.device,
) -> Tensor:
    """Mean negative log-prob of the responses' tokens."""
    lengths = [len(prompt) + len(response) for prompt, response in batch]
    sequences.set(lengths)
    ids = torch.tensor([i for prompt, response in batch for i in prompt + response], device=device)
    hidden = decoder(ids, sequences.positions(device))
    starts = np.cumsum([0, *lengths])
    targets = np.concatenate(
        [
            np.arange(start + len(prompt), start + len(prompt) + len(response))
            for start, (prompt, response) in zip(starts, batch, strict=False)
        ]
    )
    places = torch.from_numpy(targets).to(device)
    log_probs, _ = token_log_probs(decoder.logits, hidden[places - 1], ids[places], 1.0, 4096)
    return -log_probs.mean()


if __name__ == "__main__":
    main()
