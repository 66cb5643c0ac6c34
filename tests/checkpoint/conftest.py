"""Tests of this folder run on one thread."""

from tests.simulate import one_thread as one_thread
