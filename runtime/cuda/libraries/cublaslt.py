"""cublasLt: one matmul of a graph, enqueued through NVIDIA's Python bindings.

Note [The algorithm that XLA chose]
XLA keeps no identifier of a cublasLt algorithm, only its place in the list that cublasLt makes for
the matmul. The list is the same when it comes from the same library, on the same device, for the
same descriptors and the same limit of workspace. Hence three rules: exactly one libcublasLt may be
loaded in the process; the list is requested before the addresses of bias, auxiliary output and
scales are set, as XLA does; and it is requested with XLA's own limit, even when
``CUBLAS_WORKSPACE_CONFIG`` permits less. Only when the chosen algorithm needs more than is
permitted, the best one that needs less is taken in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.cuda.libraries.nvidia_bindings import (
    check_one_library,
    load_nvmath,
    read_memory_map,
)
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import Locate
from tracegraph.runtime.environment import read_cublas_workspace_bytes
from tracegraph.runtime.errors import CudaError

# JAX's dtype names, with the names of cudaDataType_t.
DATA_TYPES = {
    "float8_e4m3fn": "CUDA_R_8F_E4M3",
    "float8_e5m2": "CUDA_R_8F_E5M2",
    "float16": "CUDA_R_16F",
    "bfloat16": "CUDA_R_16BF",
    "float32": "CUDA_R_32F",
    "float64": "CUDA_R_64F",
    "complex64": "CUDA_C_32F",
    "complex128": "CUDA_C_64F",
    "int8": "CUDA_R_8I",
    "int32": "CUDA_R_32I",
}
# Attributes of the matmul's descriptor that hold an operand's address.
ADDRESS_ATTRIBUTES = {
    "bias": "BIAS_POINTER",
    "aux": "EPILOGUE_AUX_POINTER",
    "a_scale": "A_SCALE_POINTER",
    "b_scale": "B_SCALE_POINTER",
    "c_scale": "C_SCALE_POINTER",
    "d_scale": "D_SCALE_POINTER",
    "d_amax": "AMAX_D_POINTER",
}
# What XLA requests: the first of the list alone, or a list long enough to choose from.
LIST_LENGTH = 128
STATUS_SUCCESS = 0


@dataclasses.dataclass(frozen=True)
class MatmulAlgorithm:
    """An entry of cublasLt's list for a matmul.

    Attributes:
        opaque: one ``cublasLtMatmulAlgo_t``.
        workspace_bytes: what it needs.
    """

    opaque: np.ndarray = dataclasses.field(repr=False)
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class Descriptors:
    """cublasLt's own objects for a matmul: how it is made, and the layout of each matrix."""

    operation: int
    a: int
    b: int
    c: int
    d: int


