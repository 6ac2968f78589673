"""Who computes a single product with a weight, and in which format: the seam of FP8. No torch.

A back end is built once and makes a `MatMul` for every product; one that keeps scales returns modules with persistent
buffers, which checkpoints hold. Kernels that fuse several products do without this seam and step aside where it is not
the plain one.
"""

from paceline.backends.registry import Backend, imported

BACKENDS = (Backend(name="reference", build=imported("model.ops", "plain_matmul")),)
