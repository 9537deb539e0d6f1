"""Whether a precision fits the model and the machine, asked before trainer or generator start, with
reasons; and what each then takes of the machine."""

import os
import resource
from collections.abc import Iterable

import torch

from fos_rl.kernels.availability import unavailable_reason
from fos_rl.model.convert import check_spec, quantizer_of
from fos_rl.quant.gemm import check_gemm
from fos_rl.quant.quantizers import Backward, resolve_backward
from fos_rl.spec import Bf16, ModelSpec, Nvfp4


def check_precision(
    spec: ModelSpec,
    backward_override: Backward | None,
    devices: Iterable[str],
    *,
    cuda_graphs: bool,
) -> list[str]:
    """What a user should know about the precision, one note per line.

    Args:
        devices: "cpu" and "cuda", where trainer or generator use it on this machine.
        cuda_graphs: whether the generator captures its decode steps on a GPU.

    Raises:
        ValueError: naming the layer or the setting that cannot work, and the remedy.
    """
    if spec.consistency == "exact":
        _check_exact(spec, set(devices))
    precision = spec.precision
    if isinstance(precision, Bf16):
        return []
    backward = resolve_backward(backward_override, quantizer_of(precision).row_scaled_activation)
    quantized = check_spec(spec, backward)
    if precision.gemm == "native":
        _check_native(quantized, devices, cuda_graphs)
    notes = [f"quantized  {len(quantized)} weights, backward {backward}"]
    if isinstance(precision, Nvfp4) and not precision.row_scaled_activation:
        notes.append(
            "warning    model.precision.row_scaled_activation = false: one amax covers all tokens "
            "of a GEMM, so a token's log-prob depends on the others of its batch and differs "
            "between generator and trainer"
        )
    return notes


def _check_exact(spec: ModelSpec, devices: set[str]) -> None:
    if len(devices) > 1:
        raise ValueError(
            "trainer.device and generator.device with model.consistency = 'exact': one is a CPU "
            "and one a GPU, which add in other orders; give both the same value"
        )
    if "cuda" in devices and spec.architecture.vocab_size % 4:
        raise ValueError(
            f"vocab_size = {spec.architecture.vocab_size} with model.consistency = 'exact': on a "
            "GPU the log-softmax of a row that is not aligned to 16 bytes depends on its place in "
            "the batch, so vocab_size % 4 must be 0; use consistency = 'fast', or pad the model's "
            "vocabulary"
        )


def _check_native(quantized: Iterable[str], devices: Iterable[str], cuda_graphs: bool) -> None:
    """Raise where the tensor core cannot run; that it takes the shapes, check_spec has asked."""
    experts = next((name for name in quantized if ".mlp.experts." in name), None)
    if experts and cuda_graphs:
        raise ValueError(
            "generator.cuda_graphs = true with model.precision.gemm = 'native' and quantized "
            f"experts ({experts}): their forward reads on the host which rows each expert gets, "
            "which a CUDA graph cannot record; set generator.cuda_graphs = false, or gemm = "
            "'emulated', or take the experts out with model.precision.exclude = "
            "['*.mlp.experts.*']"
        )
    for device in devices:
        if reason := native_gemm_reason(device):
            raise ValueError(
                f"model.precision.gemm = 'native': {reason}; set it to 'emulated', which "
                "multiplies the same operands on any device"
            )


def native_gemm_reason(device: str) -> str | None:
    """Why gemm 'native' cannot run on a device of this machine; None if it can."""
    try:
        check_gemm("native", torch.device(device))
    except RuntimeError as error:
        return str(error).removeprefix("gemm 'native' unavailable: ")
    return None


def describe_machine() -> str:
    """What of `model.precision` can run here, and what cannot and why."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "no CUDA device"
    reasons = {
        "gemm = 'emulated'": None,
        "gemm = 'native'": native_gemm_reason(device),
        "quantizer 'reference'": None,
        "quantizer 'cute'": unavailable_reason(torch.empty(16, 16, device=device)),
    }
    lines = [f"[this machine: {name}]"]
    for what, reason in reasons.items():
        lines.append(f"  {what}: {f'unavailable, {reason}' if reason else 'runs'}")
    return "\n".join(lines) + "\n"


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: reserved on its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def machine_memory_gib(device_type: str) -> float:
    """All memory of this machine's GPUs, or its main memory."""
    if device_type == "cuda":
        devices = range(torch.cuda.device_count())
        return sum(torch.cuda.get_device_properties(i).total_memory for i in devices) / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def device_memory_gib(device_type: str) -> float:
    """All memory of the first GPU that this process sees, or of the machine."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return machine_memory_gib("cpu")
