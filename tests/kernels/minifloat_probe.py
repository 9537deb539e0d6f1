"""A kernel of nothing but the conversions of ``fos_rl.kernels.minifloat``, run on numpy."""

import struct
from pathlib import Path

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fos_rl.kernels import minifloat, ptx
from tests.kernels.kernel_data import tensor_argument
from tests.kernels.ptx_machine import Machine

THREADS = 128


@cute.kernel
def probe(x: cute.Tensor, out: Int64):
    """Each thread: of words a and b of x, four words of results to out."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    index = Int64(cta) * THREADS + Int64(tid)
    a, b = ptx.load_words(Int64(x.iterator.toint()) + index * 8, 2)
    low, high = ptx.from_bits(a), ptx.from_bits(b)
    results = (
        minifloat.e4m3_pair(low, high),
        ptx.bits(minifloat.e4m3_to_float(a)),
        minifloat.e5m2_quad(low, high, high, low),
        minifloat.larger_bf16x2(a, b),
    )
    ptx.store_words(out + index * 16, *results)


@cute.jit
def launch_probe(x: cute.Tensor, out: Int64, stream):
    probe(x, out).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)


def compile_probe(arch: str, dump: Path) -> str:
    """The probe's PTX; the compiler leaves a copy in dump."""
    shape = (cute.sym_int(), cute.sym_int(divisibility=16))
    x = make_fake_compact_tensor(cutlass.Float32, shape, stride_order=(1, 0), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--gpu-arch {arch} --enable-tvm-ffi --keep-ptx --dump-dir {dump}"
    return cute.compile(launch_probe, x, Int64(0), stream, options=options).__ptx__


def run_probe(text: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """uint32 [4, n]: E4M3 bytes of a and b as fp32, fp32 bits of byte 0 of a as E4M3, E5M2 bytes of
    a b b a, and the larger bf16 magnitudes, for uint32 words a and b [n]."""
    ctas = -(-len(a) // THREADS)
    words = np.zeros((ctas * THREADS, 2), np.uint32)
    words[: len(a)] = np.stack((a, b), 1)
    machine = Machine(text, (ctas, 1), THREADS)
    x_at = machine.allocate(words)
    out_at = machine.allocate(np.zeros(8 * len(words), np.uint16))
    machine.pass_arguments(tensor_argument(x_at, ctas, 2 * THREADS), struct.pack("<q", out_at))
    machine.run()
    return machine.read(out_at, np.uint32, 4 * len(words)).reshape(-1, 4)[: len(a)].T.copy()
