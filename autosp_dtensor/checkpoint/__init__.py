"""What backward keeps of a region, and what it computes again, by the length of the sequence."""

from .choose import MODES, Checkpoint, Choice, Policy, needed, policy_of, whole_bytes
from .cost import DEVICES, Device, flops_of, seconds_of
from .frame import Frame, Recompute
from .peak import backward_peak
from .record import Record, record, run_fake

__all__ = [
    "DEVICES",
    "MODES",
    "Checkpoint",
    "Choice",
    "Device",
    "Frame",
    "Policy",
    "Recompute",
    "Record",
    "backward_peak",
    "flops_of",
    "needed",
    "policy_of",
    "record",
    "run_fake",
    "seconds_of",
    "whole_bytes",
]
