"""Rules by op family. A rule is found by the op's name; what is pointwise in ATen needs none."""
