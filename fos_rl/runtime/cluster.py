"""The only `import ray`: actors, where they run, and what happens when one does not answer."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fos_rl.config import RunConfig
from fos_rl.runtime.handles import Actor, Handle
from fos_rl.spec import ModelSpec, contract_difference
from fos_rl.types import Generator, Trainer

# OpenMP: passive waiting, else the threads of the idle actor spin on the busy actor's cores.
# vLLM: the engine runs inside the actor (https://docs.vllm.ai/en/latest/usage/v1_guide.html), no
# usage report, errors only, and torch's own sampler, whose log-probs do not depend on a package.
# torch: vLLM compiles a helper of its sampler, which needs a C++ compiler and 20 s at the first
# call (https://docs.pytorch.org/docs/stable/torch.compiler.html).
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def actor_environment() -> None:
    """Give this process the environment of the actors, to run trainer and generator in it.

    Call it before torch is imported: OpenMP reads its variables once.
    """
    os.environ.update(_ENVIRONMENT)


def _environment(threads: int) -> dict[str, str]:
    # Ray gives an actor of one CPU one thread.
    return {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs of trainer and generator; `colocated`, they share one and take turns."""

    trainer_gpus: int
    generator_gpus: int
    colocated: bool

    @property
    def num_gpus(self) -> int:
        """Distinct GPUs."""
        return 1 if self.colocated else self.trainer_gpus + self.generator_gpus

    def describe(self) -> str:
        """Where trainer and generator run, in words."""
        if self.trainer_gpus == self.generator_gpus == 0:
            return "trainer and generator on the CPU"
        if self.colocated:
            return "trainer and generator share one GPU"
        where = {0: "the CPU", 1: "a GPU of its own"}
        return f"trainer on {where[self.trainer_gpus]}, generator on {where[self.generator_gpus]}"


def plan_placement(config: RunConfig, available_gpus: int) -> Placement:
    """Where trainer and generator run: a GPU each, one shared, or the CPU.

    Raises:
        ValueError: when one of them asks for a GPU and there is none.
    """
    gpus: dict[str, int] = {}
    for name, settings in (("trainer", config.trainer), ("generator", config.generator)):
        if settings.device == "cuda" and not available_gpus:
            raise ValueError(
                f"{name}.device = 'cuda': no GPU is available; set it to 'cpu', or leave it out "
                "to use what is there"
            )
        gpus[name] = 0 if settings.device == "cpu" else min(1, available_gpus)
    return Placement(
        trainer_gpus=gpus["trainer"],
        generator_gpus=gpus["generator"],
        colocated=sum(gpus.values()) > available_gpus,
    )


