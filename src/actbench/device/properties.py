"""What torch tells of a card: its properties, and its allocator's statistics."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final, Protocol

LOAD: Final = {"utilization": 100, "memory_usage": 100, "temperature": 70, "power_draw": 300_000, "clock_rate": 1500}
"""What a card under full load is plausible to say: %, %, degrees Celsius, mW and MHz."""


class Counters(Protocol):
    """What a simulated card counts, in bytes.

    Attributes:
        name: As ``torch.cuda.get_device_name`` says it.
        capability: Compute capability, major and minor.
        total_bytes: Its memory.
        devices: How many cards ``torch.cuda.device_count`` says; the numbers are those of each.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    devices: int

    def allocated_bytes(self) -> int:
        """Return the bytes of tensors."""

    def peak_allocated_bytes(self) -> int:
        """Return the largest :meth:`allocated_bytes` since the last :meth:`reset_peak`."""

    def reserved_bytes(self) -> int:
        """Return the bytes that the caching allocator holds, gaps included."""

    def peak_reserved_bytes(self) -> int:
        """Return the largest :meth:`reserved_bytes` since the last :meth:`reset_peak`."""

    def free_bytes(self) -> int:
        """Return the free bytes of the card."""

    def limit_to(self, fraction: float) -> str:
        """Let the caching allocator take no more than a share of the card; return what to say of it."""

    def configure(self, settings: str) -> None:
        """Let the caching allocator follow settings, as ``PYTORCH_CUDA_ALLOC_CONF`` has them."""

    def reset_peak(self) -> None:
        """Let both peaks start at the current bytes."""

    def empty_cache(self) -> None:
        """Give back what the caching allocator holds and no tensor needs."""


# By compute capability, from the table "Technical Specifications per Compute Capability" of the CUDA C++ programming
# guide: shared memory of a multiprocessor and of a block that asks for it (KiB), and threads of a multiprocessor. The
# count of multiprocessors, which a compute capability does not fix, is that of its card most used for training.
_ARCHITECTURES = {
    (7, 0): (96, 96, 2048, 80),
    (7, 5): (64, 64, 1024, 40),
    (8, 0): (164, 163, 2048, 108),
    (8, 6): (100, 99, 1536, 82),
    (8, 9): (100, 99, 1536, 128),
    (9, 0): (228, 227, 2048, 132),
    (10, 0): (228, 227, 2048, 148),
    (12, 0): (100, 99, 1536, 170),
}


@dataclass(frozen=True)
class DeviceProperties:
    """Stands in for torch's ``_CudaDeviceProperties``, which only C++ can make."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    uuid: uuid.UUID
    shared_memory_per_block: int = 48 * 2**10
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    L2_cache_size: int = 0
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""  # noqa: N815

    @classmethod
    def of(cls, counters: Counters, index: int) -> DeviceProperties:
        """Return the properties of card ``index``; of an unknown capability, those of the newest that is not newer."""
        known = [each for each in _ARCHITECTURES if each <= counters.capability] or [min(_ARCHITECTURES)]
        shared, optin, threads, processors = _ARCHITECTURES[max(known)]
        return cls(
            name=counters.name,
            major=counters.capability[0],
            minor=counters.capability[1],
            total_memory=counters.total_bytes,
            multi_processor_count=processors,
            max_threads_per_multi_processor=threads,
            shared_memory_per_multiprocessor=shared * 2**10,
            shared_memory_per_block_optin=optin * 2**10,
            uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"{counters.name} {index}"),
        )

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


_BYTES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
_COUNTS = ("allocation", "active", "segment", "inactive_split")
_EVENTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)


def memory_stats(counters: Counters) -> dict[str, Any]:
    """Return the nested statistics that ``torch.cuda.memory_stats`` flattens.

    Bytes are the card's. It counts neither pools nor history, nor how many allocations there are: all bytes are told of
    the large pool, what was ever allocated is the peak, and counts are 0.
    """
    allocated = counters.allocated_bytes(), counters.peak_allocated_bytes()
    reserved = counters.reserved_bytes(), counters.peak_reserved_bytes()
    gaps = max(reserved[0] - allocated[0], 0), max(reserved[1] - allocated[1], 0)
    by_name = dict.fromkeys(_BYTES, allocated) | {"reserved_bytes": reserved, "inactive_split_bytes": gaps}
    told: dict[str, Any] = {}
    for name in (*_BYTES, *_COUNTS):
        stat = _stat(*by_name.get(name, (0, 0)))
        told[name] = {"all": stat, "large_pool": dict(stat), "small_pool": _stat(0, 0)}
    told |= {name: _stat(0, 0) for name in ("oversize_allocations", "oversize_segments")}
    return told | dict.fromkeys(_EVENTS, 0)


def _stat(current: int, peak: int) -> dict[str, int]:
    peak = max(current, peak)
    return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
