# SPDX-License-Identifier: Apache-2.0
"""MindSpore's operators that give the results of one device when it shards their inputs, in whatever layout.

Those were tried, forward and backward, on every layout that MindSpore derives for rows and for columns. What is not here is
refused where it is sharded. By name of the primitive.
"""

from __future__ import annotations

_BY_ENTRY = """
Abs ACos Acosh Add Addcdiv Addcmul AddcmulExt AddExt AddN AddScalar ApproximateEqual Asin Asinh Assign AssignAdd
AssignSub Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BitwiseAnd BitwiseOr BitwiseXor
Cast Ceil CeLU ClampScalar ClampTensor Clone Contiguous Cos Cosh Digamma Div DivMod DivMods DivNoNan Divs Elu EluExt
Equal EqualScalar Erf Erfc Erfinv Exp Expm1 FastGeLU Floor FloorDiv FloorMod Fmod FmodScalar FmodTensor GeLU GeluExt
Greater GreaterEqual GreaterEqualScalar GreaterScalar HardShrink HardSwish HShrink HSigmoid HSwish Hypot Identity Inv
Invert IsClose IsFinite IsInf IsNan LeakyReLU LeakyReLUExt LeftShift Lerp LerpScalar Less LessEqual LessEqualScalar
LessScalar Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr LogicalXor Logit LogSigmoid MaskedFill Maximum Minimum
Mish Mod Mul MulNoNan Muls NanToNum Neg NotEqual NotEqualScalar OnesLike Pow PowScalarTensor PowTensorScalar RealDiv
Reciprocal ReLU ReLU6 ReLUV2 ReLUV3 RemainderScalarTensor RemainderTensorScalar RemainderTensorTensor RightShift Rint
Round Rsqrt Select SeLU Sigmoid Sign SiLU Sin Sinc Sinh Softplus SoftplusExt SoftShrink Softsign Sqrt Square
SquaredDifference Sub SubExt SubScalar Swiglu Tan Tanh Trunc TruncateDiv TruncateMod Where Xdivy Xlogy ZerosLike
ZerosLikeExt
"""
BY_ENTRY = frozenset(_BY_ENTRY.split())
"""Each entry of the output is a function of the entries at its position in the inputs; inputs are broadcast."""

_SAME_ON_PARTS = """
BatchMatMul BatchMatMulExt BiasAdd BroadcastTo Cdist Concat Conv2D Conv3D CumProd CumSum CumsumExt Dense Dropout
DropoutDoMask DropoutExt DropoutGenMask Embedding EmbeddingLookup ExpandDims FillV2 FlashAttentionScore Gather GatherD
GatherNd KLDivLoss L2Normalize LayerNorm LayerNormExt LayerNormV3 LinSpace LogSoftmax LogSoftmaxExt MatMul MatMulExt
Max MeanExt Min OneHot OneHotExt Outer PadV3 PReLU ReduceAll ReduceAny ReduceMax ReduceMean ReduceMin ReduceProd
ReduceSum Reshape ReverseV2 RmsNorm SigmoidCrossEntropyWithLogits Slice SliceExt Softmax SoftmaxCrossEntropyWithLogits
Sort Split SplitTensor SplitWithSize Squeeze Stack StackExt StridedSlice SumExt TensorDot Tile TopK Transpose Tril
Triu UnsortedSegmentSum
"""
SAME_ON_PARTS = frozenset(_SAME_ON_PARTS.split())
"""MindSpore adds the collectives that sharded inputs need, or shards no dim where they would need some."""

MOVES = frozenset(("AllGather", "AllReduce", "AlltoAll", "Broadcast", "Receive", "ReduceScatter", "Send"))
"""Operators that MindSpore inserts between stages and ranks; its other own operators have a name that begins with
an underscore."""

VALUE_IS_SAME = frozenset(("ArgMaxWithValue", "ArgMinWithValue"))
"""Their second output, the value, is the same in any case; the first one, its index, counts within the shard."""

_ALONG_ITS_AXIS = """
Argmax ArgMaxExt Argmin ArgMinExt CumulativeLogsumexp IndexFill LpNorm MaxDim Median MinDim ProdExt ReduceStd Unstack
"""
ALONG_ITS_AXIS = VALUE_IS_SAME.union(_ALONG_ITS_AXIS.split())
"""Results are the same where the dims that they reduce or scan are unsharded."""

_ROW_BY_ROW = """
AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AvgPool AvgPool3D Cholesky Conv2DBackpropInput Conv2DTranspose
Conv3DTranspose DepthToSpace Flatten FlattenExt GroupNorm Im2Col InstanceNorm LRN MatrixBandPart MatrixDeterminant
MatrixDiagV3 MatrixInverse MaxPool MaxPool3D ResizeBicubic ResizeBilinearV2 ResizeLinear1D ResizeNearestNeighbor
ResizeNearestNeighborV2 SpaceToDepth UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleTrilinear3D
"""
ROW_BY_ROW = frozenset(_ROW_BY_ROW.split())
"""Results are the same where nothing but dim 0 of their first input is sharded."""

INTO_ROWS = frozenset(
    f"{onto}{what}"
    for onto, kinds in (("TensorScatter", "Add Div Max Min Mul Sub Update"), ("UnsortedSegment", "Max Min Prod"))
    for what in kinds.split()
)
"""Results are the same where the dims that they index are unsharded, and so dim 0; the values they insert are
sharded alike."""

WAYS_OUT = {
    "SparseSoftmaxCrossEntropyWithLogits": (
        "ops.cross_entropy or nn.CrossEntropyLoss (it averages the rows of each rank alone)"
    ),
    "ArgMaxWithValue": "ops.amax for the value alone",
    "ArgMinWithValue": "ops.amin for the value alone",
    "BatchNorm": "nn.BatchNorm1d, nn.BatchNorm2d",
    "ReduceStd": "(x - x.mean(d, keep_dims=True)).square().mean(d), and its root",
    "CumulativeLogsumexp": "ops.cumsum of exponentials",
}
