"""Runs the PTX of a kernel on numpy arrays, all threads of a grid at once.

It models what the PTX says, not what hardware does: every instruction the kernels use is written
here from its definition in the PTX ISA, so that a kernel's arithmetic is compared with the
reference where there is no GPU. Threads that diverge are run lowest program counter first, which
brings them together again at the joins of structured code.
"""

import re
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx_arithmetic import OPERATIONS

_LABEL = re.compile(r"^(\$\w+):")
_SIZES = {
    "b8": 1,
    "b16": 2,
    "b32": 4,
    "b64": 8,
    "f32": 4,
    "f64": 8,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "s32": 4,
}
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GLOBAL_BASE = 4096


@dataclass(frozen=True)
class Instruction:
    op: str
    guard: str | None
    negated: bool
    operands: tuple[str, ...]


def _split_operands(text: str) -> tuple[str, ...]:
    """Operands, a braced vector being one."""
    return tuple(part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", text)
                 if part.strip())  # fmt: skip


@dataclass
class Program:
    """Instructions of the one kernel of a PTX text, its labels, registers, parameters, memory."""

    instructions: list[Instruction]
    labels: dict[str, int]
    registers: dict[str, int]
    parameters: list[str]
    shared: dict[str, int]
    shared_bytes: int

    @classmethod
    def parse(cls, text: str) -> "Program":
        self = cls([], {}, {}, [], {}, 0)
        depth, scope = 0, 0
        local: dict[str, str] = {}
        for line in text.splitlines():
            line = line.split("//")[0].strip()
            if not line:
                continue
            if line.startswith(".param"):
                self.parameters.append(line.rstrip(",").split()[-1].split("[")[0])
                continue
            match = _LABEL.match(line)
            if match:
                self.labels[match.group(1)] = len(self.instructions)
                continue
            if line == "{":
                depth += 1
                scope += 1
                local = {}
                continue
            if line == "}":
                depth -= 1
                local = {}
                continue
            if depth == 0:
                continue
            if line.startswith(".shared"):
                name, size = re.match(r".* (\w+)\[(\d+)\];", line).groups()
                self.shared[name] = self.shared_bytes
                self.shared_bytes += -(-int(size) // 16) * 16
                continue
            if line.startswith(".reg"):
                kind, names = re.match(r"\.reg \.(\w+)\s+(.*);", line).groups()
                size = 1 if kind == "pred" else _SIZES[kind]
                for name in names.split(","):
                    name = name.strip()
                    many = re.match(r"(%\w+)<(\d+)>", name)
                    if many:
                        for i in range(int(many.group(2))):
                            self.registers[f"{many.group(1)}{i}"] = size
                    else:
                        local[name] = f"{name}@{scope}"
                        self.registers[local[name]] = size
                continue
            if line.startswith("."):
                continue
            self._add(line.rstrip(";").strip(), local)
        return self

    def _add(self, line: str, local: dict[str, str]) -> None:
        guard, negated = None, False
        match = re.match(r"@(!?)(%\w+)\s+(.*)", line)
        if match:
            negated, guard, line = match.group(1) == "!", match.group(2), match.group(3)
        op, _, rest = line.partition(" ")
        op, _, tab_rest = op.partition("\t")
        rest = tab_rest + rest
        operands = tuple(
            re.sub(r"[A-Za-z_]\w*", lambda m: local.get(m.group(0), m.group(0)), operand)
            for operand in _split_operands(rest)
        )
        self.instructions.append(Instruction(op, guard, negated, operands))


class Machine:
    """One launch: grid CTAs (x, y) of threads threads, tensors in one global memory."""

    def __init__(self, text: str, grid: tuple[int, int], threads: int) -> None:
        self.program = Program.parse(text)
        self.threads = threads
        self.ctas = grid[0] * grid[1]
        self.count = self.ctas * threads
        index = np.arange(self.count)
        self.cta = index // threads
        self.special = {
            "%tid.x": (index % threads).astype(np.uint32),
            "%tid.y": np.zeros(self.count, np.uint32),
            "%tid.z": np.zeros(self.count, np.uint32),
            "%ntid.x": np.full(self.count, threads, np.uint32),
            "%ntid.y": np.ones(self.count, np.uint32),
            "%ctaid.x": (self.cta % grid[0]).astype(np.uint32),
            "%ctaid.y": (self.cta // grid[0]).astype(np.uint32),
            "%nctaid.x": np.full(self.count, grid[0], np.uint32),
            "%nctaid.y": np.full(self.count, grid[1], np.uint32),
            "%laneid": (index % 32).astype(np.uint32),
        }
        self.memory = np.zeros(GLOBAL_BASE, np.uint8)
        self.parameters: dict[str, bytes] = {}
        self.shared = np.zeros((self.ctas, max(1, self.program.shared_bytes)), np.uint8)
        self.registers = {
            name: np.zeros(self.count, bool if name.startswith("%p") else _WORD[size])
            for name, size in self.program.registers.items()
        }

    def allocate(self, array: np.ndarray) -> int:
        """Copy array to global memory and return its address, a multiple of 256."""
        pad = -len(self.memory) % 256
        address = len(self.memory) + pad
        data = np.frombuffer(array.tobytes(), np.uint8)
        self.memory = np.concatenate((self.memory, np.zeros(pad, np.uint8), data))
        return address

    def pass_arguments(self, *arguments: bytes) -> None:
        self.parameters = dict(zip(self.program.parameters, arguments, strict=True))

    def read(self, address: int, dtype: type, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer(self.memory[address : address + size].tobytes(), dtype).copy()

    def run(self) -> None:
        end = len(self.program.instructions)
        pcs = np.zeros(self.count, np.int64)
        while True:
            pc = int(pcs.min())
            if pc == end:
                return
            active = pcs == pc
            instruction = self.program.instructions[pc]
            mask = active
            if instruction.guard is not None:
                mask = active & (self.registers[instruction.guard] != instruction.negated)
            pcs[active] = pc + 1
            kind = instruction.op.split(".")[0]
            if kind == "bra":
                pcs[mask] = self.program.labels[instruction.operands[0]]
            elif kind in ("ret", "exit"):
                pcs[mask] = end
            elif kind == "bar":
                waiting = active.reshape(self.ctas, self.threads)
                live = (pcs != end).reshape(self.ctas, self.threads)
                assert not (waiting.any(1, keepdims=True) & live & ~waiting).any(), "barrier"
            elif kind == "red":
                self._raise(instruction, mask)
            elif kind not in ("pmevent", "prefetch"):
                self._execute(instruction, mask)

    def _value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.special:
            return self.special[operand]
        if operand in self.program.shared:
            return np.full(self.count, self.program.shared[operand], np.uint64)
        if operand.startswith("0f"):
            return np.full(self.count, int(operand[2:], 16), np.uint32)
        if operand.startswith("0d"):
            return np.full(self.count, int(operand[2:], 16), np.uint64)
        return np.full(self.count, int(operand, 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self._value(base).astype(np.int64) + (int(offset, 0) if offset else 0)

    def _assign(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        target = self.registers[name]
        target[mask] = value.astype(target.dtype)[mask]

    def _execute(self, instruction: Instruction, mask: np.ndarray) -> None:
        op = instruction.op.split(".")
        operands = instruction.operands
        if op[0] in ("ld", "st"):
            self._move_memory(op, operands, mask)
            return
        if op[0] in ("vote", "shfl"):
            self._warp(op, operands, mask)
            return
        if op[0] == "mov" and (operands[0].startswith("{") or operands[1].startswith("{")):
            self._repack(operands, mask)
            return
        operation = OPERATIONS.get(instruction.op)
        assert operation is not None, f"unknown instruction {instruction.op}"
        with np.errstate(all="ignore"):
            value = operation(*(self._value(operand) for operand in operands[1:]))
        self._assign(operands[0], value, mask)

    def _repack(self, operands: tuple[str, ...], mask: np.ndarray) -> None:
        """mov between a register and a braced vector of its parts, lowest first."""
        if operands[0].startswith("{"):
            names = [name.strip() for name in operands[0].strip("{}").split(",")]
            value = self._value(operands[1]).astype(np.uint64)
            bits = 8 * self._value(operands[1]).dtype.itemsize // len(names)
            for i, name in enumerate(names):
                part = (value >> np.uint64(i * bits)) & np.uint64((1 << bits) - 1)
                self._assign(name, part, mask)
            return
        names = [name.strip() for name in operands[1].strip("{}").split(",")]
        bits = 8 * self.registers[operands[0]].dtype.itemsize // len(names)
        value = np.zeros(self.count, np.uint64)
        for i, name in enumerate(names):
            value |= self._value(name).astype(np.uint64) << np.uint64(i * bits)
        self._assign(operands[0], value, mask)

    def _warp(self, op: list[str], operands: tuple[str, ...], mask: np.ndarray) -> None:
        warps = mask.reshape(-1, 32)
        assert (warps.all(1) == warps.any(1)).all(), "warp-wide instruction in a divergent warp"
        if op[0] == "vote":
            taken = self.registers[operands[1].lstrip("!")].reshape(-1, 32)
            taken = ~taken if operands[1].startswith("!") else taken
            combined = {"any": taken.any(1), "all": taken.all(1)}[op[2]]
            self._assign(operands[0], np.repeat(combined, 32), mask)
            return
        value = self._value(operands[1])
        lane = np.arange(self.count)
        other = self._value(operands[2]).astype(np.int64)
        match op[2]:
            case "bfly":
                source = lane ^ other
            case "down":
                source = np.where(lane % 32 + other < 32, lane + other, lane)
            case _:
                source = lane - lane % 32 + other
        self._assign(operands[0].split("|")[0], value[source], mask)

    def _raise(self, instruction: Instruction, mask: np.ndarray) -> None:
        """red.shared.max.u32 and red.global.max.u32: words of memory become at least a value."""
        place, value = instruction.operands
        index, values = self._address(place)[mask] // 4, self._value(value)[mask]
        match instruction.op:
            case "red.shared.max.u32":
                np.maximum.at(self.shared.view(np.uint32), (self.cta[mask], index), values)
            case "red.global.max.u32":
                assert ((index >= GLOBAL_BASE // 4) & (index < len(self.memory) // 4)).all()
                words = self.memory[: len(self.memory) // 4 * 4].view(np.uint32)
                np.maximum.at(words, index, values)
            case unknown:
                raise AssertionError(f"unknown instruction {unknown}")

    def _move_memory(self, op: list[str], operands: tuple[str, ...], mask: np.ndarray) -> None:
        size = _SIZES[op[-1]]
        vector, place = operands if op[0] == "ld" else operands[::-1]
        names = [name.strip() for name in vector.strip("{}").split(",")]
        word = _WORD[size]
        if op[1] == "param":
            name, _, offset = place.strip("[]").partition("+")
            for i, target in enumerate(names):
                start = (int(offset) if offset else 0) + i * size
                value = np.frombuffer(self.parameters[name][start : start + size], word)
                if op[-1].startswith("s"):
                    value = value.view(np.int32).astype(np.int64)
                self._assign(target, np.repeat(value, self.count), mask)
            return
        address = self._address(place)[mask]
        assert (address % (size * len(names)) == 0).all(), "misaligned access"
        if op[1] == "shared":
            memory = self.shared.reshape(-1)
            address = address + self.cta[mask] * self.shared.shape[1]
        else:
            memory = self.memory
            assert (address >= GLOBAL_BASE).all(), "null pointer"
        assert (address + size * len(names) <= len(memory)).all(), "out of bounds"
        lanes = address[:, None] + np.arange(size)
        for i, name in enumerate(names):
            if op[0] == "ld":
                target = self.registers[name]
                data = np.ascontiguousarray(memory[lanes + i * size])
                target[mask] = data.view(word)[:, 0].astype(target.dtype)
            else:
                data = np.ascontiguousarray(self._value(name)[mask].astype(word))
                memory[lanes + i * size] = data.view(np.uint8).reshape(-1, size)
