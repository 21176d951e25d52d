"""A store that is placed on a device: its batches are made there, for loaders whose batches go there."""

from dataclasses import dataclass

import torch

from hoploom.errors import ConfigError
from hoploom.gpu.place.placed_store import PlacedStore
from hoploom.load.assemble import is_there
from hoploom.load.loader import made_here
from hoploom.load.look_ahead import LookAhead
from hoploom.load.maker import Maker
from hoploom.load.pipeline import Producer
from hoploom.store.base import Deployment


@dataclass(frozen=True, kw_only=True)
class OnDevice(Deployment):
    """What a store had to do with other processes before it was placed, and where it is placed."""

    placed: PlacedStore
    before: Deployment

    @property
    def makes_batches(self) -> bool:
        return self.before.makes_batches

    def producer(
        self, maker: Maker, device: torch.device | None, look_ahead: int | None, deadline: float
    ) -> Producer | None:
        """The device, unless batches go elsewhere or servers make them."""
        if self.makes_batches or not is_there(device, self.placed.device):
            return self.before.producer(maker, device, look_ahead, deadline)  # type: ignore[no-any-return]
        if isinstance(made_here(maker, look_ahead or 1), LookAhead):
            raise ConfigError(
                "look_ahead is set, but batches are made on the device; leave it out, or give device='cpu'"
            )
        from hoploom.gpu.batches.loading import DeviceLoading  # imports Triton

        return DeviceLoading(maker, self.placed, deadline)

    def traffic(self) -> dict[str, int]:
        return self.before.traffic()

    def close(self, *, wait: bool) -> None:
        """Give back what is shared with other processes, then leave them."""
        try:
            self.placed.close(wait=wait)
        finally:
            self.before.close(wait=wait)
