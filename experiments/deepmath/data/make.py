"""Put DAPO-Math-17k rows and DeepMath-103K rows into one file of DAPO-Math-17k's schema.

python make.py DAPO.jsonl DEEPMATH.jsonl     writes dapo_deepmath.jsonl beside this file

All DAPO rows as they are, then the first 464 DeepMath rows whose answer is an integer, as all of
DAPO's are, in DAPO's wording.
"""

import itertools
import json
import re
import sys
from pathlib import Path

_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_NUM_DEEPMATH = 464


def main(dapo: str, deepmath: str) -> None:
    lines = Path(dapo).read_text().splitlines()
    rows = map(json.loads, Path(deepmath).read_text().splitlines())
    integers = (row for row in rows if re.fullmatch(r"-?\d+", row["ground_truth"]))
    for row in itertools.islice(integers, _NUM_DEEPMATH):
        converted = {
            "data_source": row["source"],
            "prompt": [{"content": _BEFORE + row["prompt"] + _AFTER, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": row["ground_truth"], "style": "rule-deepmath"},
            "extra_info": {"index": row["id"]},
        }
        lines.append(json.dumps(converted, ensure_ascii=False))
    out = Path(__file__).with_name("dapo_deepmath.jsonl")
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
