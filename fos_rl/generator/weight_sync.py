"""The generator's end of a weight sync, mixed into vLLM's worker."""

from typing import Any

import torch

from fos_rl.model.checksum import named_checksums
from fos_rl.model.transport import WeightLoader, unpack_weights
from fos_rl.types import SharedWeights, WeightBucket


class WeightSyncWorker:
    """vLLM `worker_extension_cls`: each rank loads and sums the weights it holds.

    One sync is begin, shared weights or any number of buckets, finish; only finish makes the new
    weights valid, so a tensor that never arrived is named.
    """

    model_runner: Any

    @property
    def _decoder(self) -> torch.nn.Module:
        return self.model_runner.get_model().decoder

    @property
    def _weights_device(self) -> torch.device:
        return next(self._decoder.parameters()).device

    def begin_weight_sync(self) -> None:
        """Expect every weight once."""
        self._loader = WeightLoader(self._decoder)

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        """Copy all of them; False where they cannot be read from here."""
        parameters = weights.open(self._weights_device)
        if parameters is None:
            return False
        self._loader.load_all(parameters)
        return True

    def load_weight_bucket(self, bucket: WeightBucket) -> None:
        """Copy its tensors into the decoder by Hugging Face name."""
        self._loader.load(unpack_weights(bucket, self._weights_device))

    def finish_weight_sync(self) -> dict[str, int]:
        """Checksums of the loaded weights; ValueError names tensors that did not arrive."""
        self._loader.finish()
        return self.weight_checksums()

    def weight_checksums(self) -> dict[str, int]:
        """One checksum per tensor of this rank, by Hugging Face name."""
        return named_checksums(self._decoder)
