"""Tests of this folder run on one thread; `mesh` is a mesh of one."""

from tests.run.one_rank import mesh as mesh
from tests.simulate import one_thread as one_thread
