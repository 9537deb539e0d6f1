"""A driver that is too old for compiled kernels is refused by name. Needs no GPU."""

import pytest
import torch

from fos_rl.kernels import availability
from fos_rl.kernels.availability import missing_package

pytestmark = pytest.mark.skipif(missing_package() is not None, reason=str(missing_package()))

H200 = torch.device("cuda", 0)


def never_asked() -> bool:
    raise AssertionError("the driver was asked to load a kernel")


@pytest.mark.parametrize(
    ("compiler", "driver", "loads", "words"),
    [
        ((12, 9), (12, 9), never_asked, []),
        ((12, 9), (13, 0), never_asked, []),
        ((13, 4), (13, 0), lambda: True, []),
        ((13, 4), (13, 0), lambda: False, ["CUDA 13.0,", "CUDA 13.4;", "libs-cu13"]),
        ((13, 4), (12, 9), never_asked, ["CUDA 12.9,", "CUDA 13.4;", "libs-cu13"]),
        ((12, 9), (12, 4), lambda: False, ["CUDA 12.4,", "one for CUDA 12.9 or newer"]),
        ((12, 9), (11, 8), never_asked, ["CUDA 11.8,", "CUDA 12.9"]),
    ],
)
def test_an_older_driver_is_named_with_what_it_needs(compiler, driver, loads, words) -> None:
    from fos_rl.kernels.driver import too_old

    reason = too_old(compiler, driver, loads)
    assert (reason is None) == (not words)
    assert all(word in str(reason) for word in words)


@pytest.fixture
def driver(monkeypatch):
    """A driver API of a machine with an H200; its answers are set by the test."""
    from cuda.bindings import driver as api

    from fos_rl.kernels.driver import driver_reason

    success = api.CUresult.CUDA_SUCCESS
    caches = (driver_reason, availability._cached_device_reason, availability.architecture)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(api, "cuModuleUnload", lambda module: (success,))

    def set_driver(version: int, load) -> None:
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: version, raising=False)
        monkeypatch.setattr(api, "cuModuleLoadData", load)

    yield set_driver
    for cache in caches:
        cache.cache_clear()


def test_the_driver_decides_about_a_newer_minor_release(driver) -> None:
    """It is handed machine code of the device's architecture, and what it says counts."""
    from cuda.bindings.driver import CUresult
    from cutlass import CUDA_VERSION

    seen = []
    answers = [CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_IMAGE]

    def load(image: bytes):
        seen.append(image)
        return answers.pop(0), None

    driver(1000 * CUDA_VERSION.major, load)
    assert availability.architecture(H200) == "sm_90a"
    availability._cached_device_reason.cache_clear()
    from fos_rl.kernels.driver import driver_reason

    driver_reason.cache_clear()
    availability.architecture.cache_clear()
    words = rf"unavailable: .*CUDA {CUDA_VERSION.major}\.0,.*CUDA {CUDA_VERSION.major}\."
    with pytest.raises(RuntimeError, match=words):
        availability.architecture(H200)
    # ELF; e_flags of a cubin hold the architecture: 90 = 0x5a.
    assert all(image[:4] == b"\x7fELF" and 0x5A in image[48:52] for image in seen)
    assert len(seen) == 2


def test_a_driver_of_an_older_major_release_is_refused(driver) -> None:
    driver(11080, lambda image: pytest.fail("the driver was asked"))
    with pytest.raises(RuntimeError, match=r"quantizer 'cute' unavailable: .*CUDA 11\.8,"):
        availability.architecture(H200)
