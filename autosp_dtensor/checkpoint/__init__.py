"""What backward keeps of a region, and what it computes again, by the length of the sequence."""

from .absorb import absorb
from .choose import MODES, Checkpoint, Choice, Policy, asked, policy_of, whole_bytes
from .cost import flops_of, seconds_of
from .defer import Deferred, Later, open_inputs
from .frame import Frame, Recompute
from .host import Host
from .offload import moving_inputs, offloading
from .peak import backward_peak
from .record import Record, record, run_fake
from .stages import Stages, meets_others, needed
from .tile import Tile
from .tiling import tile_chains, tile_free, tile_losses, tile_run_again

__all__ = [
    "MODES",
    "Checkpoint",
    "Choice",
    "Deferred",
    "Frame",
    "Host",
    "Later",
    "Policy",
    "Recompute",
    "Record",
    "Stages",
    "Tile",
    "absorb",
    "asked",
    "backward_peak",
    "flops_of",
    "meets_others",
    "moving_inputs",
    "needed",
    "offloading",
    "open_inputs",
    "policy_of",
    "record",
    "run_fake",
    "seconds_of",
    "tile_chains",
    "tile_free",
    "tile_losses",
    "tile_run_again",
    "whole_bytes",
]