def runs_at_once(config: RunConfig, placement: Placement, available_gpus: int) -> int:
    """How many runs like this one fit at once: by GPUs, or by the CPU's cores.

    A run that does not limit its `num_threads` takes all cores.
    """
    if placement.num_gpus:
        return max(1, available_gpus // placement.num_gpus)
    cores = os.cpu_count() or 1
    threads = max(actor.num_threads or cores for actor in (config.trainer, config.generator))
    return max(1, cores // threads)


def gpu_environments(count: int, gpus_per_run: int, available_gpus: int) -> list[dict[str, str]]:
    """Variables that give each of `count` processes its GPUs of this machine.

    Groups of GPUs are dealt in turn, so that more runs than groups share them: 3 runs of 1 GPU on
    2 GPUs get 0, 1 and 0.
    """
    if gpus_per_run == 0:
        return [{} for _ in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(available_gpus)]
    groups = [names[i : i + gpus_per_run] for i in range(0, len(names), gpus_per_run)]
    whole = [",".join(group) for group in groups if len(group) == gpus_per_run]
    return [{"CUDA_VISIBLE_DEVICES": whole[i % len(whole)]} for i in range(count)]


def build_trainer(
    spec: ModelSpec, folder: Path, config: RunConfig, device: str, threads: int, shares_gpu: bool
) -> Trainer:
    """The trainer, in the process that calls it."""
    import torch

    from fos_rl.trainer.trainer import GrpoTrainer

    torch.set_num_threads(threads)
    return GrpoTrainer(
        spec,
        folder,
        config.rollout,
        config.algorithm,
        config.trainer,
        torch.device(device),
        shares_gpu=shares_gpu,
    )


def build_generator(
    spec: ModelSpec,
    folder: Path,
    config: RunConfig,
    device: Literal["cpu", "cuda"],
    shares_gpu: bool,
) -> Generator:
    """The generator, in the process that calls it."""
    from fos_rl.generator.cache_size import most_sequences
    from fos_rl.generator.engine import VllmGenerator

    generator = config.generator
    if config.eval is None:
        # No more decode together, and each number of sequences is a CUDA graph to capture.
        together = most_sequences(config.rollout, generator)
        generator = generator.model_copy(update={"max_num_seqs": together})
    return VllmGenerator(spec, folder, config.rollout, generator, device, shares_gpu=shares_gpu)


class Cluster:
    """Trainer and generator in actors of their own, started and checked; use as a context manager
    so that nothing outlives the run.

    Raises:
        ValueError: when the two were built with different contracts, with the fields that differ.
        RuntimeError: naming the actor and the call that failed or did not answer in time.
    """

    trainer: Trainer
    generator: Generator
    started: str
    """Where the seconds of the start went."""

    def __init__(self, config: RunConfig, spec: ModelSpec, folder: Path, placement: Placement):
        self.config = config
        self._own_ray = config.cluster.address == "local"
        self._group = None
        self._handles: list[Handle] = []
        try:
            self._start(spec, folder.resolve(), placement)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: ModelSpec, folder: Path, placement: Placement) -> None:
        begin = time.perf_counter()
        _init_ray(self.config)
        parts = [f"Ray {time.perf_counter() - begin:.1f}"]
        share = 0.5 if placement.colocated else 1.0
        gpus = (placement.trainer_gpus, placement.generator_gpus)
        bundles = [{"CPU": 1.0, **({"GPU": n * share} if n else {})} for n in gpus]
        self._group = placement_group(bundles, strategy="PACK")
        self._wait_for_placement()
        cores = int(ray.available_resources().get("CPU", 0)) + 2
        threads = [x.num_threads or cores for x in (self.config.trainer, self.config.generator)]
        devices = ["cuda" if n else "cpu" for n in gpus]
        trainer = self._handle(Trainer, 0, bundles[0])
        generator = self._handle(Generator, 1, bundles[1])
        run, shares_gpu = (spec, folder, self.config), placement.colocated
        starts = [
            trainer.actor.start.remote(
                _environment(threads[0]),
                "fos_rl.trainer.trainer",
                build_trainer,
                *(*run, devices[0], threads[0], shares_gpu),
            ),
            generator.actor.start.remote(
                _environment(threads[1]),
                "fos_rl.generator.engine",
                build_generator,
                *(*run, devices[1], shares_gpu),
            ),
        ]
        for handle, start in zip((trainer, generator), starts, strict=True):
            seconds = handle.wait("start", start, self.config.cluster.start_timeout_s)
            parts.append(f"{handle.name} {sum(seconds):.1f} (imports {seconds[0]:.1f})")
        self.started = f"{time.perf_counter() - begin:.1f} s: {', '.join(parts)}"
        self.trainer, self.generator = cast(Trainer, trainer), cast(Generator, generator)
        different = contract_difference(self.trainer.contract(), self.generator.contract())
        if different:
            raise ValueError(
                "trainer and generator were built with different contracts (trainer != generator): "
                + "; ".join(different)
            )

    def _wait_for_placement(self) -> None:
        assert self._group is not None
        limit_s = self.config.cluster.start_timeout_s
        if not self._group.wait(limit_s):
            raise RuntimeError(
                f"the cluster did not place trainer and generator within {limit_s:.0f} s; free its "
                "CPUs and GPUs, or raise cluster.start_timeout_s"
            )

    def _handle(self, protocol: type, index: int, bundle: dict) -> Handle:
        assert self._group is not None
        name = protocol.__name__
        # Its process is named after the class.
        actor = (
            ray.remote(type(f"{name}Actor", (Actor,), {}))
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                # One call at work, and one that asks how it goes.
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            )
            .remote()
        )
        handle = Handle(protocol, name.lower(), actor, self.config.cluster.call_timeout_s)
        self._handles.append(handle)
        return handle

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and Ray itself where this run started it."""
        for handle in self._handles:
            ray.kill(handle.actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._own_ray:
            ray.shutdown()


def _init_ray(config: RunConfig) -> None:
    if ray.is_initialized():
        return
    # Ray's own handler prints a stack and aborts, with the actors left to themselves.
    on_terminate = signal.getsignal(signal.SIGTERM)
    if config.cluster.address == "local":
        cores = os.cpu_count() or 1
        ray.init(
            # Always a new one: without it Ray joins a cluster that happens to run on this machine.
            address="local",
            # Two actors of one CPU each, whatever the machine has.
            num_cpus=max(2, cores),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Weights travel in two buckets of 64 MiB at most; the rest is small.
            object_store_memory=512 << 20,
        )
    else:
        find_cluster(config.cluster.address)
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)


def find_cluster(address: str, limit_s: float = 30.0) -> None:
    """Make sure that a Ray cluster answers at an address, within twice the limit.

    `ray.init` waits for minutes, in a call that nothing can interrupt, and then ends the process.

    Raises:
        ValueError: naming cluster.address, what is wrong with it and the remedy.
    """
    field = f"cluster.address = {address!r}"
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{field}: give HOST:PORT of a running cluster's head, as in 10.0.0.1:6379, 'auto' "
                "for the one on this machine, or 'local' to start one"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s).close()
        except OSError as error:
            raise ValueError(
                f"{field}: no connection within {limit_s:.0f} s ({error.strerror or error}); start "
                "the cluster with ray start --head, or check its address and the network"
            ) from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = "it does not speak to Ray"
    else:
        if asked.returncode == 0:
            return
        reason = (
            asked.stderr.strip().splitlines()[-1][:300] if asked.stderr.strip() else "no reason"
        )
    raise ValueError(
        f"{field}: no Ray cluster answers there within {limit_s:.0f} s ({reason}); start one with "
        "ray start --head, or see what ray status says"
    )


def cluster_gpus(config: RunConfig) -> int:
    """GPUs of a running cluster."""
    _init_ray(config)
    return int(ray.cluster_resources().get("GPU", 0))


def cluster_gpu_gib(config: RunConfig) -> float:
    """All memory of one GPU of a running cluster."""
    from fos_rl.model.machine import device_memory_gib

    _init_ray(config)
    return ray.get(ray.remote(num_gpus=0.01)(device_memory_gib).remote("cuda"))
