"""Generated additions and subtractions: a task on which a small model improves in minutes."""

import random

# Operands of each level: how many, and the range each is drawn from.
_LEVELS = {
    1: [(1, 9), (1, 9)],
    2: [(10, 99), (1, 9)],
    3: [(10, 99), (10, 99)],
    4: [(100, 999), (100, 999)],
    5: [(100, 999), (100, 999), (100, 999)],
}


def generate_arithmetic(difficulty: int, num_problems: int, seed: int) -> list[tuple[str, int]]:
    """Distinct (expression, value) pairs such as ("12 + 7", 19), the same for the same arguments.

    Level 1 adds two digits (81 problems, all of them when more are asked for); 2 adds or subtracts
    a digit and a two-digit number, 3 two two-digit numbers, 4 two of three digits, 5 three of
    three digits. From level 2 on an operator is + or - with equal chance, so values may be
    negative.
    """
    if difficulty == 1:
        pairs = [(f"{a} + {b}", a + b) for a in range(1, 10) for b in range(1, 10)]
        random.Random(seed).shuffle(pairs)
        return pairs[:num_problems]
    rng = random.Random(f"arithmetic {difficulty} {seed}")
    ranges = _LEVELS[difficulty]
    # Level 2 has 90 * 9 * 2 distinct expressions, the others more.
    limit = min(num_problems, 2 ** (len(ranges) - 1) * _product(hi - lo + 1 for lo, hi in ranges))
    problems: dict[str, int] = {}
    while len(problems) < limit:
        numbers = [rng.randint(lo, hi) for lo, hi in ranges]
        expression, value = str(numbers[0]), numbers[0]
        for number in numbers[1:]:
            sign = rng.choice((1, -1))
            expression += f" {'+' if sign > 0 else '-'} {number}"
            value += sign * number
        problems[expression] = value
    return list(problems.items())


def _product(factors) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result
