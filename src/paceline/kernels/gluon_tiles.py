"""What the kernels in Gluon share, for a Hopper GPU: operands of its copy engine, rings for their tiles in shared
memory, barriers, and the layout of products."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def operand(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that the copy engine moves in tiles of rows x columns."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.element_size(), rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.constexpr_function
def accumulator(columns: int, warps: int) -> gl.NVMMADistributedLayout:
    """Layout of a product whose warps lie one below the other, 16 rows each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def ring_of(desc, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_shape, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), count=1)
    return made


@gluon.jit
def halves(x, ROWS: gl.constexpr, HALF: gl.constexpr):
    """The left and the right half of x (ROWS, 2 HALF). A thread has columns of both, so nothing moves."""
    left, right = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    layout: gl.constexpr = accumulator(HALF, gl.num_warps())
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    return left, right
