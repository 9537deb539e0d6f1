"""Carrying weights from a trainer to generators: the only place that knows the order of calls."""

from collections.abc import Sequence

from fos_rl.types import Generator, WeightSource


def sync(source: WeightSource, generators: Sequence[Generator]) -> None:
    """Give every generator the source's bf16 weights and compare every tensor's checksum.

    A generator that can read the source's memory, in its process or on its GPU, copies from there;
    the others get buckets. A bucket may be a reference to one that is elsewhere: it is handed on
    as it is.

    Raises:
        ValueError: naming tensors that changed behind the last sync's back, are missing or differ.
    """
    for generator in generators:
        generator.begin_weight_sync()
    shared = source.shared_weights()
    remote = [g for g in generators if shared is None or not g.load_shared_weights(shared)]
    if remote:
        for bucket in source.export_weights():
            for generator in remote:
                generator.load_weight_bucket(bucket)
    version, checksums = source.weights_version(), source.weight_checksums()
    for generator in generators:
        generator.finish_weight_sync(version, checksums)