class CublasLt:
    """Enqueues matmuls on streams of one CUDA context; may be used from any thread.

    Args:
        load: returns the module ``nvmath``.
        read_maps: returns the text of ``/proc/self/maps``.
    """

    stream = 0  # matmuls are captured on any

    def __init__(
        self,
        load: Callable[[], Any] = load_nvmath,
        read_maps: Callable[[], str] = read_memory_map,
    ) -> None:
        self._load = load
        self._read_maps = read_maps
        self._lock = threading.Lock()
        self._nvmath: Any = None
        self._handle = 0
        self._permitted_bytes: int | None = None
        self._algorithms: dict[tuple[Matmul, int], MatmulAlgorithm] = {}

    def preload(self) -> None:
        """Imports the bindings, if they are installed: that takes half a second, once."""
        if importlib.util.find_spec("nvmath") is not None:
            self._load()

    def prepare(self, node: MatmulNode) -> None:
        """Loads the library and chooses the matmul's algorithm, before a stream captures.

        The context that the matmul will run in must be current.

        Raises:
            UnsupportedError: the bindings are missing.
            CudaError: a call failed, or the library is not the one that XLA has loaded.
        """
        self.find_workspace_bytes(node)

    def find_workspace_bytes(self, node: MatmulNode) -> int:
        """Returns what the matmul's algorithm needs of the workspace that is planned for it.

        Raises:
            UnsupportedError: the bindings are missing.
            CudaError: as for `prepare`.
        """
        with self._lock, contextlib.ExitStack() as stack:
            self._open()
            descriptors = self._describe(node, stack)
            return self._choose(node, descriptors).workspace_bytes

    def enqueue(self, node: MatmulNode, locate: Locate, stream: int) -> None:
        """Enqueues one matmul, or adds it to the graph that the stream is capturing.

        Args:
            node: the matmul.
            locate: the address of a byte range.
            stream: handle of a stream of the current context.

        Raises:
            UnsupportedError: the bindings are missing.
            CudaError: a call failed, or the library is not the one that XLA has loaded.
        """
        addresses = {role: locate(use) for role, use in node.operands}
        with self._lock, contextlib.ExitStack() as stack:
            self._open()
            descriptors = self._describe(node, stack)
            algorithm = self._choose(node, descriptors)
            self._set_addresses(node, descriptors.operation, addresses)
            self._multiply(node, descriptors, algorithm, addresses, stream)

    def close(self) -> None:
        """Destroys the handle; further calls do nothing, and a further matmul makes a new one."""
        with self._lock:
            if self._handle:
                self._call("cublasLtDestroy", "close", self._lt.destroy, self._handle)
            self._handle = 0

    @property
    def _lt(self) -> Any:
        return self._nvmath.bindings.cublasLt

    def _open(self) -> None:
        if self._handle:
            return
        self._permitted_bytes = read_cublas_workspace_bytes()
        self._nvmath = self._load()
        handle = self._call("cublasLtCreate", "the first matmul", self._lt.create)
        try:
            check_one_library("libcublasLt", self._read_maps())
        except CudaError:
            self._lt.destroy(handle)
            raise
        self._handle = handle

    def _describe(self, node: MatmulNode, stack: contextlib.ExitStack) -> Descriptors:
        """Makes the descriptors; the stack destroys them."""
        matmul = node.matmul
        layouts = [
            self._describe_layout(node, layout, stack)
            for layout in (matmul.a, matmul.b, matmul.c, matmul.d)
        ]
        compute_types = self._nvmath.bindings.cublas.ComputeType
        operation = self._call(
            "cublasLtMatmulDescCreate",
            node.name,
            self._lt.matmul_desc_create,
            getattr(compute_types, f"COMPUTE_{matmul.compute_type}"),
            self._find_data_type(matmul.scale_type),
        )
        stack.callback(self._lt.matmul_desc_destroy, operation)
        operations = self._nvmath.bindings.cublas.Operation
        values = {
            "POINTER_MODE": self._lt.PointerMode.HOST,
            "TRANSA": getattr(operations, matmul.a.transpose),
            "TRANSB": getattr(operations, matmul.b.transpose),
            "EPILOGUE": getattr(self._lt.Epilogue, matmul.epilogue),
            "FAST_ACCUM": matmul.has_fast_accumulation,
        }
        self._set_attributes(node, operation, values)
        return Descriptors(operation, *layouts)

    def _describe_layout(
        self, node: MatmulNode, layout: MatrixLayout, stack: contextlib.ExitStack
    ) -> int:
        lt = self._lt
        descriptor = self._call(
            "cublasLtMatrixLayoutCreate",
            node.name,
            lt.matrix_layout_create,
            self._find_data_type(layout.dtype),
            layout.rows,
            layout.columns,
            layout.leading_stride,
        )
        stack.callback(lt.matrix_layout_destroy, descriptor)
        values = {
            "ORDER": lt.Order.ROW if layout.is_row_order else lt.Order.COL,
            "BATCH_COUNT": layout.batch_count,
            "STRIDED_BATCH_OFFSET": layout.batch_stride,
        }
        for name, value in values.items():
            attribute = getattr(lt.MatrixLayoutAttribute, name)
            buffer = np.array([value], lt.get_matrix_layout_attribute_dtype(attribute))
            self._call(
                f"cublasLtMatrixLayoutSetAttribute({name}={value})",
                node.name,
                lt.matrix_layout_set_attribute,
                descriptor,
                attribute,
                buffer.ctypes.data,
                buffer.nbytes,
            )
        return descriptor

    def _set_attributes(self, node: MatmulNode, operation: int, values: dict[str, int]) -> None:
        lt = self._lt
        for name, value in values.items():
            attribute = getattr(lt.MatmulDescAttribute, name)
            buffer = np.array([value], lt.get_matmul_desc_attribute_dtype(attribute))
            self._call(
                f"cublasLtMatmulDescSetAttribute({name}={value})",
                node.name,
                lt.matmul_desc_set_attribute,
                operation,
                attribute,
                buffer.ctypes.data,
                buffer.nbytes,
            )

    def _set_addresses(self, node: MatmulNode, operation: int, addresses: dict[str, int]) -> None:
        values = {
            attribute: addresses[role]
            for role, attribute in ADDRESS_ATTRIBUTES.items()
            if role in addresses
        }
        if "aux" in addresses:
            values["EPILOGUE_AUX_LD"] = node.matmul.d.leading_stride
            values["EPILOGUE_AUX_BATCH_STRIDE"] = node.matmul.d.batch_stride
        self._set_attributes(node, operation, values)

    def _choose(self, node: MatmulNode, descriptors: Descriptors) -> MatmulAlgorithm:
        """See Note [The algorithm that XLA chose]."""
        matmul, permitted_bytes = node.matmul, self._find_workspace_bytes(node)
        key = (matmul, permitted_bytes)
        if key in self._algorithms:
            return self._algorithms[key]
        index = matmul.algorithm_index
        length = 1 if index == 0 else LIST_LENGTH
        limit_bytes = matmul.workspace_limit_bytes
        chosen = self._list_algorithms(node, descriptors, limit_bytes, length)[index:][:1]
        if chosen and chosen[0].workspace_bytes > permitted_bytes:
            limit_bytes, index = permitted_bytes, 0
            chosen = self._list_algorithms(node, descriptors, limit_bytes, 1)
        if not chosen:
            raise CudaError(
                f"cublasLt has no algorithm {index} for the matmul `{node.name}`",
                where=f"cublasLtMatmulAlgoGetHeuristic with {limit_bytes} bytes of workspace",
                why="the list is shorter than the one that XLA chose from",
                fix="unset CUBLAS_WORKSPACE_CONFIG; if that does not help, report this text",
                anchor="cuda",
            )
        self._algorithms[key] = chosen[0]
        return chosen[0]

    def _find_workspace_bytes(self, node: MatmulNode) -> int:
        planned_bytes = sum(use.nbytes for role, use in node.operands if role == "workspace")
        if self._permitted_bytes is None:
            return planned_bytes
        return min(planned_bytes, self._permitted_bytes)

    def _list_algorithms(
        self, node: MatmulNode, descriptors: Descriptors, limit_bytes: int, length: int
    ) -> list[MatmulAlgorithm]:
        lt = self._lt
        results: Any = np.zeros(length, lt.matmul_heuristic_result_dtype)
        found = np.zeros(1, np.int32)
        preference = self._call(
            "cublasLtMatmulPreferenceCreate", node.name, lt.matmul_preference_create
        )
        try:
            attribute = lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
            limit = np.array([limit_bytes], lt.get_matmul_preference_attribute_dtype(attribute))
            self._call(
                f"cublasLtMatmulPreferenceSetAttribute(MAX_WORKSPACE_BYTES={limit_bytes})",
                node.name,
                lt.matmul_preference_set_attribute,
                preference,
                attribute,
                limit.ctypes.data,
                limit.nbytes,
            )
            self._call(
                f"cublasLtMatmulAlgoGetHeuristic({length} of {limit_bytes} bytes)",
                node.name,
                lt.matmul_algo_get_heuristic,
                self._handle,
                *dataclasses.astuple(descriptors),
                preference,
                length,
                results.ctypes.data,
                found.ctypes.data,
            )
        finally:
            lt.matmul_preference_destroy(preference)
        return [
            MatmulAlgorithm(results["algo"][i : i + 1].copy(), int(results["workspace_size"][i]))
            for i in range(int(found[0]))
            if results["state"][i] == STATUS_SUCCESS
        ]

    def _multiply(
        self,
        node: MatmulNode,
        descriptors: Descriptors,
        algorithm: MatmulAlgorithm,
        addresses: dict[str, int],
        stream: int,
    ) -> None:
        matmul = node.matmul
        scale_type = np.dtype(matmul.scale_type)
        is_complex = scale_type.kind == "c"
        alpha = np.array([matmul.alpha if is_complex else matmul.alpha.real], scale_type)
        beta = np.array([matmul.beta], scale_type)
        # As XLA does: no workspace for an algorithm that needs none.
        has_workspace = algorithm.workspace_bytes > 0
        self._call(
            "cublasLtMatmul",
            node.name,
            self._lt.matmul,
            self._handle,
            descriptors.operation,
            alpha.ctypes.data,
            addresses["a"],
            descriptors.a,
            addresses["b"],
            descriptors.b,
            beta.ctypes.data,
            addresses.get("c", 0),
            descriptors.c,
            addresses["d"],
            descriptors.d,
            algorithm.opaque.ctypes.data,
            addresses["workspace"] if has_workspace else 0,
            self._find_workspace_bytes(node) if has_workspace else 0,
            stream,
        )

    def _find_data_type(self, dtype: str) -> int:
        return getattr(self._nvmath.CudaDataType, DATA_TYPES[dtype])

    def _call(self, call: str, place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the bindings; their errors become ours, with the call and its arguments."""
        try:
            return function(*arguments)
        except (self._lt.cuBLASLtError, RuntimeError) as error:
            raise CudaError(
                f"{call} failed: {error}",
                where=f"{place}, arguments ({', '.join(map(str, arguments))})",
                why="cublasLt refused the call, or it could not be loaded",
                fix="check the driver and the CUDA wheels; if they are right, report this text",
                anchor="cuda",
            ) from error
